"""Arrays: the elements of a JSON array in a file, one after the other, without the array."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO

__all__ = ["Cut", "elements"]

CHUNK_BYTES = 2**20
# A whole string, the beginning of one that the text at hand does not end, or what gives an array its structure.
TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|"|[\[\]{},]', re.DOTALL)
BLANK = b"\xef\xbb\xbf \t\r\n"


class Cut(Exception):
    """The array ends too early, goes on after its end, or has an element beyond the limit; `index` is of the element where that shows."""

    def __init__(self, why: str, index: int, *, too_long: bool = False) -> None:
        super().__init__(why)
        self.index, self.too_long = index, too_long


def elements(file: BinaryIO, limit_bytes: int) -> Iterator[bytes]:
    """The elements of the array in `file` as they are written there. Only the element at hand is in memory, and what was read beyond it.

    Raises Cut where the array is not whole, or an element is longer than the limit.
    """
    text, scanned, begin, depth, index = b"", 0, 0, 0, 0
    while more := file.read(max(CHUNK_BYTES, len(text) - begin)):
        text, scanned, begin = text[begin:] + more, scanned - begin, 0
        for token in TOKEN.finditer(text, scanned):
            kind = token[0]
            if kind == b'"':
                scanned = token.start()
                break
            depth += (kind in b"[{") - (kind in b"]}")
            if depth == 1 and kind == b"[" and not index and not begin:
                begin = token.end()
            elif (depth == 1 and kind == b",") or depth == 0:
                if index or kind == b"," or text[begin : token.start()].strip():
                    yield text[begin : token.start()].strip()
                begin, index = token.end(), index + 1
            if depth == 0:
                _check_end(text[token.end() :], file, index)
                return
        else:
            scanned = len(text)
        if len(text) - begin > limit_bytes:
            raise Cut("an element is too long", index, too_long=True)
    raise Cut("it ends inside an element" if text[begin:].strip() else "it does not end", index)


def _check_end(rest: bytes, file: BinaryIO, index: int) -> None:
    while rest:
        if rest.strip():
            raise Cut("text follows its end", index)
        rest = file.read(CHUNK_BYTES)
