"""`moves`: the right collective for each change of how a tensor is held, with no byte too few and, where sizes divide, none too many."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pentamesh.layout.mesh import Layout, Mesh
from pentamesh.layout.moves import Move, crossing, mirror, moves
from pentamesh.layout.rules import tensor_partial
from pentamesh.layout.split import Box, Split, split
from pentamesh.model.dims import Acts, Dim, TensorSpec
from pentamesh.model.roles import STORE, Role
from tests.layout.strategies import activations, layouts, tensors

ROLES = st.sampled_from(list(Role))
STREAM = TensorSpec("residual", (Dim("batch", 4), Dim("seq", 8), Dim("hidden", 16)))
PROJECTION = TensorSpec("proj", (Dim("heads", 16, 4), Dim("hidden", 8)), Acts(Role.USE, ("batch", "seq", "hidden")))


def one(kind: str, axes: tuple[str, ...], num_ranks: int, num_bytes: int) -> tuple[Move, ...]:
    return (Move(kind, axes, num_ranks, num_bytes),)


# What one collective puts on the wire.


def ring(kind: str, num_ranks: int, num_elements: int) -> int:
    """Elements that rank 0 sends when the collective runs as a ring, counted message by message."""
    share = num_elements // num_ranks
    if kind == "send":
        return num_elements
    if kind == "all_to_all":
        return sum(share for peer in range(num_ranks) if peer != 0)
    rounds = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}[kind]  # an all-reduce scatters, then gathers
    return sum(share for _ in range(rounds) for _ in range(num_ranks - 1))


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"])
@pytest.mark.parametrize("num_ranks", [2, 3, 8, 64])
def test_wire_bytes_are_those_of_a_ring(kind: str, num_ranks: int) -> None:
    num_elements = 12 * num_ranks
    assert Move(kind, ("dp_shard",), num_ranks, 4 * num_elements).wire_bytes == pytest.approx(4 * ring(kind, num_ranks, num_elements), rel=1e-15)


def test_an_8b_gradient_over_eight_ranks() -> None:
    """16 bytes of bf16 gradients a pair of parameters: 16.06 GB are 28.1 GB on the wire of each of eight ranks."""
    assert Move("all_reduce", ("dp_replicate",), 8, 2 * 8_030_261_248).wire_bytes == pytest.approx(28.1e9, rel=1e-3)


# The algebra.


@given(st.one_of(tensors(), activations()), ROLES, layouts())
def test_staying_moves_nothing(tensor: TensorSpec, role: Role, layout: Layout) -> None:
    assert moves(tensor, role, role, layout, 4) == ()


@given(st.one_of(tensors(), activations()), ROLES, ROLES, layouts())
def test_every_move_is_of_its_axes(tensor: TensorSpec, source: Role, target: Role, layout: Layout) -> None:
    for move in moves(tensor, source, target, layout, 4):
        assert move.num_ranks == layout.mesh.degree(*move.axes) > 1
        assert move.bytes % (4 * (move.num_ranks if move.kind in ("all_gather", "reduce_scatter") else 1)) == 0


@given(st.one_of(tensors(), activations()), ROLES, ROLES, layouts())
def test_the_mirror_of_a_mirror_is_the_crossing(tensor: TensorSpec, source: Role, target: Role, layout: Layout) -> None:
    crossed = moves(tensor, source, target, layout, 4)
    assert mirror(mirror(crossed)) == crossed
    assert sum(m.wire_bytes for m in mirror(crossed)) == sum(m.wire_bytes for m in crossed)


def elements(boxes: tuple[Box, ...]) -> set[tuple[int, ...]]:
    found = set()
    for box in boxes:
        points = [()]
        for low, size in zip(box.offset, box.size, strict=True):
            points = [(*point, i) for point in points for i in range(low, low + size)]
        found.update(points)
    return found


def missing(before: Split, after: Split) -> int:
    """Elements that the neediest rank has to receive: those it holds afterwards and did not hold before."""
    return max(len(elements(after.boxes(rank)) - elements(before.boxes(rank))) for rank in before.layout.ranks())


CROSSINGS = st.sampled_from([(Role.CARRY, Role.USE), (Role.USE, Role.CARRY), (Role.USE, Role.ATTEND), (Role.ATTEND, Role.USE)])


@given(activations(), CROSSINGS, layouts())
def test_activations_receive_at_least_what_they_miss(tensor: TensorSpec, roles: tuple[Role, Role], layout: Layout) -> None:
    """Gathers are padded to the largest share. An exchange is not: its sizes must divide, which a legal layout has and the next test takes."""
    before, after = (split(tensor, role, layout) for role in roles)
    crossed = crossing(before, after, 1)
    assume(all(move.kind == "all_gather" for move in crossed))
    assert sum(move.wire_bytes for move in crossed) >= missing(before, after) - 1e-9


@given(tensors(), st.sampled_from([Role.WEIGHT, Role.STATE]), layouts())
def test_parameters_receive_at_least_what_they_miss(tensor: TensorSpec, role: Role, layout: Layout) -> None:
    before, after = split(tensor, role, layout), split(tensor, Role.USE, layout)
    assert sum(move.wire_bytes for move in crossing(before, after, 1)) >= missing(before, after) - 1e-9


@given(CROSSINGS, layouts(), st.sampled_from([("seq", "hidden"), ("seq", "heads"), ("kv_seq", "kv_heads")]))
def test_activations_receive_nothing_twice_where_sizes_divide(roles: tuple[Role, Role], layout: Layout, names: tuple[str, str]) -> None:
    assume(layout.mesh.num_ranks <= 8)
    degrees = layout.mesh.cp * layout.mesh.tp
    tensor = TensorSpec("x", (Dim("batch", layout.mesh.dp_replicate * layout.mesh.dp_shard), Dim(names[0], degrees), Dim(names[1], degrees)))
    before, after = (split(tensor, role, layout) for role in roles)
    assert sum(move.wire_bytes for move in crossing(before, after, 1)) == pytest.approx(missing(before, after), abs=1e-9)


@given(tensors(), layouts().map(lambda layout: replace(layout, shard="parameters")))
def test_sharded_gradients_return_the_way_that_weights_came(tensor: TensorSpec, layout: Layout) -> None:
    """Full shard: the reduce-scatter of a gradient has the buffer of the weight's all-gather; copies reduce the share that is left."""
    acting = TensorSpec(tensor.name, tensor.dims, Acts(Role.USE, ("batch", "seq", "everything")))
    assume(not tensor_partial(acting, layout))  # key heads that tensor ranks share are summed over these too
    gathered = moves(acting, Role.WEIGHT, Role.USE, layout, 4)
    returned = moves(acting, Role.COMPUTED, Role.GRADIENT, layout, 4)
    assert [m for m in returned if m.kind == "reduce_scatter"] == list(mirror(gathered))
    share = split(acting, Role.GRADIENT, layout).max_local_numel * 4
    assert [m.bytes for m in returned if m.kind == "all_reduce"] == ([share] if layout.mesh.dp_replicate > 1 else [])


