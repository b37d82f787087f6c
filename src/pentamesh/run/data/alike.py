"""Alike: rows that say the same, found by eight bytes of each."""

from __future__ import annotations

import hashlib
import json
from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pentamesh.run.data.forms import Sample
from pentamesh.run.data.turns import Conversation, answers

__all__ = ["Repeats", "row_key"]


def row_key(row: Sample, seed: int) -> int:
    """64 bits of what is trained of a row: equal rows have equal keys, and among different ones their order is a draw by `seed`.

    Two different rows of a million share a key with a probability of 3e-8 (birthday bound, n^2 / 2^65).
    """
    return _digest(json.dumps(_said(row), sort_keys=True, default=vars), seed)


def _said(row: Sample) -> Any:
    said = row.content
    if isinstance(said, Conversation) and not said.tools and said.trained == answers(said.messages):
        return said.messages
    return said


def _digest(text: str, seed: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, salt=seed.to_bytes(16, "little")).digest(), "little")


def _folded(value: Any) -> Any:
    """A value whose texts differ in neither case nor white space."""
    if isinstance(value, str):
        return " ".join(value.casefold().split())
    if isinstance(value, dict):
        return {key: _folded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_folded(inner) for inner in value]
    return _folded(vars(value)) if hasattr(value, "__dict__") else value


@dataclass
class Repeats:
    """The keys of rows as they are and without case and white space: 16 bytes a row."""

    exact: array[int] = field(default_factory=lambda: array("Q"))
    folded: array[int] = field(default_factory=lambda: array("Q"))

    def add(self, row: Sample) -> None:
        self.exact.append(row_key(row, 0))
        self.folded.append(_digest(json.dumps(_folded(_said(row)), sort_keys=True), 0))

    @property
    def num_exact(self) -> int:
        """How many rows repeat another."""
        return len(self.exact) - len(np.unique(np.frombuffer(self.exact, np.uint64)))

    @property
    def num_folded(self) -> int:
        """How many rows repeat another but for case and white space, beyond those that repeat one exactly."""
        return len(self.folded) - len(np.unique(np.frombuffer(self.folded, np.uint64))) - self.num_exact

    def repeated(self) -> frozenset[int]:
        """The keys that more than one row has."""
        keys = np.sort(np.frombuffer(self.exact, np.uint64))
        return frozenset(keys[1:][keys[1:] == keys[:-1]].tolist())
