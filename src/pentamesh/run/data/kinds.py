"""Kinds: what a value of a row is, in words for whoever has to mend it."""

from __future__ import annotations

from typing import Any

__all__ = ["kind", "string_fault"]


def string_fault(value: Any, field: str) -> str:
    """What keeps a value from being text for a tokenizer, or nothing."""
    if not isinstance(value, str):
        return f"`{field}` is {kind(value)}, not a string"
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair; no tokenizer takes it
        return f"`{field}` has half of a surrogate pair at character {error.start}"
    return ""


def kind(value: Any) -> str:
    """The kind of a value in the words of JSON, where it has one."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value)) or f"of the type {type(value).__name__}"
