"""Spelling: how vocabularies write texts that tokens stand for - bytes as letters (`Ġhouse`), or spaces as marks (`▁house`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

__all__ = ["spellings_of"]

MARK = "▁"


def spellings_of(tokenizer: Mapping[str, Any]) -> tuple[Callable[[str], str], ...]:
    """The ways in which a text may stand in the vocabulary of a tokenizer.json: as it is, and as its parts spell it."""
    parts = [part for key in ("normalizer", "pre_tokenizer") for part in _parts(tokenizer.get(key))]
    kinds = {part.get("type") for part in parts}
    if "ByteLevel" in kinds:
        return (str, _as_letters)
    marks = [part for part in parts if part.get("type") == "Metaspace" or part.get("content") == MARK]
    if not marks:
        return (str,)
    # Older files say `add_prefix_space`, which is true where it is not given.
    leads = [part.get("prepend_scheme", "always" if part.get("add_prefix_space", True) else "never") for part in parts if part["type"] == "Metaspace"]
    is_led = "Prepend" in kinds or any(scheme != "never" for scheme in leads)
    return (str, _with_marks, _led_by_a_mark) if is_led else (str, _with_marks)


def _parts(part: Any) -> Iterator[Mapping[str, Any]]:
    """A normalizer or pre-tokenizer, or those that a sequence is made of."""
    if part is None:
        return
    yield part
    for inner in part.get("normalizers") or part.get("pretokenizers") or ():
        yield from _parts(inner)


def _with_marks(text: str) -> str:
    return text.replace(" ", MARK)


def _led_by_a_mark(text: str) -> str:
    return MARK + _with_marks(text)


def _as_letters(text: str) -> str:
    return "".join(_letters()[byte] for byte in text.encode())


@cache
def _letters() -> tuple[str, ...]:
    """A letter for each byte: itself where it is printable in Latin-1, else the next from 256 on. Source: GPT-2, `bytes_to_unicode`."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return tuple(chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256))
