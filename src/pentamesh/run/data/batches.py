"""Batches: the rows of each step, as a pure function of (seed, rows consumed), and the tensors that a rank computes on.

A step takes the next `global_batch` rows of the run's order, the longest first, so that rows that are computed at once are of like length: of these
micro-batch m of data rank r takes those from (m * data_degree + r) * micro_batch on. Nothing else is remembered, so a run goes on anywhere,
on any number of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from pentamesh.errors import InputError
from pentamesh.job.division import uneven_batch
from pentamesh.run.data.order import Order, Row
from pentamesh.run.data.samples import Samples
from pentamesh.run.data.share import ALL, Share
from pentamesh.run.data.stream import Stream

__all__ = ["IGNORED", "Batches", "Micro", "collate", "held_out_batches"]

# The label that is not trained. Source: torch.nn.functional.cross_entropy, ignore_index.
IGNORED = -100
# Tokens in the row of a micro-batch that has no sample: a rank computes on it only to take part in the collectives.
DUMMY_LEN = 2


@dataclass(frozen=True)
class Micro:
    """One micro-batch of one rank: its part of the tokens of each row.

    Shapes: input_ids and labels [b, s], int64, padded on the right; a label is the next token of the row where that is trained, else IGNORED.
    `positions` [b, s] or [1, s], int64, are those of the tokens in their rows, or in their samples where rows hold several; None where they are 0 to
    s - 1. `bounds` [number of documents + 1], int32, where rows hold several samples, says where each begins, and the last ends, among all tokens of
    all whole rows; documents are the samples, and what pads a row.
    `samples` [b, s], int64, says of which sample each token is, counted over all whole rows, one more than there are standing for padding; `sizes`
    [samples], int64, how many tokens each has on all ranks that share its row.
    Units: num_trained counts this rank's labels that are trained, num_tokens its tokens that are not padding.

    Under causal attention no token sees the padding to its right, so there is no mask.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    num_trained: int
    num_tokens: int
    positions: torch.Tensor | None = None
    bounds: torch.Tensor | None = None
    samples: torch.Tensor | None = None
    sizes: torch.Tensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Micro:
        """The same on `device`; a copy to CUDA that shall not block goes through pinned memory."""
        pin = non_blocking and torch.device(device).type == "cuda" and self.input_ids.device.type == "cpu"

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return (tensor.pin_memory() if pin else tensor).to(device, non_blocking=non_blocking)

        # Where documents begin is asked on the host: a device would have to be waited for, in every attention. Of samples only experts ask.
        asked_here = ("bounds", "samples", "sizes")
        tensors = {name: held for name, held in vars(self).items() if isinstance(held, torch.Tensor) and name not in asked_here}
        return replace(self, **{name: moved(held) for name, held in tensors.items()})


def collate(samples: Samples | Stream, rows: Sequence[Row], share: Share = ALL) -> Micro:
    """The samples of each row one after the other, a row of none being without labels; padded on the right so that it divides among ranks.

    What follows a token is known of the whole row: labels are shifted before ranks share it.
    """
    found = [[samples.sample(i) for i in row] for row in rows]
    lengths = [[len(tokens) - 1 for tokens, _ in row] for row in found]
    ends = np.array([sum(row) for row in lengths])
    length = share.padded(int(ends.max()) or DUMMY_LEN)
    here = share.places(length)
    input_ids, labels = (column.take(here, axis=1) for column in _columns(found, length, samples.pad_id))
    positions, bounds = here[np.newaxis] if share.cuts_rows else None, None
    if any(len(row) > 1 for row in rows):
        positions, bounds = _documents(lengths, length)
        positions = positions.take(here, axis=1)
    of, sizes = _samples(lengths, here)
    return Micro(
        torch.from_numpy(input_ids),
        torch.from_numpy(labels),
        num_trained=int((labels != IGNORED).sum()),
        num_tokens=int((here < ends[:, np.newaxis]).sum()),
        positions=None if positions is None else torch.from_numpy(positions),
        bounds=None if bounds is None else torch.from_numpy(bounds),
        samples=torch.from_numpy(of),
        sizes=torch.from_numpy(sizes),
    )


