"""Split: which rows of a job are trained on and which are held out, found before the first is tokenised."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pentamesh.errors import InputError
from pentamesh.run.data.alike import row_key
from pentamesh.run.data.forms import Form, Sample
from pentamesh.run.data.ids import Ids
from pentamesh.run.data.problems import Problems
from pentamesh.run.data.source import Source

__all__ = ["Placed", "Survey", "held_keys", "num_chars", "placed", "survey"]


class Survey(NamedTuple):
    """The keys of the held-out rows, how many training rows repeat another, and the characters of those that are to be tokenised."""

    held: frozenset[int]
    num_repeated: int
    num_chars: int


@dataclass(frozen=True)
class Placed:
    """A row, the split it belongs to, the number of its source there and, where it is not to be used, the reason."""

    split: str
    source: int
    form: Form
    row: Sample
    unused: str = ""


def num_chars(content: Any) -> int:
    """The characters of all text in a value; of a row that is tokens already, these."""
    if isinstance(content, str):
        return len(content)
    if isinstance(content, Ids):
        return len(content.ids)
    if isinstance(content, dict):
        return sum(map(num_chars, content.values()))
    if isinstance(content, list):
        return sum(map(num_chars, content))
    return sum(map(num_chars, vars(content).values())) if hasattr(content, "__dict__") else 0


def held_keys(asked: Source, seed: int, problems: Problems) -> frozenset[int]:
    """The keys of the rows that a source of its own holds out."""
    return frozenset(row_key(row, seed) for row in asked.held_out.rows(problems)) if asked.held_out else frozenset()


def survey(asked: Source, seed: int) -> Survey:
    """A look at every row, keeping 8 bytes of each. Raises InputError with all faults of all rows."""
    keys, read = array("Q"), 0
    with Problems() as problems:
        for origin in asked.train:
            for row in origin.rows(problems, asked.max_rows):
                keys.append(row_key(row, seed))
                read += num_chars(row.content) if origin.form != "tokens" else 0
        held = held_keys(asked, seed, problems)
    distinct = np.unique(np.frombuffer(keys, np.uint64))  # sorted
    if asked.share is not None:
        held = frozenset(distinct[: max(1, round(asked.share * len(distinct)))].tolist())
        if len(held) == len(distinct):
            what = f"held_out = {asked.share:g} of {len(distinct):,} different rows leaves none to train on"
            raise InputError(what, where="data.held_out", hint="give more rows, hold out a smaller share, or name a file of held-out rows")
    return Survey(held, len(keys) - len(distinct), read)


def placed(asked: Source, held: frozenset[int], seed: int, problems: Problems) -> Iterator[Placed]:
    """Every row with its split: a held-out row is never trained on, however often it is there."""
    waiting = set(held) if asked.share is not None else set()
    for number, origin in enumerate(asked.train):
        for row in origin.rows(problems, asked.max_rows):
            key = row_key(row, seed) if held else 0
            if key in waiting:
                waiting.remove(key)
                yield Placed("held_out", number, origin.form, row)
            else:
                yield Placed("train", number, origin.form, row, "equal_to_held_out" if key in held else "")
    if origin := asked.held_out:
        yield from (Placed("held_out", 0, origin.form, row) for row in origin.rows(problems))
