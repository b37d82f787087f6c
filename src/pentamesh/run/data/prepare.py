"""Prepare: from the files of a job to samples on disk, done once by one process.

Two passes: the first reads every row, names every fault and finds what is held out; the second tokenises. The folder appears at once, whole,
under a fingerprint of everything that decides its content; it is reused while that stays the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pentamesh.errors import InputError, Problem
from pentamesh.job.job import Data, Job
from pentamesh.run.data.encode import Encode, encoder
from pentamesh.run.data.forms import Form, Sample, checked_rows, form_of
from pentamesh.run.data.places import find_places
from pentamesh.run.data.problems import MAX_PLACES, Problems, listed
from pentamesh.run.data.rows import HubSplit, Place
from pentamesh.run.data.samples import MANIFEST, SCHEMA, VERSION, Prepared, SampleWriter, check_replaceable, open_prepared
from pentamesh.run.data.tokens import Encoded, cut_to
from pentamesh.run.data.turns import Conversation, answers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Source", "prepare", "source", "survey"]

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Source:
    """Where the rows of a job come from, places of training rows and either places or a share of held-out ones; and how they are read."""

    train: tuple[Place, ...]
    held_out: tuple[Place, ...]
    share: float | None
    form: Form
    data: Data


def source(job: Job, base: Path) -> Source:
    """The places that `job.data` names and the form of their rows. Raises InputError with every name that leads nowhere."""
    data, problems = job.data, []
    found: dict[str, tuple[Place, ...]] = {"train": (), "held_out": ()}
    for key in found:
        try:
            found[key] = find_places(data, key, base)
        except InputError as error:
            problems += error.problems
    if data.train is None:
        problems.append(Problem("no training data", "data.train", "give a file or glob, or a data set of the hub"))
    share = None if isinstance(data.held_out, str) else data.held_out
    if share is not None and not 0 < share < 1:
        problems.append(Problem(f"a share of {share:g} cannot be held out", "data.held_out", "give a share such as 0.05, or a file"))
    if problems:
        raise InputError(*problems)
    return Source(found["train"], found["held_out"], share, form_of(found["train"], data.form, data.columns), data)


def prepare(job: Job, tokenizer: PreTrainedTokenizerBase, base: Path, folder: Path, *, progress: Progress | None = None) -> Prepared:
    """The job's data as samples in `folder`, made now or found there; `progress` hears the number of rows that are tokenised.

    Raises: InputError, with the faults of all rows at once.
    """
    asked = source(job, base)
    fingerprint = _fingerprint(job, tokenizer, asked)
    if (folder / MANIFEST).is_file():
        try:
            if (found := open_prepared(folder)).report["fingerprint"] == fingerprint:
                return found
        except InputError:
            pass  # torn or of another version: made again below
    for ours in (folder, _partial(folder)):
        check_replaceable(ours)
    encode = encoder(tokenizer, asked.form)
    held, num_repeated = survey(asked, job.training.seed)
    partial = _empty(_partial(folder))
    try:
        splits = _write(job, asked, encode, held, partial, progress)
        report = _facts(job, tokenizer, asked) | {"fingerprint": fingerprint, "repeated_rows": num_repeated, "splits": splits}
        (partial / MANIFEST).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return open_prepared(folder)


def _facts(job: Job, tokenizer: PreTrainedTokenizerBase, asked: Source) -> dict[str, Any]:
    pad_id = tokenizer.pad_token_id if isinstance(tokenizer.pad_token_id, int) else 0
    facts = {"schema": SCHEMA, "version": VERSION, "form": asked.form, "seq_len": job.batch.seq_len}
    return facts | {"too_long": job.data.too_long, "pad_id": pad_id}


def _partial(folder: Path) -> Path:
    return folder.with_name(folder.name + ".partial")


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _fingerprint(job: Job, tokenizer: PreTrainedTokenizerBase, asked: Source) -> str:
    """Sixteen hex digits of everything that decides the samples. Files count by name, size and time of change."""
    named = (file for place in (*asked.train, *asked.held_out) for file in (place.files if isinstance(place, HubSplit) else (place,)))
    files = [(str(file.absolute()), stat.st_size, stat.st_mtime_ns) for file in named for stat in [file.stat()]]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    words = [hashlib.sha256(vocabulary.encode()).hexdigest(), repr(tokenizer.chat_template), repr(tokenizer.special_tokens_map)]
    decides = [VERSION, files, words, asked.form, job.batch.seq_len, job.batch.packing, job.data.model_dump(mode="json"), job.training.seed]
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


def _key(row: Sample, seed: int) -> int:
    """64 bits of what is trained of a row: equal rows have equal keys, and among different ones their order is a draw by `seed`.

    Two different rows of a million share a key with a probability of 3e-8 (birthday bound, n^2 / 2^65).
    """
    said = row.content
    if isinstance(said, Conversation) and not said.tools and said.trained == answers(said.messages):
        said = said.messages
    content = json.dumps(said, sort_keys=True, default=vars).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8, salt=seed.to_bytes(16, "little")).digest(), "little")


def survey(asked: Source, seed: int) -> tuple[frozenset[int], int]:
    """The keys of the held-out rows, and how many training rows repeat another. Raises InputError with all faults of all rows."""
    with Problems() as problems:
        keys = array("Q", (_key(row, seed) for row in checked_rows(asked.train, asked.form, problems, asked.data.max_rows, asked.data)))
        held = frozenset(_key(row, seed) for row in checked_rows(asked.held_out, asked.form, problems, data=asked.data))
    distinct = np.unique(np.frombuffer(keys, np.uint64))  # sorted
    if asked.share is not None:
        held = frozenset(distinct[: max(1, round(asked.share * len(distinct)))].tolist())
        if len(held) == len(distinct):
            what = f"held_out = {asked.share:g} of {len(distinct):,} different rows leaves none to train on"
            raise InputError(what, where="data.held_out", hint="give more rows, hold out a smaller share, or name a file of held-out rows")
    return held, len(keys) - len(distinct)


def _placed(asked: Source, held: frozenset[int], seed: int, problems: Problems) -> Iterator[tuple[str, Sample, str]]:
    """Every row with its split and, where it is not to be used, the reason: a held-out row is never trained on, however often it is there."""
    waiting = set(held) if asked.share is not None else set()
    for row in checked_rows(asked.train, asked.form, problems, asked.data.max_rows, asked.data):
        key = _key(row, seed)
        if key in waiting:
            waiting.remove(key)
            yield "held_out", row, ""
        else:
            yield "train", row, "equal_to_held_out" if key in held else ""
    yield from (("held_out", row, "") for row in checked_rows(asked.held_out, asked.form, problems, data=asked.data))


@dataclass
class _TooLong:
    """The rows that do not fit, of which a few are named."""

    num_rows: int = 0
    longest: int = 0
    places: list[str] = field(default_factory=list)

    def add(self, where: str, length: int) -> None:
        self.num_rows += 1
        self.longest = max(self.longest, length)
        if len(self.places) < MAX_PLACES:
            self.places.append(f"{where} ({length:,})")

    def problem(self, seq_len: int) -> Problem:
        what = f"{self.num_rows:,} rows are longer than batch.seq_len = {seq_len:,}: the longest has {self.longest:,} tokens"
        hint = f"set batch.seq_len: {self.longest}, or data.too_long: drop, truncate or split"
        return Problem(what, listed(self.places, self.num_rows), hint)


def _write(job: Job, asked: Source, encode: Encode, held: frozenset[int], folder: Path, progress: Progress | None) -> dict[str, dict[str, Any]]:
    """Tokenise every row into its split. Returns the manifest's entry of each; raises InputError with all faults at once."""
    writers = {name: SampleWriter(folder, name) for name in (["train", "held_out"] if held else ["train"])}
    too_long = _TooLong()
    with Problems() as problems:
        for num_rows, (name, row, unused) in enumerate(_placed(asked, held, job.training.seed, problems), start=1):
            if unused:
                writers[name].drop(unused)
            elif isinstance(encoded := encode(row), Encoded):
                cut = cut_to(encoded, asked.form, job.batch.seq_len, job.data.too_long)
                writers[name].add(encoded, cut)
                if cut.dropped == "too_long":
                    too_long.add(row.where, len(encoded.ids) - 1)
            else:
                problems.add(*encoded)
            if progress:
                progress(num_rows)
        if too_long.num_rows and job.data.too_long == "error":
            problems.add(too_long.problem(job.batch.seq_len))
    pack_to = {"train": job.batch.seq_len if job.batch.packing else None}
    return {name: _finished(name, writer, pack_to.get(name)) for name, writer in writers.items()}


def _finished(name: str, writer: SampleWriter, pack_to: int | None) -> dict[str, Any]:
    split = writer.close(pack_to)
    if not split["samples"]:
        reasons = ", ".join(f"{reason} {n:,}" for reason, n in split["dropped"].items())
        raise InputError(f"none of {split['rows']:,} rows is left to use", where=f"data.{name}", hint=f"dropped: {reasons}")
    return split
