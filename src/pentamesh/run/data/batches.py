"""Batches: the rows of each step, as a pure function of (seed, rows consumed), and the tensors that a data rank computes on.

A step takes the next `global_batch` rows of the run's order, the longest first, so that rows that are computed at once are of like length: of these
micro-batch m of data rank r takes those from (m * data_degree + r) * micro_batch on. Nothing else is remembered, so a run goes on anywhere,
on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from pentamesh.errors import InputError
from pentamesh.job.division import uneven_batch
from pentamesh.run.data.order import Order, Row
from pentamesh.run.data.samples import Samples
from pentamesh.run.data.stream import Stream

__all__ = ["IGNORED", "Batches", "Micro", "collate", "held_out_batches"]

# The label that is not trained. Source: torch.nn.functional.cross_entropy, ignore_index.
IGNORED = -100
# Tokens in the row of a micro-batch that has no sample: a rank computes on it only to take part in the collectives.
DUMMY_LEN = 2


@dataclass(frozen=True)
class Packed:
    """Where the samples of rows that hold several begin and end.

    Shapes: positions [b, s], int64, of each token in its sample; bounds [number of documents + 1], int32: where each begins, and the last ends,
    among all b * s tokens. Documents are the samples, and what pads a row.
    """

    positions: torch.Tensor
    bounds: torch.Tensor


@dataclass(frozen=True)
class Micro:
    """One micro-batch of one rank.

    Shapes: input_ids and labels [b, s], int64, padded on the right; a label is the next token where that is trained, else IGNORED. `packed` where
    a row holds several samples.
    Units: num_trained counts labels that are trained, num_tokens tokens that are not padding.

    Under causal attention no token sees the padding to its right, so there is no mask.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    num_trained: int
    num_tokens: int
    packed: Packed | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Micro:
        """The same on `device`; a copy to CUDA that shall not block goes through pinned memory."""
        pin = non_blocking and torch.device(device).type == "cuda" and self.input_ids.device.type == "cpu"

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return (tensor.pin_memory() if pin else tensor).to(device, non_blocking=non_blocking)

        packed = self.packed and Packed(moved(self.packed.positions), moved(self.packed.bounds))
        return Micro(moved(self.input_ids), moved(self.labels), self.num_trained, self.num_tokens, packed)


def collate(samples: Samples | Stream, rows: Sequence[Row], seq_multiple: int = 1) -> Micro:
    """The samples of each row one after the other, a row of none being without labels; padded to a multiple of `seq_multiple`."""
    found = [[samples.sample(i) for i in row] for row in rows]
    lengths = [sum(len(tokens) - 1 for tokens, _ in row) for row in found]
    shape = (len(rows), -(-(max(lengths) or DUMMY_LEN) // seq_multiple) * seq_multiple)
    input_ids, labels = np.full(shape, samples.pad_id, np.int64), np.full(shape, IGNORED, np.int64)
    positions, bounds = np.empty(shape, np.int64), [0]
    for number, row in enumerate(found):
        at = 0
        for tokens, trained in row:
            here = slice(at, at + len(tokens) - 1)
            input_ids[number, here], labels[number, here] = tokens[:-1], np.where(trained[1:], tokens[1:], IGNORED)
            positions[number, at:] = np.arange(shape[1] - at)
            at = here.stop
            bounds.append(number * shape[1] + at)
        positions[number, at:] = np.arange(shape[1] - at)
        bounds.append((number + 1) * shape[1])
    packed = Packed(torch.from_numpy(positions), torch.tensor(sorted(set(bounds)), dtype=torch.int32)) if any(len(row) > 1 for row in rows) else None
    return Micro(torch.from_numpy(input_ids), torch.from_numpy(labels), int((labels != IGNORED).sum()), sum(lengths), packed)


@dataclass(frozen=True)
class Batches:
    """The micro-batches of one data rank. `num_rows_in_run` ends a run that is measured in epochs; what lies beyond has no labels.

    Raises: InputError, when micro-batches on all ranks do not make up a global batch.
    """

    samples: Samples | Stream
    seed: int
    global_batch: int
    micro_batch: int
    data_rank: int
    data_degree: int
    num_rows_in_run: int | None = None
    seq_multiple: int = 1
    group_by_length: bool = False

    def __post_init__(self) -> None:
        if found := uneven_batch(self.global_batch, self.micro_batch, self.data_degree):
            raise InputError(found.what, where="batch.global_batch", hint=found.hint)

    @cached_property
    def _order(self) -> Order | Stream:
        if isinstance(self.samples, Stream):
            return self.samples
        return Order(self.samples.lengths, self.seed, self.samples.packs, self.global_batch if self.group_by_length else None)

    @property
    def num_micros(self) -> int:
        """Micro-batches a step, on each rank."""
        return self.global_batch // (self.micro_batch * self.data_degree)

    def step(self, consumed: int) -> list[Micro]:
        """The micro-batches of the step before which the run has consumed so many rows, over all ranks."""
        rows = self.rows(consumed)
        firsts = range(self.data_rank * self.micro_batch, self.global_batch, self.data_degree * self.micro_batch)
        return [collate(self.samples, rows[first : first + self.micro_batch], self.seq_multiple) for first in firsts]

    def rows(self, consumed: int) -> list[Row]:
        """All rows of that step over all ranks, the longest first."""
        return sorted(self._rows(consumed, consumed + self.global_batch), key=lambda row: -self.samples.length(row))

    def _rows(self, first: int, stop: int) -> list[Row]:
        there = stop if self.num_rows_in_run is None else max(first, min(stop, self.num_rows_in_run))
        return [*self._order.rows(first, there), *[()] * (stop - there)]


def held_out_batches(samples: Samples, micro_batch: int, data_rank: int, data_degree: int, seq_multiple: int = 1) -> Iterator[Micro]:
    """Every held-out sample once over all ranks, the longest first; every rank gets the same number of micro-batches, the last ones maybe empty."""
    rows: list[Row] = [(int(i),) for i in np.argsort(-samples.lengths, kind="stable")]
    for first in range(data_rank * micro_batch, len(samples) + data_rank * micro_batch, micro_batch * data_degree):
        mine = rows[first : first + micro_batch]
        yield collate(samples, [*mine, *[()] * (micro_batch - len(mine))], seq_multiple)
