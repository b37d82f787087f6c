"""Tally: what one source of rows gives to a split - samples as spans of its tokens, as often as its weight says, and what happened to its rows."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from pentamesh.errors import InputError
from pentamesh.run.data.tokens import Cut, Encoded

__all__ = ["Tally", "times_seen", "total"]


def times_seen(num_rows: int, weight: float, seed: tuple[int, ...]) -> np.ndarray:
    """How often an epoch sees each row: as often as `weight` is whole, and once more those that are drawn: the rest's share of them, exactly.

    Shapes: [num_rows] int64.
    Source: as the order of batches, RandomState's stream is frozen over versions of numpy (NEP 19).
    """
    whole = int(weight)
    found = np.full(num_rows, whole, np.int64)
    drawn = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed))).permutation(num_rows)
    found[drawn[: round((weight - whole) * num_rows)]] += 1
    return found


class Tally:
    """Counts the rows of a source and keeps 24 bytes for each of its samples and 8 for each row."""

    def __init__(self, name: str, form: str, weight: float = 1.0, seed: tuple[int, ...] = (0,)) -> None:
        self._name, self._form, self._weight, self._seed = name, form, weight, seed
        self._num_rows = self._num_truncated = self._num_split = self._num_untrained = 0
        self._dropped: Counter[str] = Counter()
        self._samples = array("q")  # offset, number of tokens, number of those that are trained
        self._of_row = array("q")  # number of samples

    def drop(self, reason: str) -> None:
        """Count a row that is not used."""
        self._num_rows += 1
        self._dropped[reason] += 1

    def add(self, row: Encoded, cut: Cut, first: int) -> None:
        """Count a row that is stored from token `first` on."""
        self._num_rows += 1
        self._num_truncated += cut.truncated
        self._num_split += len(cut.spans) + cut.num_untrained > 1
        self._num_untrained += cut.num_untrained
        self._of_row.append(len(cut.spans))
        for offset, n in cut.spans:
            self._samples.extend((first + offset, n, int(row.trained[offset + 1 : offset + n].sum())))

    def close(self) -> tuple[np.ndarray, dict[str, Any]]:
        """The spans of the samples that an epoch sees, and what the manifest says of the source. Shapes: [samples, 2].

        Raises: InputError, where the weight leaves no row of those that could be used.
        """
        times = times_seen(len(self._of_row), self._weight, self._seed)
        if len(times) and not times.any():
            what = f"weight = {self._weight:g} leaves none of {len(times):,} rows of {self._name}"
            raise InputError(what, where="data.train", hint="give it more weight or more rows, or leave the source out")
        samples = np.frombuffer(self._samples, np.int64).reshape(-1, 3)
        times = np.repeat(times, np.frombuffer(self._of_row, np.int64))
        seen = np.concatenate([samples[:0], *(samples[times > k] for k in range(times.max(initial=0)))])
        return seen[:, :2], self._counts(seen)

    def _counts(self, seen: np.ndarray) -> dict[str, Any]:
        return {
            "name": self._name,
            "form": self._form,
            "weight": self._weight,
            "rows": self._num_rows,
            "truncated": self._num_truncated,
            "split": self._num_split,
            "untrained_pieces": self._num_untrained,
            "dropped": dict(self._dropped),
            "samples": len(seen),
            "tokens": int((seen[:, 1] - 1).sum()),
            "trained_tokens": int(seen[:, 2].sum()),
            "longest": int(seen[:, 1].max(initial=1)) - 1,
        }


def total(counts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What several sources give together."""
    summed = ("rows", "truncated", "split", "untrained_pieces", "samples", "tokens", "trained_tokens")
    dropped = sum((Counter(count["dropped"]) for count in counts), Counter())
    longest = max(count["longest"] for count in counts)
    return {key: sum(count[key] for count in counts) for key in summed} | {"longest": longest, "dropped": dict(dropped)}
