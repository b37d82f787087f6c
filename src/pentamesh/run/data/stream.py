"""Stream: training rows that are prepared while the run goes on, a pure function of (seed, row number) as those that are prepared before.

Row g lies in the chunk that begins at or before it; the rows of a chunk come in an order drawn from its number. Samples are counted from the first
chunk that this process opened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pentamesh.checkpoint.together import first as on_first
from pentamesh.checkpoint.together import place_in, together
from pentamesh.run.data.chunks import chunk_folder
from pentamesh.run.data.order import Order, Row
from pentamesh.run.data.record import Chunk
from pentamesh.run.data.samples import Samples, open_prepared
from pentamesh.run.data.supply import Supply

__all__ = ["Stream"]

DOING = "preparing the next chunk of the stream"


@dataclass(frozen=True, eq=False)
class _Open:
    """A chunk that is mapped: which rows of the run it holds, the number of its first sample, and its samples and order."""

    chunk: Chunk
    first_row: int
    first_sample: int
    samples: Samples
    order: Order

    @property
    def stop(self) -> int:
        return self.first_row + self.chunk.rows

    def row(self, number: int) -> Row:
        drawn = self.order.row(self.chunk.number * self.chunk.rows + number - self.first_row)
        return tuple(self.first_sample + i for i in drawn)


class Stream:
    """The rows of a run as its ranks see them. `checked` makes samples fit the model, or raises; `step` as in an Order.

    Rows are asked for in increasing order, by all ranks alike: reaching a new chunk is collective.
    """

    def __init__(self, supply: Supply, checked: Callable[[Samples], Samples], seed: int, step: int | None = None) -> None:
        self._supply, self._checked, self._seed, self._step = supply, checked, seed, step
        self._open: list[_Open] = []
        self._stop = -1  # no chunk was asked for yet
        self._num_samples = 0

    def rows(self, first: int, stop: int) -> list[Row]:
        """Rows `first` up to `stop` of the run; those before are never asked for again. Collective.

        Raises: what keeps the next chunk from being made, the same on every rank.
        """
        if self._stop < 0:
            self._stop = on_first(DOING, lambda: self._supply.start(first)).first_row
        while self._stop < stop:
            self._open = [chunk for chunk in self._open if chunk.stop > first]
            self._reach(on_first(DOING, self._supply.take))
        return [self._of(number).row(number) for number in range(first, stop)]

    def sample(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """As that of Samples."""
        chunk = self._with(i)
        return chunk.samples.sample(i - chunk.first_sample)

    def length(self, row: Row) -> int:
        """As that of Samples."""
        return sum(int(chunk.samples.lengths[i - chunk.first_sample]) for i in row for chunk in [self._with(i)])

    @property
    def pad_id(self) -> int:
        return self._open[-1].samples.pad_id

    def close(self) -> None:
        """End what was begun for rows to come."""
        self._open.clear()
        if place_in()[0] == 0:
            self._supply.close()

    def _reach(self, chunk: Chunk) -> None:
        """Map the next chunk on every rank, and go on without those that no rank uses."""
        if chunk.rows:
            together(DOING, lambda: self._map(chunk))
            self._stop += chunk.rows
        if place_in()[0] == 0:
            self._supply.release(self._open[0].chunk.number if self._open else chunk.number)

    def _map(self, chunk: Chunk) -> None:
        samples = self._checked(open_prepared(chunk_folder(self._supply.folder, chunk.number)).train)
        order = Order(samples.lengths, self._seed, samples.packs, self._step)
        self._open.append(_Open(chunk, self._stop, self._num_samples, samples, order))
        self._num_samples += len(samples)

    def _of(self, number: int) -> _Open:
        return next(chunk for chunk in self._open if chunk.first_row <= number < chunk.stop)

    def _with(self, sample: int) -> _Open:
        return next(chunk for chunk in reversed(self._open) if chunk.first_sample <= sample)
