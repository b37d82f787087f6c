"""Batches: a permutation by seed and epoch, ranks that share nothing and leave nothing out, and labels shifted once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pentamesh.errors import InputError
from pentamesh.run.data.batches import IGNORED, Batches, Micro, collate, held_out_batches, order
from pentamesh.run.data.samples import Samples


def samples_of(lengths: list[int], pad_id: int = 0) -> Samples:
    """Samples of distinct tokens; sample i has lengths[i] + 1 tokens, the odd ones of which are targets."""
    counts = [n + 1 for n in lengths]
    offsets = np.concatenate([[0], np.cumsum(counts)[:-1]])
    total = sum(counts)
    trained = np.arange(total) % 2 == 1
    spans = np.stack([offsets, counts], axis=1)
    return Samples(np.arange(1, total + 1, dtype=np.int32), trained, spans, sum(lengths), int(trained.sum()), pad_id)


@pytest.fixture(scope="module")
def seven() -> Samples:
    return samples_of([3, 1, 4, 1, 5, 9, 2])


def test_the_order_is_pinned() -> None:
    """A number of these lists that changes would change the data order of every run that resumes."""
    assert order(0, 0, 10).tolist() == [6, 1, 0, 5, 3, 8, 7, 9, 2, 4]
    assert order(7, 3, 10).tolist() == [5, 4, 9, 2, 7, 1, 0, 8, 3, 6]


@given(st.integers(0, 2**31), st.integers(0, 50), st.integers(1, 200))
@settings(deadline=None, max_examples=50)
def test_an_epoch_is_a_permutation(seed: int, epoch: int, n: int) -> None:
    assert sorted(order(seed, epoch, n).tolist()) == list(range(n))


def test_the_order_changes_by_epoch_and_by_seed() -> None:
    drawn = {tuple(order(seed, epoch, 50)) for seed in range(3) for epoch in range(3)}
    assert len(drawn) == 9


@st.composite
def worlds(draw: Any) -> tuple[int, int, int, int, int]:
    micro_batch, data_degree, accum = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    return draw(st.integers(1, 40)), micro_batch, data_degree, micro_batch * data_degree * accum, draw(st.integers(0, 5))


def taken(samples: Samples, world: tuple[int, int, int, int, int], num_steps: int, limit: int | None = None) -> list[int | None]:
    """What all ranks take in some steps from the first, in the order of the global batch."""
    _, micro_batch, data_degree, global_batch, seed = world
    found: list[int | None] = []
    for step in range(num_steps):
        ranks = [Batches(samples, seed, global_batch, micro_batch, r, data_degree, limit) for r in range(data_degree)]
        found += [i for m in range(ranks[0].num_micros) for rank in ranks for row in rank.indices(step * global_batch, m) for i in row]
    return found


@given(worlds())
@settings(deadline=None, max_examples=60)
def test_ranks_are_disjoint_and_together_complete(world: tuple[int, int, int, int, int]) -> None:
    n, _, _, global_batch, seed = world
    num_steps = -(-2 * n // global_batch)
    found = taken(samples_of([2] * n), world, num_steps)
    assert found[: 2 * n] == [*order(seed, 0, n).tolist(), *order(seed, 1, n).tolist()]


@given(worlds())
@settings(deadline=None, max_examples=60)
def test_the_same_samples_in_the_same_order_on_any_number_of_ranks(world: tuple[int, int, int, int, int]) -> None:
    n, _, _, global_batch, seed = world
    samples = samples_of([2] * n)
    assert taken(samples, world, 3) == taken(samples, (n, 1, 1, global_batch, seed), 3)


def test_a_run_of_epochs_ends_with_rows_without_labels(seven: Samples) -> None:
    """7 samples over 4 ranks: one step of 8, whose last row trains nothing, with as many micro-batches on each rank."""
    ranks = [Batches(seven, 0, 8, 1, r, 4, num_samples_in_run=7) for r in range(4)]
    micros = [rank.step(0) for rank in ranks]
    assert [len(m) for m in micros] == [2, 2, 2, 2]
    assert ranks[3].indices(0, 1) == [()]
    empty = micros[3][1]
    assert (empty.num_tokens, empty.num_trained) == (0, 0)
    assert (empty.labels == IGNORED).all()
    assert empty.input_ids.shape == (1, 2)
    assert sorted(i for rank in ranks for m in range(2) for row in rank.indices(0, m) for i in row) == list(range(7))


def test_labels_are_the_next_tokens_that_are_trained() -> None:
    samples = samples_of([3, 1], pad_id=99)  # tokens 1 2 3 4 | 5 6; trained: 2, 4, 6
    micro = collate(samples, [(0,), (1,), ()])
    assert micro.input_ids.tolist() == [[1, 2, 3], [5, 99, 99], [99, 99, 99]]
    assert micro.labels.tolist() == [[2, IGNORED, 4], [6, IGNORED, IGNORED], [IGNORED] * 3]
    assert (micro.num_trained, micro.num_tokens) == (3, 4)


def test_padding_with_the_end_of_turn_token_masks_no_label() -> None:
    samples = samples_of([3, 1], pad_id=2)
    assert collate(samples, [(0,), (1,)]).labels.tolist() == [[2, IGNORED, 4], [6, IGNORED, IGNORED]]


def test_a_micro_batch_moves() -> None:
    moved = collate(samples_of([3]), [(0,)]).to("cpu", non_blocking=True)
    assert isinstance(moved, Micro)
    assert moved.labels.tolist() == [[2, IGNORED, 4]]


@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_held_out_rows_are_seen_once_and_ranks_stay_in_step(n: int, micro_batch: int, data_degree: int) -> None:
    samples = samples_of([1] * n)  # the first token of each sample is its name
    ranks = [list(held_out_batches(samples, micro_batch, r, data_degree)) for r in range(data_degree)]
    assert {len(rank) for rank in ranks} == {-(-n // (micro_batch * data_degree))}
    firsts = [int(row[0]) for rank in ranks for micro in rank for row, labels in zip(micro.input_ids, micro.labels, strict=True) if row[0] != 0]
    assert sorted(firsts) == list(range(1, 2 * n, 2))
    assert sum(micro.num_trained for rank in ranks for micro in rank) == n


def test_a_global_batch_that_ranks_cannot_share() -> None:
    with pytest.raises(
        InputError, match=r"global_batch = 12 is not a multiple of micro_batch x data ranks = 2 x 4 = 8(.|\n)*use global_batch = 8 or 16"
    ):
        Batches(samples_of([1]), 0, 12, 2, 0, 4)
