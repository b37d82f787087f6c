"""Sheets: rows in CSV and TSV files, their keys in the first line. A cell of turns or of tools holds the JSON text of a list."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pentamesh.errors import Problem
from pentamesh.run.data.lines import MAX_ROW_BYTES, Row, decoded, text_lines
from pentamesh.run.data.opened import opened

__all__ = ["LISTS", "comma_separated", "tab_separated"]

# Columns that hold lists in every form of rows; elsewhere text that looks like a list stays text.
LISTS = ("messages", "conversations", "tools")
# A limit of the whole process, 131,072 characters where nobody sets it; the module keeps four bytes a character.
csv.field_size_limit(MAX_ROW_BYTES // 4)
QUOTES = "a cell with quotes or line ends stands in quotes, and a quote inside it is written twice; the rest of the file was not read"


def comma_separated(file: Path) -> Iterator[Row | Problem]:
    """One row a record of a .csv file."""
    return _sheet(file, ",")


def tab_separated(file: Path) -> Iterator[Row | Problem]:
    """One row a record of a .tsv file."""
    return _sheet(file, "\t")


def _sheet(file: Path, delimiter: str) -> Iterator[Row | Problem]:
    with opened(file) as binary:
        records = _records(binary, file, delimiter)
        header = next(records, None)
        if header is None or isinstance(header, Problem):
            yield from [header] if header else []
            return
        if fault := _header_fault(header.value, delimiter):
            yield Problem(fault[0], header.where, fault[1])
            return
        for record in records:
            yield record if isinstance(record, Problem) else _row(header.value, record)


def _records(binary: BinaryIO, file: Path, delimiter: str) -> Iterator[Row | Problem]:
    """The cells of each record, named by the line where it begins."""
    lines = _Lines(binary, file)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        where = f"{file}:{lines.number + 1}"
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield lines.fault or Problem(f"not {'CSV' if delimiter == ',' else 'TSV'}: {error}", where, QUOTES)
            return
        if lines.fault:
            yield lines.fault
            lines.fault = None
        elif cells:  # none: an empty line
            yield Row(where, cells)


class _Lines:
    """The lines of a file as text, and the first fault of those of the record at hand."""

    def __init__(self, binary: BinaryIO, file: Path) -> None:
        self._lines, self._file = text_lines(binary, file), file
        self.number = 0
        self.fault: Problem | None = None

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.number += 1
        text = line if isinstance(line, Problem) else decoded(line, f"{self._file}:{self.number}")
        if isinstance(text, str):
            return text
        self.fault = self.fault or text
        return "" if isinstance(line, Problem) else line.decode(errors="replace")


def _header_fault(names: list[str], delimiter: str) -> tuple[str, str] | None:
    """What keeps a first line from naming columns, and what would work."""
    if not any(names):
        return "the first line names no column", "the keys of a row are the names of its columns"
    if twice := [name for name, times in Counter(filter(None, names)).items() if times > 1]:
        return f"the first line names {', '.join(f'`{name}`' for name in twice)} twice", "give every column a name of its own"
    if other := next((c for c in ",;\t" if c != delimiter and c in names[0] and len(names) == 1), ""):
        known = {",": "commas: let its name end in .csv", "\t": "tabs: let its name end in .tsv", ";": "semicolons: separate by commas"}
        return f"the first line is one name, `{names[0]}`", f"it looks like {known[other]}"
    return None


def _row(names: list[str], record: Row) -> Row | Problem:
    if len(record.value) != len(names):
        return Problem(f"the row has {len(record.value)} cells, and the first line names {len(names)} columns", record.where, QUOTES.split(";")[0])
    value: dict[str, Any] = {name: cell for name, cell in zip(names, record.value, strict=True) if name}  # without one: an index
    for key in LISTS:
        if isinstance(cell := value.get(key), str):
            found = _list(cell)
            if isinstance(found, str):
                return Problem(f"`{key}` is not the JSON text of a list: {found}", record.where, "write the cell by json.dumps")
            value[key] = found
    return Row(record.where, value)


def _list(cell: str) -> list[Any] | str | None:
    """The list that a cell is the text of, nothing for an empty cell, or why it is none."""
    if not cell.strip():
        return None
    try:
        found = json.loads(cell)
    except json.JSONDecodeError as error:
        return f"{error.msg} at character {error.pos}"
    except (ValueError, RecursionError) as error:
        return str(error)
    return found if isinstance(found, list) else "it is another value"
