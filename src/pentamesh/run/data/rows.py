"""Rows: files of training data, read one row at a time, every fault named by file and row.

Memory is bounded by the longest row, and for Parquet by a batch of rows; a text file is one document and is read whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

from pentamesh.errors import InputError, Problem
from pentamesh.run.data.arrays import Cut, elements
from pentamesh.units import format_bytes

if TYPE_CHECKING:
    import pyarrow

__all__ = ["MAX_PROBLEMS", "READERS", "HubSplit", "Place", "Problems", "Row", "read_rows"]

MAX_PROBLEMS = 20  # distinct ones: more does not help whoever reads them
MAX_PLACES = 5
# No row that people train on comes near: what is longer is a file without line ends, and would be in memory several times over.
MAX_ROW_BYTES = 2**28
CHUNK_BYTES = 2**20
ROWS_AT_ONCE = 256
CUT_SHORT = "copy or download the file again: it may be cut short"
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Row:
    """One row as it stands in its file: `where` is `file:line` in JSONL, `file[index]` in a JSON array or Parquet, or the file of a document."""

    where: str
    value: Any


@dataclass(frozen=True)
class HubSplit:
    """A split of a data set of the hub, as it lies in the local cache; rows are counted through all of its files."""

    name: str
    files: tuple[Path, ...]

    def __str__(self) -> str:
        return self.name


Place = Path | HubSplit


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


def read_rows(places: Iterable[Place]) -> Iterator[Row | Problem]:
    """Every row of `places` in order, and a Problem in place of each that cannot be read."""
    for place in places:
        num_rows = 0
        try:
            for row in _rows(place):
                num_rows += 1
                yield row
        except OSError as error:
            yield Problem(f"the file cannot be read: {error.strerror or error}", str(place))
        except (OverflowError, ValueError) as error:  # a date beyond Python's calendar
            yield Problem(f"a value cannot be read: {error}", f"{place}, after {num_rows:,} rows", "leave out the columns that are not trained")
        else:
            if not num_rows:
                yield Problem("the file has no rows" if isinstance(place, Path) else "the split has no rows", str(place))


def _rows(place: Place) -> Iterator[Row | Problem]:
    if isinstance(place, Path):
        yield from READERS[place.suffix.lower()](place)
        return
    values = (value for file in place.files for value in _arrow(file))
    yield from (Row(f"{place}[{index}]", value) for index, value in enumerate(values))


def _lines(file: Path) -> Iterator[Row | Problem]:
    with file.open("rb") as lines:
        number = 0
        while line := lines.readline(MAX_ROW_BYTES + 1):
            number += 1
            if len(line) > MAX_ROW_BYTES:
                yield _too_long(f"{file}:{number}")
                _skip_line(lines, line)
                continue
            line = line.removeprefix(BOM) if number == 1 else line
            if line.strip():
                yield _parsed(line.rstrip(), f"{file}:{number}")


def _skip_line(lines: BinaryIO, line: bytes) -> None:
    while line and not line.endswith(b"\n"):
        line = lines.readline(CHUNK_BYTES)


def _too_long(where: str) -> Problem:
    return Problem(f"the row is longer than {format_bytes(MAX_ROW_BYTES)}", where, "a row is one sample: write one JSON object a line")


def _json(file: Path) -> Iterator[Row | Problem]:
    """An array of rows, lines of JSON under the name of .json, or a single object."""
    with file.open("rb") as lines:
        start = lines.read(CHUNK_BYTES).removeprefix(BOM).lstrip()
    if start.startswith(b"["):
        yield from _array(file)
        return
    first = start.partition(b"\n")
    if first[1] and isinstance(_parsed(first[0], ""), Row):
        yield from _lines(file)
    elif start:
        whole = _whole(file)
        found = whole if isinstance(whole, Problem) else _parsed(whole, str(file))
        torn_line = isinstance(found, Problem) and first[1] and start.startswith(b"{")
        yield from _lines(file) if torn_line else [found]


def _array(file: Path) -> Iterator[Row | Problem]:
    with file.open("rb") as binary:
        try:
            for index, element in enumerate(elements(binary, MAX_ROW_BYTES)):
                yield _parsed(element, f"{file}[{index}]")
        except Cut as cut:
            yield _too_long(f"{file}[{cut.index}]") if cut.too_long else Problem(f"not a whole JSON array: {cut}", f"{file}[{cut.index}]", CUT_SHORT)


def _document(file: Path) -> Iterator[Row | Problem]:
    whole = _whole(file)
    text = whole if isinstance(whole, Problem) else _decoded(whole, str(file))
    if isinstance(text, Problem):
        yield text
    elif text.strip():
        yield Row(str(file), {"text": text})


def _whole(file: Path) -> bytes | Problem:
    with file.open("rb") as opened:
        found = opened.read(MAX_ROW_BYTES + 1)
    if len(found) > MAX_ROW_BYTES:
        what = f"the file is one document and longer than {format_bytes(MAX_ROW_BYTES)}"
        return Problem(what, str(file), "split it into files, or write one document a line of .jsonl")
    return found.removeprefix(BOM)


def _parquet(file: Path) -> Iterator[Row | Problem]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as opened:
            batches = opened.iter_batches(batch_size=ROWS_AT_ONCE)
            yield from (Row(f"{file}[{index}]", value) for index, value in enumerate(_values(batches)))
    except (ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.strerror:  # of the system, not of Arrow
            raise
        said = "".join(c for c in str(error).partition("\n")[0] if c.isprintable())
        yield Problem(f"not a whole Parquet file: {said}", str(file), CUT_SHORT)


def _arrow(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file in the cache of `datasets`."""
    from pyarrow import ipc, memory_map

    with memory_map(str(file)) as mapped, ipc.open_stream(mapped) as batches:
        yield from _values(batches)


def _values(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[dict[str, Any]]:
    """The rows of columns; a key that is null inside a column is left out, since only there it cannot be absent."""
    for batch in batches:
        for start in range(0, batch.num_rows, ROWS_AT_ONCE):
            for value in batch.slice(start, ROWS_AT_ONCE).to_pylist():
                yield {key: _without_nulls(inner) for key, inner in value.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return value


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


READERS = {".jsonl": _lines, ".ndjson": _lines, ".json": _json, ".parquet": _parquet, ".txt": _document}
