"""`split`: every element is held exactly once over the axes that cut, in the order and the sizes of torch's chunk rule."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pentamesh.layout.mesh import Layout, Mesh
from pentamesh.layout.rules import copies, partial_axes
from pentamesh.layout.split import Box, Split, chunk, folded_chunk, split
from pentamesh.model.dims import Acts, Dim, TensorSpec
from pentamesh.model.families import describe
from pentamesh.model.roles import STORE, Role
from tests.layout.strategies import activations, layouts, tensors

HELD = st.sampled_from([*STORE, Role.USE, Role.COMPUTED])
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 301,
    "num_hidden_layers": 2,
    "tie_word_embeddings": True,
}


def parameter(suffix: str) -> TensorSpec:
    model = describe(QWEN3, "toy")
    assert model
    return next(t for t in model.parameters if t.name.endswith(suffix))


def elements(boxes: tuple[Box, ...], offset: str) -> Counter[tuple[int, ...]]:
    """How often each element occurs in `boxes`, at its global (`offset`) or local (`local_offset`) place."""
    ranges = ([range(low, low + size) for low, size in zip(getattr(box, offset), box.size, strict=True)] for box in boxes)
    return Counter(itertools.chain.from_iterable(itertools.product(*r) for r in ranges))


def whole(shape: tuple[int, ...]) -> Counter[tuple[int, ...]]:
    return Counter(itertools.product(*map(range, shape)))


def assert_tiles(held: Split) -> None:
    mesh = held.layout.mesh
    cuts = [(dim, cut) for dim, cuts in zip(held.tensor.dims, held.cuts, strict=True) for cut in cuts if not cut.by_element]
    times = math.prod(copies(dim, mesh.degree(*cut.axes)) for dim, cut in cuts)
    for group in mesh.groups(held.axes):
        together = sum((elements(held.boxes(rank), "offset") for rank in group), Counter())
        assert together == Counter(dict.fromkeys(whole(held.tensor.shape), times))


@given(tensors(), HELD, layouts())
def test_parameters_are_tiled_by_the_ranks_that_cut_them(tensor: TensorSpec, role: Role, layout: Layout) -> None:
    assert_tiles(split(tensor, role, layout))


@given(activations(), st.sampled_from([Role.USE, Role.ATTEND, Role.CARRY]), layouts())
def test_activations_are_tiled_by_the_ranks_that_cut_them(tensor: TensorSpec, role: Role, layout: Layout) -> None:
    assert_tiles(split(tensor, role, layout))


@given(tensors(), HELD, layouts())
def test_ranks_of_every_other_axis_hold_the_same(tensor: TensorSpec, role: Role, layout: Layout) -> None:
    held = split(tensor, role, layout)
    shares: dict[tuple[int, ...], tuple[Box, ...]] = {}
    for rank in layout.ranks():
        coords = layout.mesh.coords(rank)
        assert shares.setdefault(tuple(coords[axis] for axis in held.axes), held.boxes(rank)) == held.boxes(rank)


@given(tensors(), HELD, layouts())
def test_boxes_fill_the_local_tensor(tensor: TensorSpec, role: Role, layout: Layout) -> None:
    held = split(tensor, role, layout)
    for rank in layout.ranks():
        assert elements(held.boxes(rank), "local_offset") == whole(held.local_shape(rank))
        assert all(box.numel for box in held.boxes(rank))


@given(tensors(), HELD, layouts())
def test_the_first_rank_has_the_largest_share(tensor: TensorSpec, role: Role, layout: Layout) -> None:
    held = split(tensor, role, layout)
    assert held.max_local_numel == max(sum(box.numel for box in held.boxes(rank)) for rank in layout.ranks())


@given(activations(), st.sampled_from([Role.USE, Role.ATTEND, Role.CARRY]), layouts())
def test_the_first_rank_has_most_of_an_activation(tensor: TensorSpec, role: Role, layout: Layout) -> None:
    """Also where a sequence of any length is folded: nothing is padded beyond the share of rank 0."""
    held = split(tensor, role, layout)
    shares = [sum(box.numel for box in held.boxes(rank)) for rank in layout.ranks()]
    assert held.max_local_numel == max(shares)
    assert all(elements(held.boxes(rank), "local_offset") == whole(held.local_shape(rank)) for rank in layout.ranks() if shares[rank])


@given(st.integers(0, 60), st.integers(1, 8))
def test_a_folded_line_loses_no_element(length: int, count: int) -> None:
    runs = [folded_chunk(length, index, count) for index in range(count)]
    held = [[i for low, size in both for i in range(low, low + size)] for both in runs]
    assert sorted(itertools.chain.from_iterable(held)) == list(range(length))
    assert [len(mine) for mine in held] == [chunk(length, index, count)[1] for index in range(count)]
    for mine, ((_, early), _) in zip(held, runs, strict=True):
        assert mine == sorted(mine)
        assert early == -(-len(mine) // 2)


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_causal_work_is_even_where_a_sequence_is_folded(cp: int) -> None:
    """Each token sees itself and those before it."""
    row = split(TensorSpec("row", (Dim("seq", 4 * cp),)), Role.ATTEND, Layout(Mesh(cp=cp)))
    work = {sum(low + i + 1 for low, size in row.intervals(rank, 0) for i in range(size)) for rank in range(cp)}
    assert work == {2 * (4 * cp + 1)}


FOLDED = [
    (Layout(Mesh(cp=2)), Role.USE, [[(0, 4), (12, 4)], [(4, 4), (8, 4)]]),
    (Layout(Mesh(cp=2), context="ulysses"), Role.USE, [[(0, 8)], [(8, 8)]]),
    # Tensor ranks cut what is then local, wherever its two runs meet.
    (Layout(Mesh(cp=2, tp=2), sequence_parallel=True), Role.CARRY, [[(0, 4)], [(12, 4)], [(4, 4)], [(8, 4)]]),
    (Layout(Mesh(cp=1, tp=2), sequence_parallel=True), Role.CARRY, [[(0, 8)], [(8, 8)]]),
    (Layout(Mesh(cp=2, tp=3), sequence_parallel=True), Role.CARRY, [[(0, 3)], [(3, 1), (12, 2)], [(14, 2)], [(4, 3)], [(7, 1), (8, 2)], [(10, 2)]]),
]


@pytest.mark.parametrize(("layout", "role", "expected"), FOLDED)
def test_which_tokens_of_a_row_a_rank_has(layout: Layout, role: Role, expected: list[list[tuple[int, int]]]) -> None:
    for name in ("seq", "kv_seq"):
        row = split(TensorSpec("row", (Dim(name, 16),)), role, layout)
        assert [list(row.intervals(rank, 0)) for rank in layout.ranks()] == expected


@given(tensors(), HELD, layouts())
def test_content_is_what_torch_chunks(tensor: TensorSpec, role: Role, layout: Layout) -> None:
    """The indices of each dim, cut by torch.chunk itself: units of each part over tensor axes, then elements over the data axes."""
    held = split(tensor, role, layout)
    for rank, position in itertools.product(layout.ranks(), range(len(tensor.dims))):
        mine = torch.cat([torch.arange(low, low + length) for low, length in held.intervals(rank, position)])
        assert mine.tolist() == _chunked(held, rank, position).tolist()


def _chunked(held: Split, rank: int, position: int) -> torch.Tensor:
    dim, mesh = held.tensor.dims[position], held.layout.mesh
    parts = list(torch.arange(dim.size).split(list(dim.parts or (dim.size,))))
    for cut in held.cuts[position]:
        index, count = mesh.coord(rank, cut.axes), mesh.degree(*cut.axes)
        if cut.by_element:
            parts = [_chunk(torch.cat(parts), index, count)]
        else:
            shared = copies(dim, count)
            parts = [_chunk(part.view(-1, dim.grain), index // shared, count // shared).flatten() for part in parts]
    return torch.cat(parts)


def _chunk(tensor: torch.Tensor, index: int, count: int) -> torch.Tensor:
    chunks = tensor.chunk(count) if len(tensor) else ()
    return chunks[index] if index < len(chunks) else tensor[:0]


@given(st.integers(0, 40), st.integers(1, 12))
def test_chunks_cover_in_order_and_only_the_last_are_short(length: int, count: int) -> None:
    chunks = [chunk(length, index, count) for index in range(count)]
    sizes = [size for _, size in chunks]
    assert sum(sizes) == length
    assert [low for low, _ in chunks] == list(itertools.accumulate(sizes[:-1], initial=0))
    assert sizes == sorted(sizes, reverse=True)


@given(layouts(), st.sampled_from([Role.USE, Role.CARRY]), st.sampled_from(["hidden", "ffn", "heads"]))
def test_partial_sums_are_exactly_over_the_ranks_that_see_other_activations(layout: Layout, role: Role, own: str) -> None:
    """What a gradient sums over (the dims its weight lacks) is tiled by the ranks of its partial axes: no part missing, none twice."""
    dims = ("batch", "seq", "heads" if own == "hidden" and role is Role.USE else own)
    weight = TensorSpec("scale", (Dim(own, 12),), Acts(role, dims))
    lacking = TensorSpec("lacking", tuple(Dim(name, 12) for name in dims if name != own))
    seen = split(lacking, role, layout)
    for group in layout.mesh.groups(partial_axes(weight, layout)):
        assert sum((elements(seen.boxes(rank), "offset") for rank in group), Counter()) == whole(lacking.shape)


def test_a_short_vocabulary_leaves_a_rank_empty() -> None:
    held = split(TensorSpec("head", (Dim("vocab", 5), Dim("hidden", 2))), Role.USE, Layout(Mesh(tp=4)))
    assert [held.local_shape(rank) for rank in range(4)] == [(2, 2), (2, 2), (1, 2), (0, 2)]
    assert held.boxes(3) == ()


def test_heads_stay_whole() -> None:
    held = split(TensorSpec("k", (Dim("kv_heads", 3 * 4, 4), Dim("hidden", 2))), Role.USE, Layout(Mesh(tp=2)))
    assert [held.local_shape(rank) for rank in range(2)] == [(8, 2), (4, 2)]
    assert held.placements() is None  # DTensor would give each rank a head and a half


def test_a_fused_tensor_is_cut_part_by_part() -> None:
    gate_up = TensorSpec("gate_up", (Dim("ffn", 12, parts=(6, 6)), Dim("hidden", 4)))
    held = split(gate_up, Role.WEIGHT, Layout(Mesh(tp=2)))
    assert held.boxes(1) == (Box((3, 0), (3, 4), (0, 0)), Box((9, 0), (3, 4), (3, 0)))
    assert held.placements() is None


def test_experts_lie_on_their_own_view() -> None:
    experts = TensorSpec("experts", (Dim("experts", 4), Dim("ffn", 6), Dim("hidden", 2)))
    held = split(experts, Role.WEIGHT, Layout(Mesh(dp_shard=2, tp=2, ep=2), "parameters", sequence_parallel=True))
    assert str(held) == "experts [experts/ep, ffn/edp, hidden]"
    assert [held.local_shape(rank) for rank in range(4)] == [(2, 3, 2)] * 4
    assert str(split(experts, Role.USE, held.layout)) == "experts [experts/ep, ffn, hidden]"


def test_the_gradient_of_an_expert_is_partial_over_the_ranks_that_share_it() -> None:
    experts = TensorSpec("experts", (Dim("experts", 4), Dim("ffn", 6), Dim("hidden", 2)), Acts(Role.USE, ("batch", "seq", "hidden")))
    layout = Layout(Mesh(dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=4), "parameters", sequence_parallel=True)
    assert partial_axes(experts, layout) == ("dp_replicate", "edp")


NOTATION = [
    ("q_proj.weight", Role.WEIGHT, Layout(Mesh(dp_shard=2, tp=2), "parameters"), "[heads*128/tp/dp_shard, hidden]"),
    ("k_proj.weight", Role.WEIGHT, Layout(Mesh(dp_shard=2, cp=2), "parameters"), "[kv_heads*128/dp_shard*cp, hidden]"),
    ("o_proj.weight", Role.WEIGHT, Layout(Mesh(dp_shard=2, tp=2), "parameters"), "[hidden/dp_shard, heads*128/tp]"),
    ("q_proj.weight", Role.WEIGHT, Layout(Mesh(dp_shard=2), "gradients"), "[heads*128, hidden]"),
    ("q_proj.weight", Role.GRADIENT, Layout(Mesh(dp_shard=2), "gradients"), "[heads*128/dp_shard, hidden]"),
    ("q_proj.weight", Role.GRADIENT, Layout(Mesh(dp_shard=2), "optimizer"), "[heads*128, hidden]"),
    ("q_proj.weight", Role.STATE, Layout(Mesh(dp_shard=2), "optimizer"), "[heads*128/dp_shard, hidden]"),
    ("embed_tokens.weight", Role.USE, Layout(Mesh(dp_shard=2, tp=2), "parameters"), "[vocab/tp, hidden]"),
    ("q_norm.weight", Role.COMPUTED, Layout(Mesh(tp=2)), "[head_dim] {tp: partial}"),
    ("k_norm.weight", Role.COMPUTED, Layout(Mesh(cp=2, tp=2)), "[head_dim] {cp, tp: partial}"),
    ("input_layernorm.weight", Role.COMPUTED, Layout(Mesh(tp=2)), "[hidden]"),
    ("input_layernorm.weight", Role.COMPUTED, Layout(Mesh(tp=2), sequence_parallel=True), "[hidden] {tp: partial}"),
    (
        "q_proj.weight",
        Role.COMPUTED,
        Layout(Mesh(dp_replicate=2, dp_shard=2, cp=2, tp=2)),
        "[heads*128/tp, hidden] {dp_replicate, dp_shard, cp: partial}",
    ),
    ("embed_tokens.weight", Role.COMPUTED, Layout(Mesh(cp=2, tp=2), sequence_parallel=True), "[vocab/tp, hidden] {cp: partial}"),
    ("model.norm.weight", Role.COMPUTED, Layout(Mesh(cp=2)), "[hidden] {cp: partial}"),
]


@pytest.mark.parametrize(("suffix", "role", "layout", "notation"), NOTATION)
def test_notation(suffix: str, role: Role, layout: Layout, notation: str) -> None:
    tensor = parameter(suffix)
    assert str(split(tensor, role, layout)) == f"{tensor.name} {notation}"


@pytest.mark.parametrize(("size", "sizes"), [((7, 3), [2, 2, 2, 1]), ((2, 9), [1, 1]), ((5,), [5]), ((8,), [7, 1]), ((0, 3), [0]), ((), [])])
def test_slabs_are_the_box_some_rows_at_a_time(size: tuple[int, ...], sizes: list[int]) -> None:
    box = Box((10,) * len(size), size, (4,) * len(size))
    slabs = list(box.slabs(7))
    assert [slab.size[0] for slab in slabs if slab.size] == sizes
    assert sum(slab.numel for slab in slabs) == box.numel
    for slab, before in zip(slabs, itertools.accumulate(sizes, initial=0), strict=False):
        assert slab.size[1:] == size[1:]
        assert slab.offset == tuple(10 + before * (i == 0) for i in range(len(size)))
        assert slab.local_offset == tuple(4 + before * (i == 0) for i in range(len(size)))


def test_placements_where_tensor_and_data_axes_cut_one_dim() -> None:
    held = split(parameter("q_proj.weight"), Role.WEIGHT, Layout(Mesh(dp_shard=2, tp=4), "parameters"))
    assert held.placements() == {("tp",): "Shard(0)", ("dp_shard",): "_StridedShard(0, split_factor=4)"}
    assert split(parameter("q_norm.weight"), Role.WEIGHT, Layout(Mesh(tp=2))).placements() == {}
