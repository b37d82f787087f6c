"""Order: which samples each row of a run holds, as a pure function of (seed, row number).

Row number g of a run is row `g % n` of epoch `g // n`, which is drawn anew from its number. A row is one sample; or as many as first-fit decreasing
puts into it, and then samples of equal length change places from epoch to epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

__all__ = ["Order", "Row", "first_fit_decreasing", "num_rows", "order"]

# Steps within which samples of like length are brought together: enough for lengths to be alike, few enough for steps to be unlike.
STEPS_AT_ONCE = 50

Row = tuple[int, ...]  # the samples in it, one after the other


def order(seed: int, epoch: int, number: int) -> np.ndarray:
    """A permutation of so many things in one epoch, which depends on nothing else, on any machine.

    Source: RandomState's stream is frozen over versions of numpy, Generator's is not (NEP 19).
    """
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence((seed, epoch)))).permutation(number)


def first_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The pack of each sample: the first, in the order in which they were opened, that has room for it.

    Samples of one length are placed at once: each pack takes as many as it has room for, before the next takes any. At most 11/9 of the fewest
    packs that any packing needs, and 6/9 (Dosa 2007).

    Shapes: lengths [n], decreasing and none above `capacity`; returned [n] int32.
    """
    packs, num_packs = np.empty(len(lengths), np.int32), 0
    which, room = np.empty(0, np.int32), np.empty(0, np.int64)  # the packs that have room, and how much
    starts = np.flatnonzero(np.diff(lengths, prepend=-1))
    for start, stop in zip(starts, [*starts[1:], len(lengths)], strict=True):
        length = max(1, int(lengths[start]))
        opened = -(-max(0, stop - start - int((room // length).sum())) // (capacity // length))
        which, room = np.concatenate([which, np.arange(num_packs, num_packs + opened)]), np.concatenate([room, np.full(opened, capacity)])
        num_packs += opened
        fits = room // length
        taken = np.minimum(fits, np.maximum(0, stop - start - (np.cumsum(fits) - fits)))
        packs[start:stop] = np.repeat(which, taken)
        room = room - taken * length
        which, room = (kept[room >= lengths[-1]] for kept in (which, room))
    return packs


def num_rows(num_samples: int, packs: np.ndarray | None) -> int:
    """Rows of an epoch: samples, or packs of them."""
    return num_samples if packs is None else int(packs.max()) + 1


@dataclass(frozen=True, eq=False)
class Order:
    """The rows of a run over samples of these lengths.

    packs       of each sample, longest first, where rows hold several
    step        rows of a step, where steps are to be of samples of like length

    Shapes: lengths [n], packs [n].
    """

    lengths: np.ndarray
    seed: int
    packs: np.ndarray | None = None
    step: int | None = None
    _epochs: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    @cached_property
    def num_rows(self) -> int:
        """Of an epoch."""
        return num_rows(len(self.lengths), self.packs)

    def row(self, number: int) -> Row:
        """The samples of row `number` of the run."""
        epoch, position = divmod(number, self.num_rows)
        if epoch not in self._epochs:
            self._epochs.pop(epoch - 2, None)
            self._epochs[epoch] = self._drawn(epoch)
        samples, bounds = self._epochs[epoch]
        return tuple(samples[slice(*bounds[position])].tolist())

    def rows(self, first: int, stop: int) -> list[Row]:
        """Those of rows `first` up to `stop`."""
        return [self.row(number) for number in range(first, stop)]

    def _drawn(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The samples of an epoch, and from where up to where among them each of its rows goes."""
        drawn = order(self.seed, epoch, len(self.lengths))
        if self.packs is None:
            samples = drawn if self.step is None else self._alike(drawn, epoch, self.step)
            return samples, np.arange(len(drawn))[:, None] + (0, 1)
        samples = self._longest_first(drawn)[np.argsort(self.packs, kind="stable")]
        stops = np.cumsum(np.bincount(self.packs))
        bounds = np.stack([np.concatenate([[0], stops[:-1]]), stops], axis=1)
        return samples, bounds[order(self.seed, epoch, len(bounds))]

    def _alike(self, drawn: np.ndarray, epoch: int, step: int) -> np.ndarray:
        """Steps of samples of like length, in an order of their own: a stretch of steps is sorted, cut into steps, and these are drawn."""
        stretches = np.split(drawn, range(STEPS_AT_ONCE * step, len(drawn), STEPS_AT_ONCE * step))
        alike = np.concatenate([self._longest_first(stretch) for stretch in stretches])
        whole = len(alike) // step * step
        return np.concatenate([alike[:whole].reshape(-1, step)[order(self.seed, epoch, whole // step)].ravel(), alike[whole:]])

    def _longest_first(self, samples: np.ndarray) -> np.ndarray:
        return samples[np.argsort(-self.lengths[samples], kind="stable")]
