"""Rows: every place of training data, read one row at a time, every fault named by file and row.

Memory is bounded by the longest row, and for tables by a batch of rows; a text file is one document and is read whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentamesh.errors import Problem
from pentamesh.job.files import file_kind
from pentamesh.run.data.lines import Row, document, json_file, json_lines
from pentamesh.run.data.opened import TORN, unreadable
from pentamesh.run.data.problems import Problems
from pentamesh.run.data.sheets import comma_separated, tab_separated
from pentamesh.run.data.tables import arrow, parquet, without_nulls

__all__ = ["READERS", "HubSplit", "HubStream", "Place", "Problems", "Row", "files_of", "read_rows"]

READERS: dict[str, Callable[[Path], Iterator[Row | Problem]]] = {
    ".jsonl": json_lines,
    ".ndjson": json_lines,
    ".json": json_file,
    ".csv": comma_separated,
    ".tsv": tab_separated,
    ".txt": document,
    ".parquet": parquet,
    ".arrow": arrow,
    ".feather": arrow,
}


@dataclass(frozen=True)
class HubSplit:
    """A split of a data set of the hub, as it lies in the local cache; rows are counted through all of its files."""

    name: str
    files: tuple[Path, ...]

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class HubStream:
    """A split of a data set of the hub that is read over the network, as often as it is asked for; rows are counted through it."""

    name: str
    read: Callable[[], Iterator[dict[str, Any]]]

    def __str__(self) -> str:
        return self.name


Place = Path | HubSplit | HubStream


def files_of(place: Place) -> tuple[Path, ...]:
    """The local files of a place; none of what is read over the network."""
    if isinstance(place, HubStream):
        return ()
    return place.files if isinstance(place, HubSplit) else (place,)


def read_rows(places: Iterable[Place]) -> Iterator[Row | Problem]:
    """Every row of `places` in order, and a Problem in place of each that cannot be read."""
    for place in places:
        num_rows = 0
        try:
            for row in _rows(place):
                num_rows += 1
                yield row
        except TORN as error:
            yield unreadable(error, str(place), num_rows)
        except (OverflowError, ValueError) as error:  # a date beyond Python's calendar
            yield Problem(f"a value cannot be read: {error}", f"{place}, after {num_rows:,} rows", "leave out the columns that are not trained")
        else:
            if not num_rows:
                yield Problem("the file has no rows" if isinstance(place, Path) else "the split has no rows", str(place))


def _rows(place: Place) -> Iterator[Row | Problem]:
    if isinstance(place, Path):
        yield from READERS[file_kind(place.name)[0]](place)
        return
    if isinstance(place, HubStream):
        yield from (Row(f"{place}[{index}]", {key: without_nulls(inner) for key, inner in value.items()}) for index, value in enumerate(place.read()))
        return
    rows = (row for file in place.files for row in arrow(file))
    yield from (Row(f"{place}[{index}]", row.value) if isinstance(row, Row) else row for index, row in enumerate(rows))
