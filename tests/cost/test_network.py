"""Collectives on links: which links a group crosses, and the communication budget that people compute by hand."""

from __future__ import annotations

import pytest

from pentamesh.cost.network import NIC_PLATEAU, Group, group, link_name, seconds
from pentamesh.job.hardware import read_hardware
from pentamesh.layout.mesh import Mesh
from pentamesh.layout.moves import Move

GRADIENTS = 140_000_000_000  # 70B in bf16


def at_full_rate(move: Move, ranks: Group, fabric: str) -> float:
    """Seconds between nodes when NICs reach their nominal rate and latency is nothing."""
    hardware = read_hardware(f"2x8xRTX-Pro-6000@{fabric}")
    latency = (2 if move.kind == "all_reduce" else 1) * (move.num_ranks - 1) * hardware.inter.latency_s if hardware.inter else 0
    return (seconds(move, ranks, hardware) - latency) * NIC_PLATEAU


def test_groups_know_their_nodes() -> None:
    mesh = Mesh(dp_replicate=2, dp_shard=8)
    assert group(mesh, ("dp_shard",), 8) == Group(1, 8, 1)
    assert group(mesh, ("dp_replicate",), 8) == Group(2, 1, 8)
    assert group(Mesh(dp_shard=16), ("dp_shard",), 8) == Group(2, 8, 1)
    assert group(Mesh(dp_shard=8, tp=2), ("dp_shard",), 8) == Group(2, 4, 2)


@pytest.mark.parametrize(("fabric", "expected_s"), [("100gbps", 11.2), ("200gbps", 5.6), ("400gbps", 2.8), ("8x200gbps", 0.7)])
def test_hybrid_all_reduce_of_70b(fabric: str, expected_s: float) -> None:
    """Each rank reduces its eighth between two nodes; eight groups share the node's NICs. The budget: 140 GB a node, 5.6 s at 200 Gb/s."""
    ranks = group(Mesh(dp_replicate=2, dp_shard=8), ("dp_replicate",), 8)
    found = at_full_rate(Move("all_reduce", ("dp_replicate",), 2, GRADIENTS // 8), ranks, fabric)
    assert found == pytest.approx(expected_s, rel=0.01)


def test_full_shard_over_two_nodes_per_micro_batch() -> None:
    """Two gathers and a scatter of 140 GB round a ring of 16: 393.8 GB a node, 15.8 s at 200 Gb/s."""
    ranks = group(Mesh(dp_shard=16), ("dp_shard",), 8)
    kinds = ("all_gather", "all_gather", "reduce_scatter")
    found = sum(at_full_rate(Move(kind, ("dp_shard",), 16, GRADIENTS), ranks, "200gbps") for kind in kinds)
    assert found == pytest.approx(15.75, rel=0.01)


def test_inside_a_node() -> None:
    """70B, tensor 8, one micro-batch of 4,096 tokens both ways: 37.6 GB on the wire, 1.34 s at 28 GB/s."""
    ranks = group(Mesh(tp=8), ("tp",), 8)
    hardware = read_hardware("8xRTX-5090")
    one = Move("all_reduce", ("tp",), 8, 2 * 4096 * 8192)
    found = 320 * (seconds(one, ranks, hardware) - 14 * hardware.intra.latency_s)
    assert found == pytest.approx(1.34, rel=0.01)
    assert link_name(ranks, hardware) == hardware.intra.name


def test_published_all_reduce_of_8_h100() -> None:
    """480 GB/s of bus bandwidth and some 30 us: 1 GiB in 3.9 ms."""
    found = seconds(Move("all_reduce", ("dp_replicate",), 8, 2**30), Group(1, 8, 1), read_hardware("8xH100"))
    assert found == pytest.approx(3.95e-3, rel=0.05)


def test_one_rank_is_silent() -> None:
    assert seconds(Move("all_gather", ("tp",), 1, 10**9), Group(1, 1, 1), read_hardware("8xH100")) == 0
