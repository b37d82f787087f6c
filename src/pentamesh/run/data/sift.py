"""Sift: the rows that are in order and those that are not, each into a file of its own; both appear whole, or neither does."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from pentamesh.errors import InputError, Problem
from pentamesh.run.data.alike import row_key
from pentamesh.run.data.doctor import Diagnosis, EncoderOf, examined
from pentamesh.run.data.judge import Judged, Length, Subject
from pentamesh.run.data.rows import files_of

__all__ = ["CLEAN", "REJECTED", "check_writable", "sift"]

CLEAN, REJECTED = "clean.jsonl", "rejected.jsonl"


def check_writable(folder: Path, subjects: tuple[Subject, ...], *, force: bool) -> None:
    """Raises InputError where the files cannot be written to `folder` without losing others."""
    problems = []
    read = {file.resolve() for s in subjects for place in s.places for file in files_of(place)}
    if folder.exists() and not folder.is_dir():
        problems.append(Problem(f"{folder} is no folder", "--out", "name a folder"))
    for path in (folder / CLEAN, folder / REJECTED):
        if path.resolve() in read:
            problems.append(Problem(f"{path} is among the files that are read", "--out", "name another folder"))
        elif path.is_dir():
            problems.append(Problem(f"{path} is a folder", "--out", "name another folder"))
        elif (path.exists() or path.is_symlink()) and not force:
            problems.append(Problem(f"{path} is there already", "--out", "name another folder, or give --force to replace it"))
    if problems:
        raise InputError(*problems)


def sift(found: Diagnosis, folder: Path, encoder_of: EncoderOf | None) -> dict[str, int]:
    """Write the training rows that are in order as they were read, each once, and the others with where they are and why. Returns the number of
    rows in each file and of those left out for being there already."""
    repeated, seen = found.best.repeats.repeated(), set[int]()
    counts = {CLEAN: 0, REJECTED: 0, "repeated": 0}
    with _written(folder) as (clean, rejected):
        for subject, row in examined(found.subjects, found.length, encoder_of, found.best):
            if not subject.is_train:
                continue
            if why := _why(row, found.length):
                _line(rejected, {"where": row.where, "why": why} | ({"row": row.row.value} if row.row else {}))
                counts[REJECTED] += 1
            elif row.row and row.sample and (key := row_key(row.sample, 0)) not in seen:
                _line(clean, row.row.value)
                counts[CLEAN] += 1
                seen |= {key} & repeated
            else:
                counts["repeated"] += 1
    return counts


def _why(row: Judged, length: Length) -> list[str]:
    """What keeps a row from being trained on."""
    if row.dropped == "too_long":
        return [f"{row.num_tokens:,} tokens, and batch.seq_len = {length.seq_len:,}"]
    return [problem.what for problem in row.faults] or ([row.dropped.replace("_", " ")] if row.dropped else [])


def _line(file: TextIO, value: Any) -> None:
    try:
        line = json.dumps(value, ensure_ascii=False, default=str)
        line.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        line = json.dumps(value, default=str)
    file.write(line + "\n")


@contextmanager
def _written(folder: Path) -> Iterator[tuple[TextIO, TextIO]]:
    """Two files to write to, which take their names when the block ends well and are gone when it does not."""
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    partial = {name: folder / f".{name}.partial" for name in (CLEAN, REJECTED)}
    try:
        with ExitStack() as files:
            clean, rejected = (files.enter_context(path.open("w", encoding="utf-8", newline="\n")) for path in partial.values())
            yield clean, rejected
        for name, path in partial.items():
            os.replace(path, folder / name)
    except BaseException:
        for path in partial.values():
            path.unlink(missing_ok=True)
        if made and not any(folder.iterdir()):
            folder.rmdir()
        raise