@given(tensors(), layouts(), st.sampled_from(STORE[1:]))
def test_a_gradient_is_reduced_over_each_partial_axis_once(tensor: TensorSpec, layout: Layout, kind: Role) -> None:
    acting = TensorSpec(tensor.name, tensor.dims, Acts(Role.USE, ("batch", "seq", "everything")))
    reduced = [axis for move in moves(acting, Role.COMPUTED, kind, layout, 4) for axis in move.axes]
    assert sorted(reduced) == sorted(split(acting, Role.COMPUTED, layout).partial)


# The strategies, in their own words.


def test_ddp_reduces_the_whole_gradient_once() -> None:
    assert moves(PROJECTION, Role.COMPUTED, Role.GRADIENT, Layout(Mesh(dp_replicate=4)), 4) == one("all_reduce", ("dp_replicate",), 4, 16 * 8 * 4)
    assert moves(PROJECTION, Role.WEIGHT, Role.USE, Layout(Mesh(dp_replicate=4)), 4) == ()


def test_zero1_sends_what_ddp_sends() -> None:
    layout = Layout(Mesh(dp_shard=4), "optimizer")
    down, up = moves(PROJECTION, Role.COMPUTED, Role.STATE, layout, 4), moves(PROJECTION, Role.STATE, Role.WEIGHT, layout, 4)
    assert (down, up) == (one("reduce_scatter", ("dp_shard",), 4, 512), one("all_gather", ("dp_shard",), 4, 512))
    ddp = moves(PROJECTION, Role.COMPUTED, Role.GRADIENT, Layout(Mesh(dp_shard=4)), 4)
    assert sum(m.wire_bytes for m in (*down, *up)) == sum(m.wire_bytes for m in ddp)


