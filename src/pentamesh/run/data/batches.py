"""Batches: which samples a data rank computes at a step, as a pure function of (seed, samples consumed), and the tensors it computes on.

Sample number g of a run is sample `order(seed, g // n)[g % n]` of n. Micro-batch m of data rank r takes the numbers
consumed + (m * data_degree + r) * micro_batch + j. Nothing else is remembered, so a run goes on anywhere, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from pentamesh.errors import InputError
from pentamesh.job.division import uneven_batch
from pentamesh.run.data.samples import Samples

__all__ = ["IGNORED", "Batches", "Micro", "collate", "held_out_batches", "order"]

# The label that is not trained. Source: torch.nn.functional.cross_entropy, ignore_index.
IGNORED = -100
# Tokens in the row of a micro-batch that has no sample: a rank computes on it only to take part in the collectives.
DUMMY_LEN = 2


@lru_cache(maxsize=2)  # an epoch's and the next one's
def order(seed: int, epoch: int, num_samples: int) -> np.ndarray:
    """The order of the samples in one epoch: a permutation that depends on nothing else, on any machine.

    Source: RandomState's stream is frozen over versions of numpy, Generator's is not (NEP 19).
    """
    found = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((seed, epoch)))).permutation(num_samples)
    found.setflags(write=False)
    return found


@dataclass(frozen=True)
class Micro:
    """One micro-batch of one rank.

    Shapes: input_ids and labels [b, s], int64, padded on the right; a label is the next token where that is trained, else IGNORED. `starts`
    [b, s], int64, says of each token at which position of its row its sample begins, where a row holds several.
    Units: num_trained counts labels that are trained, num_tokens tokens that are not padding.

    Under causal attention no token sees the padding to its right, so there is no mask.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    num_trained: int
    num_tokens: int
    starts: torch.Tensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Micro:
        """The same on `device`; a copy to CUDA that shall not block goes through pinned memory."""
        pin = non_blocking and torch.device(device).type == "cuda" and self.input_ids.device.type == "cpu"
        tensors = (t if t is None else (t.pin_memory() if pin else t).to(device, non_blocking=non_blocking) for t in self._tensors)
        ids, labels, starts = tensors
        assert ids is not None
        assert labels is not None
        return Micro(ids, labels, self.num_trained, self.num_tokens, starts)

    @property
    def _tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.input_ids, self.labels, self.starts


def collate(samples: Samples, rows: Sequence[Sequence[int]], seq_multiple: int = 1) -> Micro:
    """The samples of each row one after the other, a row of none being without labels; padded to a multiple of `seq_multiple`."""
    found = [[samples.sample(i) for i in row] for row in rows]
    lengths = [sum(len(tokens) - 1 for tokens, _ in row) for row in found]
    shape = (len(rows), -(-(max(lengths) or DUMMY_LEN) // seq_multiple) * seq_multiple)
    input_ids, labels = np.full(shape, samples.pad_id, np.int64), np.full(shape, IGNORED, np.int64)
    starts = np.zeros(shape, np.int64)
    for number, row in enumerate(found):
        at = 0
        for tokens, trained in row:
            here = slice(at, at + len(tokens) - 1)
            input_ids[number, here], labels[number, here] = tokens[:-1], np.where(trained[1:], tokens[1:], IGNORED)
            starts[number, at:] = at
            at = here.stop
    packed = torch.from_numpy(starts) if any(len(row) > 1 for row in rows) else None
    return Micro(torch.from_numpy(input_ids), torch.from_numpy(labels), int((labels != IGNORED).sum()), sum(lengths), packed)


@dataclass(frozen=True)
class Batches:
    """The micro-batches of one data rank. `num_samples_in_run` ends a run that is measured in epochs; what lies beyond has no labels.

    Raises: InputError, when micro-batches on all ranks do not make up a global batch.
    """

    samples: Samples
    seed: int
    global_batch: int
    micro_batch: int
    data_rank: int
    data_degree: int
    num_samples_in_run: int | None = None
    seq_multiple: int = 1

    def __post_init__(self) -> None:
        if found := uneven_batch(self.global_batch, self.micro_batch, self.data_degree):
            raise InputError(found.what, where="batch.global_batch", hint=found.hint)

    @property
    def num_micros(self) -> int:
        """Micro-batches a step, on each rank."""
        return self.global_batch // (self.micro_batch * self.data_degree)

    def step(self, consumed: int) -> list[Micro]:
        """The micro-batches of the step before which the run has consumed so many samples, over all ranks."""
        return [collate(self.samples, self.indices(consumed, m), self.seq_multiple) for m in range(self.num_micros)]

    def indices(self, consumed: int, m: int) -> list[tuple[int, ...]]:
        """The samples of each row of micro-batch `m` of this rank at that step."""
        first = consumed + (m * self.data_degree + self.data_rank) * self.micro_batch
        return [self._row(number) for number in range(first, first + self.micro_batch)]

    def _row(self, number: int) -> tuple[int, ...]:
        if self.num_samples_in_run is not None and number >= self.num_samples_in_run:
            return ()
        epoch, position = divmod(number, len(self.samples))
        return (int(order(self.seed, epoch, len(self.samples))[position]),)


def held_out_batches(samples: Samples, micro_batch: int, data_rank: int, data_degree: int, seq_multiple: int = 1) -> Iterator[Micro]:
    """Every held-out sample once over all ranks, in order; every rank gets the same number of micro-batches, the last ones maybe empty."""
    for first in range(0, len(samples), micro_batch * data_degree):
        mine = first + data_rank * micro_batch
        yield collate(samples, [(i,) if i < len(samples) else () for i in range(mine, mine + micro_batch)], seq_multiple)
