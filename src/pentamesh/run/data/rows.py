"""Rows: files of training data, read one row at a time, every fault named by file and row.

JSONL is streamed, so memory is bounded by the longest line; a JSON array and a text file (one document) are read whole.
"""

from __future__ import annotations

import difflib
import glob
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from pentamesh.errors import InputError, Problem
from pentamesh.units import format_path

__all__ = ["MAX_PROBLEMS", "Problems", "Row", "find_files", "read_rows"]

MAX_PROBLEMS = 20  # distinct ones: more does not help whoever reads them
MAX_PLACES = 5
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Row:
    """One row as it stands in its file: `where` is `file:line` in JSONL, `file[index]` in a JSON array, or the file of a document."""

    where: str
    value: Any


class Problems:
    """Faults of many rows, the same fault told once with its places; a `with` block over it ends with InputError when there were any.

    Raises: InputError, as soon as there are more than MAX_PROBLEMS different faults.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[str, str], list[str]] = {}
        self._num_rows: dict[tuple[str, str], int] = {}

    def add(self, *problems: Problem) -> None:
        for problem in problems:
            kind = (problem.what, problem.hint)
            if kind not in self._places and len(self._places) == MAX_PROBLEMS:
                more = Problem(f"at least 1 more problem, at {problem.where}; the rest was not read")
                raise InputError(*self._told(), more)
            places = self._places.setdefault(kind, [])
            self._num_rows[kind] = self._num_rows.get(kind, 0) + 1
            if len(places) < MAX_PLACES:
                places.append(problem.where)

    def _told(self) -> list[Problem]:
        return [Problem(what, _listed(places, self._num_rows[what, hint]), hint) for (what, hint), places in self._places.items()]

    def __enter__(self) -> Problems:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None and self._places:
            raise InputError(*self._told())


def _listed(places: list[str], num_rows: int) -> str:
    more = num_rows - len(places)
    return ", ".join(places) + (f" and {more:,} more" if more else "")


def find_files(pattern: str, base: Path, key: str) -> tuple[Path, ...]:
    """The files that `pattern` (a path or a glob, relative to `base`) names, sorted. Raises InputError where there is none to read."""
    path = Path(format_path(base / pattern))  # rows are named by their file, in errors and in a preview
    if path.is_file():
        return (_readable(path, key),)
    if path.is_dir():
        raise InputError(f"{path} is a folder", where=key, hint=f"name its files: `{pattern.rstrip('/')}/*.jsonl`")
    found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
    files = tuple(_readable(file, key) for file in found if file.is_file())
    if not files:
        raise InputError(f"no file {pattern!r}: looked for {path.absolute()}", where=key, hint=_similar(path))
    return files


def _readable(path: Path, key: str) -> Path:
    if path.suffix.lower() not in READERS:
        raise InputError(
            f"{path} is none of the kinds that are read: {', '.join(READERS)}", where=key, hint="convert it to .jsonl, one JSON object a line"
        )
    return path


def _similar(path: Path) -> str:
    names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=3)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return "paths are relative to the job file" if path.parent.is_dir() else f"there is no folder {path.parent.absolute()}"


def read_rows(files: Iterable[Path]) -> Iterator[Row | Problem]:
    """Every row of `files` in order, and a Problem in place of each that cannot be read."""
    for file in files:
        num_rows = 0
        try:
            for row in READERS[file.suffix.lower()](file):
                num_rows += 1
                yield row
        except OSError as error:
            yield Problem(f"the file cannot be read: {error.strerror or error}", str(file))
        else:
            if not num_rows:
                yield Problem("the file has no rows", str(file))


def _lines(file: Path) -> Iterator[Row | Problem]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            line = line.removeprefix(BOM) if number == 1 else line
            if line.strip():
                yield _parsed(line.rstrip(), f"{file}:{number}")


def _array(file: Path) -> Iterator[Row | Problem]:
    whole = file.read_bytes().removeprefix(BOM)
    if not whole.strip():
        return
    found = _parsed(whole, str(file))
    if isinstance(found, Row) and isinstance(found.value, list):
        yield from (Row(f"{file}[{index}]", value) for index, value in enumerate(found.value))
    elif isinstance(found, Problem) and whole.lstrip().startswith(b"{"):
        yield from _lines(file)  # lines of JSON under the name of .json
    else:
        yield found


def _document(file: Path) -> Iterator[Row | Problem]:
    text = _decoded(file.read_bytes().removeprefix(BOM), str(file))
    if isinstance(text, Problem):
        yield text
    elif text.strip():
        yield Row(str(file), {"text": text})


def _decoded(data: bytes, where: str) -> str | Problem:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        known = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x1f\x8b": "gzip"}.get(data[:2])
        hint = f"it looks like {known}: convert it to UTF-8 text" if known else "convert it, from Latin-1 say: `iconv -f latin1 -t utf-8`"
        return Problem(f"byte {error.start} (0x{data[error.start]:02x}) is not UTF-8", where, hint)


def _parsed(data: bytes, where: str) -> Row | Problem:
    text = _decoded(data, where)
    if isinstance(text, Problem):
        return text
    try:
        return Row(where, json.loads(text))
    except json.JSONDecodeError as error:
        return Problem(f"not JSON: {error.msg} at byte {len(text[: error.pos].encode())}", where, "a row is one JSON object on one line")
    except (ValueError, RecursionError) as error:  # integers of thousands of digits, or lists in lists in lists
        return Problem(f"JSON that cannot be read: {error}", where)


READERS = {".jsonl": _lines, ".ndjson": _lines, ".json": _array, ".txt": _document}
