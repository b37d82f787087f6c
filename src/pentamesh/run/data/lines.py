"""Lines: rows in files of JSON and text, read one at a time. A text is one document and is read whole."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pentamesh.errors import Problem
from pentamesh.job.files import COMPRESSED
from pentamesh.run.data.arrays import Cut, elements
from pentamesh.run.data.opened import BOM, CUT_SHORT, opened
from pentamesh.units import format_bytes

__all__ = ["MAX_ROW_BYTES", "Row", "decoded", "document", "json_file", "json_lines", "text_lines"]

# No row that people train on comes near: what is longer is a file without line ends, and would be in memory several times over.
MAX_ROW_BYTES = 2**28
CHUNK_BYTES = 2**20
ONE_LINE = "a row is one JSON object on one line"
# What a file of another kind begins with.
MAGIC = {
    b"\xff\xfe": "UTF-16: convert it to UTF-8 text",
    b"\xfe\xff": "UTF-16: convert it to UTF-8 text",
    **{
        magic: f"{COMPRESSED[suffix]}: let its name end in {suffix}"
        for magic, suffix in ((b"\x1f\x8b", ".gz"), (b"\xfd7", ".xz"), (b"\x28\xb5", ".zst"))
    },
}


@dataclass(frozen=True)
class Row:
    """One row as it stands in its file: `where` is `file:line` in lines, `file[index]` in an array or a table, or the file of a document."""

    where: str
    value: Any


def json_lines(file: Path) -> Iterator[Row | Problem]:
    """One JSON object a line."""
    with opened(file) as binary:
        for number, line in enumerate(text_lines(binary, file), start=1):
            if isinstance(line, Problem):
                yield line
            elif line.strip():
                yield _parsed(line.rstrip(), f"{file}:{number}")


def text_lines(binary: BinaryIO, file: Path) -> Iterator[bytes | Problem]:
    """The lines of a file, without the mark that a text may begin with, and a Problem in place of one that is too long to be a row."""
    number = 0
    while line := binary.readline(MAX_ROW_BYTES + 1):
        number += 1
        if len(line) <= MAX_ROW_BYTES:
            yield line.removeprefix(BOM) if number == 1 else line
            continue
        while line and not line.endswith(b"\n"):
            line = binary.readline(CHUNK_BYTES)
        yield _too_long(f"{file}:{number}")


def _too_long(where: str) -> Problem:
    return Problem(f"the row is longer than {format_bytes(MAX_ROW_BYTES)}", where, "a row is one sample: write one JSON object a line")


def json_file(file: Path) -> Iterator[Row | Problem]:
    """An array of rows, lines of JSON under the name of .json, or a single object."""
    with opened(file) as lines:
        start = lines.read(CHUNK_BYTES).removeprefix(BOM).lstrip()
    if start.startswith(b"["):
        yield from _array(file)
        return
    first = start.partition(b"\n")
    if first[1] and isinstance(_parsed(first[0], ""), Row):
        yield from json_lines(file)
    elif start:
        whole = _whole(file)
        found = whole if isinstance(whole, Problem) else _parsed(whole, str(file))
        torn_line = isinstance(found, Problem) and found.hint == ONE_LINE and first[1] and start.startswith(b"{")
        yield from json_lines(file) if torn_line else [found]


def _array(file: Path) -> Iterator[Row | Problem]:
    with opened(file) as binary:
        try:
            for index, element in enumerate(elements(binary, MAX_ROW_BYTES)):
                yield _parsed(element, f"{file}[{index}]")
        except Cut as cut:
            yield _too_long(f"{file}[{cut.index}]") if cut.too_long else Problem(f"not a whole JSON array: {cut}", f"{file}[{cut.index}]", CUT_SHORT)


def document(file: Path) -> Iterator[Row | Problem]:
    """The whole file as one text."""
    whole = _whole(file)
    text = whole if isinstance(whole, Problem) else decoded(whole, str(file))
    if isinstance(text, Problem):
        yield text
    elif text.strip():
        yield Row(str(file), {"text": text})


def _whole(file: Path) -> bytes | Problem:
    with opened(file) as binary:
        found = binary.read(MAX_ROW_BYTES + 1)
    if len(found) > MAX_ROW_BYTES:
        what = f"the file is one document and longer than {format_bytes(MAX_ROW_BYTES)}"
        return Problem(what, str(file), "split it into files, or write one document a line of .jsonl")
    return found.removeprefix(BOM)


def decoded(data: bytes, where: str) -> str | Problem:
    """The text of UTF-8 bytes, or what is wrong with them."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        known = MAGIC.get(data[:2])
        hint = f"it looks like {known}" if known else "convert it, from Latin-1 say: `iconv -f latin1 -t utf-8`"
        return Problem(f"byte {error.start} (0x{data[error.start]:02x}) is not UTF-8", where, hint)


def _parsed(data: bytes, where: str) -> Row | Problem:
    text = decoded(data, where)
    if isinstance(text, Problem):
        return text
    twice: list[str] = []

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice.extend(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        return found

    try:
        value = json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        return Problem(f"not JSON: {error.msg} at byte {len(text[: error.pos].encode())}", where, ONE_LINE)
    except (ValueError, RecursionError) as error:  # integers of thousands of digits, or lists in lists in lists
        return Problem(f"JSON that cannot be read: {error}", where)
    if twice:
        return Problem(f"`{twice[0]}` is twice in one object", where, "keep one of them: only the last would be read")
    return Row(where, value)
