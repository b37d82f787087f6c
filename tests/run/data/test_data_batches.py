"""Batches: a permutation by seed and epoch, ranks that share nothing and leave nothing out, and labels shifted once, before rows are cut."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pentamesh.errors import InputError
from pentamesh.layout.mesh import Layout, Mesh
from pentamesh.run.data.batches import IGNORED, Batches, Micro, collate, held_out_batches
from pentamesh.run.data.order import Order, first_fit_decreasing, order
from pentamesh.run.data.samples import Samples
from pentamesh.run.data.share import Share


def samples_of(lengths: list[int], pad_id: int = 0) -> Samples:
    """Samples of distinct tokens; sample i has lengths[i] + 1 tokens, the odd ones of which are targets."""
    counts = [n + 1 for n in lengths]
    offsets = np.concatenate([[0], np.cumsum(counts)[:-1]])
    total = sum(counts)
    trained = np.arange(total) % 2 == 1
    spans = np.stack([offsets, counts], axis=1)
    return Samples(np.arange(1, total + 1, dtype=np.int32), trained, spans, sum(lengths), int(trained.sum()), pad_id)


def data_ranks(count: int) -> list[Share]:
    """The shares of so many ranks, each of which reads its own rows."""
    return shares(Layout(Mesh(dp_shard=count)))


def shares(layout: Layout) -> list[Share]:
    return [Share(layout, rank) for rank in layout.ranks()]


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
        ranks = [Batches(samples, seed, global_batch, micro_batch, share, limit) for share in data_ranks(data_degree)]
        micros = zip(*(rank.step(step * global_batch) for rank in ranks), strict=True)
        found += [(int(row[0]) - 1) // 3 for of_ranks in micros for micro in of_ranks for row in micro.input_ids]
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
    ranks = [Batches(seven, 0, 8, 1, share, num_rows_in_run=7) for share in data_ranks(4)]
    micros = [rank.step(0) for rank in ranks]
    assert [len(m) for m in micros] == [2, 2, 2, 2]
    assert ranks[3].rows(0)[-1] == ()
    empty = micros[3][1]
    assert (empty.num_tokens, empty.num_trained) == (0, 0)
    assert (empty.labels == IGNORED).all()
    assert empty.input_ids.shape == (1, 2)
    assert sorted(i for row in ranks[0].rows(0) for i in row) == list(range(7))


def test_rows_that_are_computed_at_once_are_of_like_length(seven: Samples) -> None:
    batches = Batches(seven, 0, 6, 2)
    assert sorted(i for row in batches.rows(0) for i in row) == sorted(order(0, 0, 7)[:6].tolist())
    widths = [micro.input_ids.shape[1] for micro in batches.step(0)]
    assert widths == sorted(widths, reverse=True)


lengths_and_room = st.integers(1, 40).flatmap(lambda room: st.tuples(st.lists(st.integers(1, room), min_size=1, max_size=60), st.just(room)))


def packed_one_by_one(lengths: list[int], capacity: int) -> list[int]:
    rooms: list[int] = []
    found = []
    for length in lengths:
        pack = next((i for i, room in enumerate(rooms) if room >= length), len(rooms))
        rooms += [capacity] if pack == len(rooms) else []
        rooms[pack] -= length
        found.append(pack)
    return found


@given(lengths_and_room)
@settings(deadline=None, max_examples=100)
def test_packs_are_those_of_first_fit_decreasing(case: tuple[list[int], int]) -> None:
    lengths, capacity = sorted(case[0], reverse=True), case[1]
    assert first_fit_decreasing(np.array(lengths), capacity).tolist() == packed_one_by_one(lengths, capacity)


@given(lengths_and_room, st.integers(0, 5))
@settings(deadline=None, max_examples=60)
def test_every_epoch_packs_every_sample_once_and_no_row_too_full(case: tuple[list[int], int], epoch: int) -> None:
    lengths, capacity = np.array(case[0]), case[1]
    packed = Order(lengths, 3, first_fit_decreasing(np.sort(lengths)[::-1], capacity))
    rows = [packed.row(epoch * packed.num_rows + i) for i in range(packed.num_rows)]
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert max(int(lengths[list(row)].sum()) for row in rows) <= capacity
    assert min(len(row) for row in rows) > 0


def test_packed_rows_change_from_epoch_to_epoch_and_are_pinned() -> None:
    """A number of these lists that changes would change the data order of every run that resumes."""
    lengths = np.array([5, 3, 3, 2, 2, 2, 1])
    packed = Order(lengths, 0, first_fit_decreasing(np.sort(lengths)[::-1], 6))
    epochs = [[packed.row(e * packed.num_rows + i) for i in range(packed.num_rows)] for e in range(2)]
    assert epochs == [[(5, 3, 4), (2, 1), (0, 6)], [(1, 2), (0, 6), (3, 4, 5)]]


@given(st.lists(st.integers(1, 90), min_size=1, max_size=200), st.integers(1, 9), st.integers(0, 3))
@settings(deadline=None, max_examples=60)
def test_steps_of_like_length_hold_every_sample_once(lengths: list[int], step: int, epoch: int) -> None:
    alike = Order(np.array(lengths), 1, step=step)
    rows = [alike.row(epoch * len(lengths) + i) for i in range(len(lengths))]
    assert sorted(rows) == [(i,) for i in range(len(lengths))]
    whole = len(lengths) // step
    spans = sorted((max(of), min(of)) for s in range(whole) for of in [[lengths[i] for (i,) in rows[s * step : (s + 1) * step]]])
    if len(lengths) <= 50 * step:  # one stretch: steps do not overlap in length
        assert all(low[0] <= high[1] for low, high in itertools.pairwise(spans))


def test_labels_are_the_next_tokens_that_are_trained() -> None:
    samples = samples_of([3, 1], pad_id=99)  # tokens 1 2 3 4 | 5 6; trained: 2, 4, 6
    micro = collate(samples, [(0,), (1,), ()])
    assert micro.input_ids.tolist() == [[1, 2, 3], [5, 99, 99], [99, 99, 99]]
    assert micro.labels.tolist() == [[2, IGNORED, 4], [6, IGNORED, IGNORED], [IGNORED] * 3]
    assert (micro.num_trained, micro.num_tokens) == (3, 4)


def test_packed_samples_have_positions_and_bounds_of_their_own() -> None:
    samples = samples_of([3, 1, 2], pad_id=99)
    micro = collate(samples, [(0, 1), (2,), ()])
    assert micro.input_ids.tolist() == [[1, 2, 3, 5], [7, 8, 99, 99], [99] * 4]
    assert micro.labels.tolist() == [[2, IGNORED, 4, 6], [8, IGNORED, IGNORED, IGNORED], [IGNORED] * 4]
    assert micro.positions is not None
    assert micro.bounds is not None
    assert micro.positions.tolist() == [[0, 1, 2, 0], [0, 1, 0, 1], [0, 1, 2, 3]]
    assert micro.bounds.tolist() == [0, 3, 4, 6, 8, 12]
    assert (micro.num_trained, micro.num_tokens) == (4, 6)


def test_padding_with_the_end_of_turn_token_masks_no_label() -> None:
    samples = samples_of([3, 1], pad_id=2)
    assert collate(samples, [(0,), (1,)]).labels.tolist() == [[2, IGNORED, 4], [6, IGNORED, IGNORED]]


def test_a_micro_batch_moves() -> None:
    micro = collate(samples_of([3, 1]), [(0, 1)])
    moved = micro.to("meta")
    assert [t.device.type for t in (moved.input_ids, moved.labels, moved.positions) if t is not None] == ["meta"] * 3
    assert moved.bounds is micro.bounds, "which are asked for on the host"
    assert (moved.num_trained, moved.num_tokens) == (micro.num_trained, micro.num_tokens)
    assert micro.to("cpu", non_blocking=True).labels.tolist() == [[2, IGNORED, 4, 6]]


ZIGZAG, STRAIGHT = Layout(Mesh(cp=2)), Layout(Mesh(cp=2), context="ulysses")


def test_the_target_of_a_token_is_the_next_of_its_row_wherever_that_is_read() -> None:
    """Eight tokens, of which the last has none to predict: seven targets in all, three of them beyond the end of a run."""
    eight = Samples(np.arange(9, dtype=np.int32), np.array([True] * 8 + [False]), np.array([[0, 9]]), 8, 7, pad_id=0)
    first, second = (collate(eight, [(0,)], share) for share in shares(ZIGZAG))
    assert (first.input_ids.tolist(), second.input_ids.tolist()) == ([[0, 1, 6, 7]], [[2, 3, 4, 5]])
    assert (first.labels.tolist(), second.labels.tolist()) == ([[1, 2, 7, IGNORED]], [[3, 4, 5, 6]])
    assert first.num_trained + second.num_trained == 7
    assert first.positions is not None
    assert first.positions.tolist() == [[0, 1, 6, 7]]
    early, late = (collate(eight, [(0,)], share) for share in shares(STRAIGHT))
    assert (early.labels.tolist(), late.labels.tolist()) == ([[1, 2, 3, 4]], [[5, 6, 7, IGNORED]])
    assert early.bounds is first.bounds is None


def test_context_ranks_share_packed_rows_and_know_all_documents() -> None:
    samples = samples_of([3, 1, 2], pad_id=99)  # tokens 1 2 3 | 5 | 7 8, and what pads to a multiple of four
    first, second = (collate(samples, [(0, 1), (2,)], share) for share in shares(ZIGZAG))
    assert (first.input_ids.tolist(), second.input_ids.tolist()) == ([[1, 5], [7, 99]], [[2, 3], [8, 99]])
    for micro, positions in ((first, [[0, 0], [0, 1]]), (second, [[1, 2], [1, 0]])):
        assert micro.positions is not None
        assert micro.bounds is not None
        assert micro.positions.tolist() == positions
        assert micro.bounds.tolist() == [0, 3, 4, 6, 8]
    assert (first.num_tokens, second.num_tokens) == (3, 3)


layouts_of_rows = st.builds(
    Layout,
    st.builds(Mesh, dp_replicate=st.integers(1, 2), dp_shard=st.integers(1, 2), cp=st.integers(1, 4), tp=st.integers(1, 3)),
    sequence_parallel=st.booleans(),
    context=st.sampled_from(["ring", "ulysses"]),
)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.booleans(), layouts_of_rows)
@settings(deadline=None, max_examples=100)
def test_context_ranks_read_every_token_once_and_tensor_ranks_the_same(lengths: list[int], packs: bool, layout: Layout) -> None:
    """Beside each token its label and its position, as the whole row has them; its padded length divides among all ranks."""
    samples, numbers = samples_of(lengths), range(len(lengths))
    rows = [tuple(numbers)] if packs else [(i,) for i in numbers]
    alone = Share(replace(layout, mesh=Mesh(tp=layout.seq_multiple), sequence_parallel=True), 0)  # cuts nothing, and pads as much
    whole = columns(collate(samples, rows, alone))
    parts = {rank: collate(samples, rows, Share(layout, rank)) for rank in layout.mesh.peers(0, ("cp",))}
    assert sorted(row for part in parts.values() for row in columns(part)) == sorted(whole)
    assert sum(part.num_tokens for part in parts.values()) == sum(lengths)
    assert sum(part.num_trained for part in parts.values()) == sum(column[-2] != IGNORED for column in whole)
    for rank, part in parts.items():
        assert Share(layout, rank).row_length(part.input_ids.shape[1]) * len(rows) == len(whole)
        for peer in layout.mesh.peers(rank, ("tp",)):
            assert columns(collate(samples, rows, Share(layout, peer))) == columns(part)


def columns(micro: Micro) -> list[tuple[int, ...]]:
    """Each token with its row, label and position."""
    shape = micro.input_ids.shape
    positions = (torch.arange(shape[1]) if micro.positions is None else micro.positions).expand(shape)
    rows = torch.arange(shape[0]).unsqueeze(1).expand(shape)
    return [tuple(column) for column in torch.stack([rows, micro.input_ids, micro.labels, positions], dim=-1).flatten(0, 1).tolist()]


@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_held_out_rows_are_seen_once_and_ranks_stay_in_step(n: int, micro_batch: int, data_degree: int) -> None:
    samples = samples_of([1] * n)  # the first token of each sample is its name
    ranks = [list(held_out_batches(samples, micro_batch, share)) for share in data_ranks(data_degree)]
    assert {len(rank) for rank in ranks} == {-(-n // (micro_batch * data_degree))}
    firsts = [int(row[0]) for rank in ranks for micro in rank for row, labels in zip(micro.input_ids, micro.labels, strict=True) if row[0] != 0]
    assert sorted(firsts) == list(range(1, 2 * n, 2))
    assert sum(micro.num_trained for rank in ranks for micro in rank) == n


def test_context_ranks_hold_out_the_same_rows() -> None:
    samples = samples_of([3, 5, 1, 4, 1])
    layout = Layout(Mesh(dp_shard=2, cp=2))
    ranks = [list(held_out_batches(samples, 2, share)) for share in shares(layout)]
    assert {len(rank) for rank in ranks} == {2}
    assert sum(micro.num_tokens for rank in ranks for micro in rank) == 14
    assert sum(micro.num_trained for rank in ranks for micro in rank) == sum(micro.num_trained for micro in held_out_batches(samples, 2))
    for one, other in (ranks[:2], ranks[2:]):
        assert [micro.input_ids.shape for micro in one] == [micro.input_ids.shape for micro in other]


def test_a_global_batch_that_ranks_cannot_share() -> None:
    with pytest.raises(
        InputError, match=r"global_batch = 12 is not a multiple of micro_batch x data ranks = 2 x 4 = 8(.|\n)*use global_batch = 8 or 16"
    ):
        Batches(samples_of([1]), 0, 12, 2, data_ranks(4)[0])
