"""What a collective takes on a machine: which links its group crosses, bytes over their bandwidth, and a latency per ring step.

    seconds = steps x latency + max(wire inside a node / link, wire of a node / its NICs)

A group that spans nodes works in both at once, chunk by chunk, so the slower one decides.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from pentamesh.job.hardware import Hardware
from pentamesh.layout.mesh import Mesh
from pentamesh.layout.moves import Move

__all__ = ["Group", "group", "link_name", "node_wire_bytes", "seconds"]

# Share of a nominal link that rings reach inside a node: 235 of 300 (A100), 368 of 450 (H200), 682 of 900 GB/s (B200).
# Source: stas00/ml-engineering network/README.md; Azure/AI-benchmarking-guide, Azure_Results.
RING_PLATEAU = 0.8
# Switches that add (NVLS) carry an all-reduce, and only that, above the link's own rate: bus bandwidth by link. Source: the same.
NVLS_BYTES_PER_S = {"NVLink4": 480e9, "NVLink5": 840e9}
NVLS_MIN_RANKS = 4
# NCCL reaches 46-48 of the 50 GB/s of a 400 Gb/s NIC (NVIDIA/nccl-tests#290), 23 of 25 over RoCE; 37 of 50 were seen on EFA.
NIC_PLATEAU = 0.92


class Group(NamedTuple):
    """The ranks of a collective on a machine: `num_nodes` nodes with `per_node` of its ranks each, and how many such groups share a node."""

    num_nodes: int
    per_node: int
    num_concurrent: int

    @property
    def size(self) -> int:
        return self.num_nodes * self.per_node


@lru_cache(maxsize=4096)
def group(mesh: Mesh, axes: tuple[str, ...], devices_per_node: int) -> Group:
    """The group of rank 0 over `axes`. Ranks fill nodes in order, so the innermost axes stay inside a node."""
    nodes = [rank // devices_per_node for rank in mesh.peers(0, axes)]
    per_node = nodes.count(nodes[0])
    num_nodes = len(set(nodes))
    return Group(num_nodes, per_node, min(devices_per_node, mesh.num_ranks) // per_node if num_nodes > 1 else 1)


def seconds(move: Move, ranks: Group, hardware: Hardware) -> float:
    """Time of one collective with no other work beside it. Source: alpha-beta model; constants above and the links' own."""
    if move.num_ranks == 1:
        return 0.0
    inside = move.wire_bytes / _intra_bytes_per_s(move.kind, ranks.per_node, hardware) if ranks.per_node > 1 else 0.0
    if ranks.num_nodes == 1:
        return _steps(move) * hardware.intra.latency_s + inside
    if hardware.inter is None:
        raise ValueError("a group of several nodes needs a fabric")
    between = node_wire_bytes(move, ranks) / (hardware.inter.bytes_per_s * hardware.nics_per_node * NIC_PLATEAU)
    return _steps(move) * hardware.inter.latency_s + max(inside, between)


def link_name(ranks: Group, hardware: Hardware) -> str:
    """The link that a group is bound by, as people call it."""
    if ranks.num_nodes == 1 or hardware.inter is None:
        return hardware.intra.name
    return f"{hardware.nics_per_node} x {hardware.inter.name} a node"


def _steps(move: Move) -> int:
    """Ring steps, each of which adds the link's latency."""
    return {"all_reduce": 2 * (move.num_ranks - 1), "send": 1}.get(move.kind, move.num_ranks - 1)


def _intra_bytes_per_s(kind: str, per_node: int, hardware: Hardware) -> float:
    link = hardware.intra
    if kind == "all_reduce" and per_node >= NVLS_MIN_RANKS and link.name in NVLS_BYTES_PER_S:
        return NVLS_BYTES_PER_S[link.name]
    return link.bytes_per_s * (1.0 if link.measured else RING_PLATEAU)


def node_wire_bytes(move: Move, ranks: Group) -> float:
    """Bytes that leave one node through its NICs, of all concurrent groups.

    An all-reduce is hierarchical: reduced inside the node first, 2 (k - 1) / k of the buffer cross for k nodes. Gathers and scatters go
    round one ring through all ranks, (n - 1) / n of the buffer over every link of it. Source: NCCL's algorithms (tree and NVLS for all-reduce
    only); PyTorch hybrid shard has the same volume.
    """
    k, n = ranks.num_nodes, ranks.size
    share = {
        "all_reduce": 2 * (k - 1) / k,
        "all_to_all": ranks.per_node * (n - ranks.per_node) / n,
        "send": 1.0,
    }.get(move.kind, (n - 1) / n)
    return ranks.num_concurrent * share * move.bytes
