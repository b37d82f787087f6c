"""Reader: flags of a model as numbers and words, with all that is wrong with them and all that should be said."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pentamesh.errors import Problem
from pentamesh.translate.flags import given_value

__all__ = ["Reader", "count", "number"]


@dataclass
class Reader:
    """Reads flags of a model and gathers what is wrong with them, and what should be said of them."""

    given: argparse.Namespace
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def has(self, flag: str) -> bool:
        return bool(given_value(self.given, flag))

    def count(self, flag: str, default: int = 0) -> int:
        return count(self.given, flag, self.problems) or default

    def number(self, flag: str, default: float) -> float:
        found = number(self.given, flag, self.problems)
        return default if found is None else found

    def word(self, flag: str, known: Sequence[str]) -> str:
        text = given_value(self.given, flag)
        if text is not None and text not in known:
            self.problems.append(Problem(f"{flag} {text} is of no architecture that is described here", flag, f"use {' or '.join(known)}"))
        return text or known[0]


def count(given: argparse.Namespace, flag: str, problems: list[Problem]) -> int | None:
    """The whole number behind a flag; None where there is none, with a problem where there is something else."""
    text = given_value(given, flag)
    if text is not None and not (text.isdecimal() and int(text) > 0):
        problems.append(Problem(f"{flag} {text} is not a whole number of at least 1", flag, "write it in digits"))
        return None
    return int(text) if text else None


def number(given: argparse.Namespace, flag: str, problems: list[Problem]) -> float | None:
    """The number of at least 0 behind a flag; None where there is none, with a problem where there is something else."""
    text = given_value(given, flag)
    try:
        found = None if text is None else float(text)
    except ValueError:
        found = math.nan
    if found is not None and not 0 <= found < math.inf:
        problems.append(Problem(f"{flag} {text} is not a number of at least 0", flag, "write it like 0.1 or 1e-5"))
        return None
    return found