def _columns(found: list[list[tuple[np.ndarray, np.ndarray]]], length: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that the model reads of rows of samples, and the label of each. Shapes: [rows, length], int64."""
    input_ids, labels = np.full((len(found), length), pad_id, np.int64), np.full((len(found), length), IGNORED, np.int64)
    for number, row in enumerate(found):
        at = 0
        for tokens, trained in row:
            here = slice(at, at + len(tokens) - 1)
            input_ids[number, here], labels[number, here] = tokens[:-1], np.where(trained[1:], tokens[1:], IGNORED)
            at = here.stop
    return input_ids, labels


def _documents(lengths: list[list[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Of rows whose samples have these lengths, the positions of tokens in their documents, and the bounds of these."""
    positions, bounds = np.empty((len(lengths), length), np.int64), {len(lengths) * length}
    for number, row in enumerate(lengths):
        for start in itertools.accumulate(row, initial=0):
            positions[number, start:] = np.arange(length - start)
            bounds.add(number * length + start)
    return positions, np.array(sorted(bounds), np.int32)


def _samples(lengths: list[list[int]], here: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of rows whose samples have these lengths, the sample of each token that stands `here` in its row, and the sizes of all."""
    sizes = np.array([length for row in lengths for length in row], np.int64)
    found, before = np.full((len(lengths), len(here)), len(sizes), np.int64), 0
    for number, row in enumerate(lengths):
        at = np.searchsorted(np.cumsum(row), here, side="right")
        found[number, at < len(row)] = before + at[at < len(row)]
        before += len(row)
    return found, sizes


@dataclass(frozen=True)
class Batches:
    """The micro-batches of one rank. `num_rows_in_run` ends a run that is measured in epochs; what lies beyond has no labels.

    Raises: InputError, when micro-batches on all ranks do not make up a global batch.
    """

    samples: Samples | Stream
    seed: int
    global_batch: int
    micro_batch: int
    share: Share = ALL
    num_rows_in_run: int | None = None
    group_by_length: bool = False

    def __post_init__(self) -> None:
        if found := uneven_batch(self.global_batch, self.micro_batch, self.share.data_degree):
            raise InputError(found.what, where="batch.global_batch", hint=found.hint)

    @cached_property
    def _order(self) -> Order | Stream:
        if isinstance(self.samples, Stream):
            return self.samples
        return Order(self.samples.lengths, self.seed, self.samples.packs, self.global_batch if self.group_by_length else None)

    @property
    def num_micros(self) -> int:
        """Micro-batches a step, on each rank."""
        return self.global_batch // (self.micro_batch * self.share.data_degree)

    def step(self, consumed: int) -> list[Micro]:
        """The micro-batches of the step before which the run has consumed so many rows, over all ranks."""
        rows = self.rows(consumed)
        firsts = range(self.share.data_rank * self.micro_batch, self.global_batch, self.share.data_degree * self.micro_batch)
        return [collate(self.samples, rows[first : first + self.micro_batch], self.share) for first in firsts]

    def rows(self, consumed: int) -> list[Row]:
        """All rows of that step over all ranks, the longest first."""
        return sorted(self._rows(consumed, consumed + self.global_batch), key=lambda row: -self.samples.length(row))

    def _rows(self, first: int, stop: int) -> list[Row]:
        there = stop if self.num_rows_in_run is None else max(first, min(stop, self.num_rows_in_run))
        return [*self._order.rows(first, there), *[()] * (stop - there)]


def held_out_batches(samples: Samples, micro_batch: int, share: Share = ALL) -> Iterator[Micro]:
    """Every held-out sample once over all ranks, the longest first; every rank gets the same number of micro-batches, the last ones maybe empty."""
    rows: list[Row] = [(int(i),) for i in np.argsort(-samples.lengths, kind="stable")]
    before = share.data_rank * micro_batch
    for first in range(before, len(samples) + before, micro_batch * share.data_degree):
        mine = rows[first : first + micro_batch]
        yield collate(samples, [*mine, *[()] * (micro_batch - len(mine))], share)
