"""Pace: how far the tokenising of a job's rows is, said now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Pace"]


@dataclass
class Pace:
    """Hears the number of rows that are tokenised, and says it on stderr every few seconds; of small data nothing."""

    every_s: float = 5.0
    clock: Callable[[], float] = time.monotonic
    _start: float = 0.0
    _said: float = 0.0

    def __call__(self, num_rows: int) -> None:
        now = self.clock()
        if num_rows == 1:  # before it every row was read and judged
            self._start = self._said = now
        if now - self._said >= self.every_s:
            self._said = now
            sys.stderr.write(f"tokenised {num_rows:,} rows, {num_rows / (now - self._start):,.0f} rows/s\n")
