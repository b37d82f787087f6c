"""`moves`: one crossing of one tensor from one role to another, as collectives.

The algebra is small. Comparing how a tensor is held before and after, axis by axis:

    cut before, whole after          all_gather
    partial sum before, whole after  all_reduce
    partial sum before, cut after    reduce_scatter
    cut along one dim, then another  all_to_all
    whole before, cut after          nothing: each rank keeps its own part

FSDP is WEIGHT -> USE and COMPUTED -> GRADIENT of parameters; tensor and sequence parallel are CARRY -> USE at the entry of a block and
USE -> CARRY at its exit; the backward of a crossing is its mirror image.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from pentamesh.layout.mesh import Layout
from pentamesh.layout.split import Split, split
from pentamesh.model.dims import TensorSpec
from pentamesh.model.roles import Role

__all__ = ["Move", "crossing", "mirror", "moves"]

_MIRROR = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "all_reduce": "all_reduce", "all_to_all": "all_to_all", "send": "send"}


class Move(NamedTuple):
    """One collective of one rank.

    `bytes` is the size of the whole buffer it works on, padding included: the gathered output of an all_gather, the input of a
    reduce_scatter, the buffer of an all_reduce, what a rank sends and keeps in an all_to_all, the message of a send.
    """

    kind: str
    axes: tuple[str, ...]
    num_ranks: int
    bytes: int

    @property
    def wire_bytes(self) -> float:
        """Bytes that one rank sends: (n - 1) / n of the buffer, twice that for a ring all-reduce, all of it for a send."""
        share = (self.num_ranks - 1) / self.num_ranks
        return self.bytes * {"all_reduce": 2 * share, "send": 1.0}.get(self.kind, share)

    def __str__(self) -> str:
        return f"{self.kind} over {'*'.join(self.axes)} ({self.num_ranks} ranks), {self.bytes:,} B"


def moves(tensor: TensorSpec, source: Role, target: Role, layout: Layout, itemsize: int, rank: int = 0) -> tuple[Move, ...]:
    """The collectives of one crossing of `tensor` from `source` to `target`; empty where nothing has to move. Units: bytes per rank."""
    return crossing(split(tensor, source, layout), split(tensor, target, layout), itemsize, rank=rank)


def crossing(before: Split, after: Split, itemsize: int, contracted: tuple[str, ...] = (), rank: int = 0) -> tuple[Move, ...]:
    """As `moves`, between two explicit splits. `contracted` names axes over which a matmul has just left a partial sum; `rank` is who moves:
    where an axis that stays cuts unevenly, buffers differ, and rank 0 has the largest."""
    mesh, found = before.layout.mesh, []
    held = before if not contracted else replace(before, partial=(*before.partial, *contracted))
    held_axes, kept_axes = _cut_dims(before), _cut_dims(after)
    reduced = [axis for axis in held.partial if axis not in after.partial]
    scattered = _grouped([axis for axis in reduced if axis in kept_axes], after)
    summed = tuple(axis for axis in reduced if axis not in kept_axes)
    # Every share is padded to the largest of its group, which the first rank of the group has.
    largest = mesh.first(rank, (*reduced, *(axis for axis in held_axes if held_axes[axis] != kept_axes.get(axis))))
    local = math.prod(before.local_shape(largest))
    for axes in scattered:
        found.append(Move("reduce_scatter", axes, mesh.degree(*axes), _scatter_numel(before, after, axes, largest) * itemsize))
        local = math.prod(after.local_shape(largest)) if not summed else -(-local // mesh.degree(*axes))
    if summed:
        numel = math.prod(after.local_shape(largest)) if scattered else local
        found.append(Move("all_reduce", summed, mesh.degree(*summed), numel * itemsize))
    moved = [a for a in held_axes if a in kept_axes and held_axes[a] != kept_axes[a]]
    found.extend(Move("all_to_all", (axis,), mesh.degree(axis), local * itemsize) for axis in moved)
    gathered = [axis for axis in held_axes if axis not in kept_axes and axis not in moved]
    for axes in _grouped(gathered, before):
        local *= mesh.degree(*axes)
        found.append(Move("all_gather", axes, mesh.degree(*axes), local * itemsize))
    return tuple(found)


def mirror(crossed: tuple[Move, ...]) -> tuple[Move, ...]:
    """The backward of a crossing: each collective's transpose, in reverse order, on buffers of the same size."""
    return tuple(move._replace(kind=_MIRROR[move.kind]) for move in reversed(crossed))


def _cut_dims(held: Split) -> dict[str, int]:
    return {axis: position for position, cuts in enumerate(held.cuts) for cut in cuts for axis in cut.axes}


def _grouped(axes: list[str], held: Split) -> list[tuple[str, ...]]:
    """`axes` as the cuts of `held` have them: axes that cut together are one group of one collective."""
    cuts = [cut.axes for per_dim in held.cuts for cut in per_dim]
    return [group for group in cuts if set(group) <= set(axes)]


def _scatter_numel(before: Split, after: Split, axes: tuple[str, ...], rank: int) -> int:
    """Elements that enter a reduce_scatter: the local tensor with each scattered dim padded to a multiple of the group."""
    count, shape = before.layout.mesh.degree(*axes), list(before.local_shape(rank))
    position = _cut_dims(after)[axes[0]]
    shape[position] = -(-shape[position] // count) * count
    return math.prod(shape)
