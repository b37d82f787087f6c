"""Flags: spellings of a command line that each set one key of a job."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pentamesh.job.written import read_value

__all__ = ["Flag", "Setting", "declare", "given_value", "settings"]

# Where a value was said (a flag), the dotted key of the job, and the value.
Setting = tuple[str, str, Any]


@dataclass(frozen=True)
class Flag:
    """One flag: the key of the job that it sets, and to what when it takes no value."""

    name: str
    key: str
    help: str
    sets: Any = None
    metavar: str | None = None


def declare(parser: argparse.ArgumentParser, flags: Iterable[Flag]) -> None:
    """Let a parser know flags; each value stays the text that was written, under the flag's own name."""
    for flag in flags:
        kind: dict[str, Any] = {"metavar": flag.metavar} if flag.sets is None else {"action": "store_true", "default": None}
        parser.add_argument(flag.name, dest=flag.name, help=f"{flag.help} ({flag.key})", **kind)


def given_value(given: argparse.Namespace, name: str) -> Any:
    """The text behind a flag, True for one without value, None for one that was not given."""
    return getattr(given, name)


def settings(given: argparse.Namespace, flags: Iterable[Flag]) -> Iterator[Setting]:
    """What the flags that were given set. Raises InputError for text that is no value."""
    for flag in flags:
        if (value := given_value(given, flag.name)) is not None:
            yield flag.name, flag.key, read_value(value, flag.name) if flag.sets is None else flag.sets
