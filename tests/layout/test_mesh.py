"""Ranks, coordinates and groups of both views of the mesh."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentamesh.errors import InputError
from pentamesh.layout.mesh import AXES, EXPERT_AXES, Layout, Mesh, all_meshes
from tests.layout.strategies import meshes

DENSE = st.sets(st.sampled_from(AXES)).map(lambda axes: tuple(a for a in AXES if a in axes))
EXPERT = st.sets(st.sampled_from(["dp_replicate", *EXPERT_AXES]), min_size=1).map(
    lambda axes: tuple(a for a in ("dp_replicate", *EXPERT_AXES) if a in axes)
)


@given(meshes())
def test_coords_count_row_major(mesh: Mesh) -> None:
    expected = itertools.product(*(range(mesh.degree(axis)) for axis in AXES))
    found = [tuple(mesh.coords(rank)[axis] for axis in AXES) for rank in range(mesh.num_ranks)]
    assert found == list(expected)


@given(meshes())
def test_experts_are_another_view_of_the_same_ranks(mesh: Mesh) -> None:
    assert mesh.edp * mesh.ep == mesh.dp_shard * mesh.cp * mesh.tp
    for rank in range(mesh.num_ranks):
        coords = mesh.coords(rank)
        assert coords["edp"] * mesh.ep + coords["ep"] == mesh.coord(rank, ("dp_shard", "cp", "tp"))
        assert mesh.peers(rank, EXPERT_AXES) == mesh.peers(rank, ("dp_shard", "cp", "tp"))


@given(meshes(), st.one_of(DENSE, EXPERT))
def test_groups_partition_the_ranks(mesh: Mesh, axes: tuple[str, ...]) -> None:
    groups = mesh.groups(axes)
    assert sorted(itertools.chain(*groups)) == list(range(mesh.num_ranks))
    assert {len(group) for group in groups} == {mesh.degree(*axes)}


@given(meshes(), st.one_of(DENSE, EXPERT), st.data())
def test_peers_stand_in_the_order_of_their_coordinates(mesh: Mesh, axes: tuple[str, ...], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, mesh.num_ranks - 1))
    peers = mesh.peers(rank, axes)
    assert [mesh.coord(peer, axes) for peer in peers] == list(range(mesh.degree(*axes)))
    assert peers[mesh.coord(rank, axes)] == rank
    assert all(mesh.peers(peer, axes) == peers for peer in peers)


def test_tensor_ranks_are_neighbours() -> None:
    mesh = Mesh(pp=2, dp_shard=2, tp=4)
    assert mesh.peers(5, ("tp",)) == (4, 5, 6, 7)
    assert mesh.peers(5, ("dp_shard",)) == (1, 5)
    assert mesh.peers(5, ("pp",)) == (5, 13)


def test_expert_groups_of_eight_ranks() -> None:
    mesh = Mesh(dp_shard=4, tp=2, ep=4)
    assert mesh.edp == 2
    assert mesh.groups(("ep",)) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert mesh.groups(("edp",)) == [(0, 4), (1, 5), (2, 6), (3, 7)]


@given(meshes())
def test_a_rank_outside_the_mesh_has_no_place(mesh: Mesh) -> None:
    for rank in (-1, mesh.num_ranks):
        with pytest.raises(IndexError):
            mesh.coords(rank)


def test_degrees_that_cannot_be() -> None:
    with pytest.raises(InputError, match=r"expert = 3 does not divide .* = 4"):
        Mesh(dp_shard=4, ep=3)
    with pytest.raises(InputError, match="at least 1"):
        Mesh(tp=0)


def test_all_meshes_of_twelve_ranks() -> None:
    found = all_meshes(12)
    assert len(found) == len(set(found)) == 15 * 5  # 12 = 2^2 x 3: the 2s lie on five axes in C(6, 2) ways, the 3 in 5
    assert {math.prod(mesh.degree(axis) for axis in AXES) for mesh in found} == {12}


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [
        (Layout(Mesh(dp_replicate=4)), "ddp"),
        (Layout(Mesh(dp_shard=4), "optimizer"), "zero1"),
        (Layout(Mesh(dp_shard=4), "gradients"), "zero2"),
        (Layout(Mesh(dp_shard=4), "parameters"), "full_shard"),
        (Layout(Mesh(dp_replicate=2, dp_shard=2), "parameters"), "hybrid_shard"),
        (Layout(Mesh(dp_shard=2, tp=2), "parameters"), "multi_axis"),
        (Layout(Mesh(dp_shard=2, ep=2), "parameters"), "multi_axis"),
    ],
)
def test_strategies_have_names(layout: Layout, strategy: str) -> None:
    assert layout.strategy == strategy
