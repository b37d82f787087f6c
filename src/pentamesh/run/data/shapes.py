"""Shapes: what the fields of rows hold, and of lists of turns the fields and speakers, counted over all rows in bounded memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Shapes", "Talk"]

# Names that are counted; what comes after them is not what a file is made of.
MAX_NAMES = 200
# Of a name of a speaker.
MAX_CHARS = 40


def _count(counter: Counter[str], name: str) -> None:
    if name in counter or len(counter) < MAX_NAMES:
        counter[name] += 1


@dataclass
class Talk:
    """Lists of turns in one field.

    texts   in how many turns each key has a text
    chars   how long these are together
    said    of each key the values that it has, with their numbers; those that are longer than a name are left out
    first   of each key the values that first turns have
    """

    num_rows: int = 0
    texts: Counter[str] = field(default_factory=Counter)
    chars: Counter[str] = field(default_factory=Counter)
    said: dict[str, Counter[str]] = field(default_factory=dict)
    first: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, turns: list[Any]) -> None:
        self.num_rows += 1
        for i, turn in enumerate(turns):
            for key, value in turn.items() if isinstance(turn, dict) else ():
                if not isinstance(value, str):
                    continue
                _count(self.texts, key)
                if key not in self.texts:
                    continue
                self.chars[key] += len(value)
                short = value if len(value) <= MAX_CHARS else "..."
                _count(self.said.setdefault(key, Counter()), short)
                if i == 0:
                    _count(self.first.setdefault(key, Counter()), short)


@dataclass
class Shapes:
    """In how many rows each field holds a text, a list of whole numbers, or a list of turns."""

    num_rows: int = 0
    texts: Counter[str] = field(default_factory=Counter)
    numbers: Counter[str] = field(default_factory=Counter)
    talks: dict[str, Talk] = field(default_factory=dict)

    def add(self, value: Any) -> None:
        if not isinstance(value, dict):
            return
        self.num_rows += 1
        for key, inner in value.items():
            if isinstance(inner, str):
                _count(self.texts, key)
            elif isinstance(inner, list) and inner:
                self._add_list(key, inner)

    @property
    def names(self) -> frozenset[str]:
        """Of all fields of rows and of turns."""
        return frozenset((*self.texts, *self.numbers, *self.talks, *(key for talk in self.talks.values() for key in talk.texts)))

    def _add_list(self, key: str, inner: list[Any]) -> None:
        if all(type(entry) is int for entry in inner):
            _count(self.numbers, key)
        elif isinstance(inner[0], dict) and (key in self.talks or len(self.talks) < MAX_NAMES):
            self.talks.setdefault(key, Talk()).add(inner)