def test_full_shard_pads_an_uneven_dim() -> None:
    norm = TensorSpec("norm", (Dim("hidden", 10),), Acts(Role.CARRY, ("batch", "seq", "hidden")))
    layout = Layout(Mesh(dp_shard=4), "parameters")
    assert moves(norm, Role.WEIGHT, Role.USE, layout, 2) == one("all_gather", ("dp_shard",), 4, 4 * 3 * 2)
    assert moves(norm, Role.COMPUTED, Role.GRADIENT, layout, 4) == one("reduce_scatter", ("dp_shard",), 4, 4 * 3 * 4)


def test_hybrid_shard_reduces_only_the_share_between_copies() -> None:
    found = moves(PROJECTION, Role.COMPUTED, Role.GRADIENT, Layout(Mesh(dp_replicate=2, dp_shard=4), "parameters"), 4)
    assert found == (Move("reduce_scatter", ("dp_shard",), 4, 512), Move("all_reduce", ("dp_replicate",), 2, 128))


def test_context_ranks_share_parameters_as_data_ranks_do() -> None:
    found = moves(PROJECTION, Role.WEIGHT, Role.USE, Layout(Mesh(dp_shard=2, cp=2, tp=2), "parameters"), 2)
    assert found == one("all_gather", ("dp_shard", "cp"), 4, 16 * 8 // 2 * 2)


@pytest.mark.parametrize(("sequence_parallel", "entry", "leaves"), [(False, (), "all_reduce"), (True, "all_gather", "reduce_scatter")])
def test_tensor_parallel_at_the_boundary_of_a_block(sequence_parallel: bool, entry: str, leaves: str) -> None:
    layout = Layout(Mesh(dp_shard=2, tp=4), sequence_parallel=sequence_parallel)
    carry, use = split(STREAM, Role.CARRY, layout), split(STREAM, Role.USE, layout)
    buffer = math.prod(STREAM.shape) // 2 * 2
    assert crossing(carry, use, 2) == (one(entry, ("tp",), 4, buffer) if entry else ())
    assert crossing(use, carry, 2, contracted=("tp",)) == one(leaves, ("tp",), 4, buffer)


def test_ulysses_exchanges_heads_for_tokens() -> None:
    queries = TensorSpec("queries", (Dim("batch", 2), Dim("seq", 8), Dim("heads", 32, 4)))
    layout = Layout(Mesh(cp=4, tp=2), context="ulysses")
    assert moves(queries, Role.USE, Role.ATTEND, layout, 2) == one("all_to_all", ("cp",), 4, 2 * 8 // 4 * 32 // 2 * 2)


@pytest.mark.parametrize(("context", "expected"), [("ring", ()), ("all_gather", one("all_gather", ("cp",), 4, 2 * 8 * 32 * 2))])
def test_keys_are_passed_round_or_gathered(context: str, expected: tuple[Move, ...]) -> None:
    keys = TensorSpec("keys", (Dim("batch", 2), Dim("kv_seq", 8), Dim("kv_heads", 32, 4)))
    layout = Layout(Mesh(cp=4), context="ring" if context == "ring" else "all_gather")
    assert moves(keys, Role.USE, Role.ATTEND, layout, 2) == expected


def test_an_expert_is_gathered_over_its_own_data_axis() -> None:
    experts = TensorSpec("experts", (Dim("experts", 4), Dim("ffn", 6), Dim("hidden", 2)), Acts(Role.USE, ("batch", "seq", "hidden")))
    layout = Layout(Mesh(dp_replicate=2, dp_shard=4, ep=2), "parameters")
    assert moves(experts, Role.WEIGHT, Role.USE, layout, 2) == one("all_gather", ("edp",), 2, 2 * 6 * 2 * 2)
    assert moves(experts, Role.COMPUTED, Role.GRADIENT, layout, 4) == (
        Move("reduce_scatter", ("edp",), 2, 2 * 6 * 2 * 4),
        Move("all_reduce", ("dp_replicate",), 2, 2 * 3 * 2 * 4),
    )
