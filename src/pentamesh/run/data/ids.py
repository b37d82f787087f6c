"""Ids: rows that are tokens already, in the columns that transformers' models take.

input_ids       the tokens
labels          of each token, itself where it is trained and -100 where not; not shifted. All are trained where there are none
attention_mask  1 for a token, 0 for padding on either side, which is cut off
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pentamesh.run.data.kinds import kind

__all__ = ["Ids", "read_ids"]

IGNORED = -100
# Other libraries' fields for what `labels` say here.
MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask")
# Ids are kept as int32.
MAX_ID = 2**31 - 1


@dataclass(frozen=True)
class Ids:
    """Tokens, and of each whether it is trained."""

    ids: list[int]
    trained: list[bool]


def read_ids(value: Mapping[str, Any], names: Mapping[str, str]) -> Ids | str:
    """The tokens of a row, or what is wrong with them. `names` says what the file calls its fields."""
    if fault := _unread_fault(value):
        return fault
    columns = [key for key in ("input_ids", "labels", "attention_mask") if value.get(key) is not None or key == "input_ids"]
    if fault := next((found for key in columns if (found := _list_fault(value[key], names[key]))), ""):
        return fault
    ids = value["input_ids"]
    if not ids:
        return f"`{names['input_ids']}` is empty"
    if odd := next((key for key in columns if len(value[key]) != len(ids)), None):
        return f"`{names[odd]}` has {len(value[odd]):,} entries and `{names['input_ids']}` {len(ids):,}"
    kept = _kept(value["attention_mask"], names["attention_mask"]) if "attention_mask" in columns else slice(0, len(ids))
    if isinstance(kept, str):
        return kept
    labels = value["labels"] if "labels" in columns else ids
    return _fault(ids, labels, kept, names) or Ids(ids[kept], [label != IGNORED for label in labels[kept]])


def _unread_fault(value: Mapping[str, Any]) -> str:
    """A field that says what is trained, or where tokens stand, and is none of ours: without it the row would be another one."""
    if mask := next((key for key in MASKS if value.get(key) is not None), ""):
        return f"`{mask}` is not read: write `labels`, each its own token where it is trained and {IGNORED} where not, and take `{mask}` out"
    return "" if value.get("position_ids") is None else "`position_ids` are not read: positions count from 0 in each row, take the field out"


def _list_fault(value: Any, name: str) -> str:
    if not isinstance(value, list):
        return f"`{name}` is {kind(value)}, not a list of whole numbers"
    odd = next((i for i, entry in enumerate(value) if type(entry) is not int), None)
    if odd is None:
        return ""
    given = f"{value[odd]}" if isinstance(value[odd], float) else kind(value[odd])
    return f"`{name}[{odd}]` is {given}, not a whole number"


def _kept(mask: list[int], name: str) -> slice | str:
    """Where the tokens between the padding are."""
    if odd := next((f"`{name}[{i}]` is {entry}, neither 0 nor 1" for i, entry in enumerate(mask) if entry not in (0, 1)), ""):
        return odd
    if 1 not in mask:
        return f"`{name}` has no 1: all of the row is padding"
    kept = slice(mask.index(1), len(mask) - mask[::-1].index(1))
    hole = 0 in mask[kept]
    return f"`{name}[{mask.index(0, kept.start)}]` is 0 between tokens: only padding on either side is cut off" if hole else kept


def _fault(ids: list[int], labels: list[int], kept: slice, names: Mapping[str, str]) -> str:
    for i, (token, label) in enumerate(zip(ids[kept], labels[kept], strict=True), start=kept.start):
        if not 0 <= token <= MAX_ID:
            return f"`{names['input_ids']}[{i}]` is {token}: an id is at least 0 and below 2^31"
        if label not in (token, IGNORED):
            what = f"`{names['labels']}[{i}]` is {label} and `{names['input_ids']}[{i}]` {token}"
            return f"{what}: a label is its own token, not the next one, or {IGNORED}"
    return ""
