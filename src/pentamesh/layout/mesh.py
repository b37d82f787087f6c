"""The mesh: how many ranks lie along each axis, and which ranks share a group.

    dense    pp x dp_replicate x dp_shard x cp x tp          outermost to innermost
    experts  edp x ep  =  dp_shard x cp x tp                 another view of the same ranks

The innermost axes are neighbours, so tensor parallel stays inside a node whenever its degree allows. `tp/2` is the inner part of an axis: pairs of
its neighbours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal, get_args

from pentamesh.errors import InputError
from pentamesh.job.division import ContextWay, divisors, sequence_pieces

__all__ = ["AXES", "COPY_AXES", "DATA_AXES", "EXPERT_AXES", "SHARDS", "SHARD_AXES", "TOKEN_AXES", "Layout", "Mesh", "Shard"]

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPERT_AXES = ("edp", "ep")
DATA_AXES = ("dp_replicate", "dp_shard")
# Parameters are cut over context ranks too: they hold the same weights and different tokens, as data ranks do.
SHARD_AXES = ("dp_shard", "cp")
# Along these, ranks that cut no state hold the same parameters and see different tokens.
COPY_AXES = ("dp_replicate", "cp")
# Along these, ranks hold different tokens: losses and their counts are summed over them.
TOKEN_AXES = (*DATA_AXES, "cp")

Shard = Literal["none", "optimizer", "gradients", "parameters"]
SHARDS: tuple[Shard, ...] = get_args(Shard)


@dataclass(frozen=True)
class Mesh:
    """The degree of every axis. Ranks count row-major over `AXES`."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if bad := {a: n for a, n in vars(self).items() if n < 1}:
            raise InputError(f"a degree is at least 1: {bad}", where="layout")
        inner = self.dp_shard * self.cp * self.tp
        if inner % self.ep:
            raise InputError(
                f"expert = {self.ep} does not divide data x context x tensor = {inner}",
                where="layout.expert",
                hint=f"use expert = {divisors(inner)}: experts live on another view of the same ranks, edp x ep = dp_shard x cp x tp",
            )

    @classmethod
    def of(cls, degrees: Mapping[str, int]) -> Mesh:
        """The mesh with these degrees, among whatever else is given. Raises InputError, KeyError and TypeError for what is none."""
        return cls(**{field.name: degrees[field.name] for field in fields(cls)})

    @property
    def edp(self) -> int:
        """Degree of the axis that shards one expert's own parameters."""
        return self.dp_shard * self.cp * self.tp // self.ep

    @property
    def num_ranks(self) -> int:
        return math.prod(self.degree(axis) for axis in AXES)

    def degree(self, *axes: str) -> int:
        """Number of ranks along `axes` together."""
        return math.prod(int(axis.partition("/")[2]) if "/" in axis else getattr(self, axis) for axis in axes)

    def inner(self, axis: str, degree: int) -> str:
        """The inner part of `axis`, of `degree` neighbours each; the axis itself where that is all of it."""
        return axis if degree == self.degree(axis) else f"{axis}/{degree}"

    def coords(self, rank: int) -> dict[str, int]:
        """Where `rank` sits on every axis, the expert view included."""
        coords, rest = {}, rank
        for axis in reversed(AXES):
            rest, coords[axis] = divmod(rest, self.degree(axis))
        if rest:
            raise IndexError(f"rank {rank} of a mesh of {self.num_ranks}")
        inner = (coords["dp_shard"] * self.cp + coords["cp"]) * self.tp + coords["tp"]
        coords["edp"], coords["ep"] = divmod(inner, self.ep)
        return coords

    def coord(self, rank: int, axes: tuple[str, ...]) -> int:
        """Position of `rank` along `axes` flattened, outer to inner."""
        coords, position = self.coords(rank), 0
        for axis in axes:
            position = position * self.degree(axis) + coords[axis.partition("/")[0]] % self.degree(axis)
        return position

    def peers(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axes` only: the group of a collective over them, in its order."""
        view = EXPERT_AXES if set(axes) & set(EXPERT_AXES) else ("dp_shard", "cp", "tp")
        fixed = [a for a in ("pp", "dp_replicate", *view) if a not in axes]
        mine, inner = self._all_coords[rank], {a.partition("/")[0]: self.degree(a) for a in axes if "/" in a}

        def at(coords: dict[str, int], axis: str) -> int:
            return coords[axis] // inner.get(axis, 1)

        same = [r for r, c in enumerate(self._all_coords) if all(at(c, a) == at(mine, a) for a in fixed)]
        return tuple(sorted(same, key=lambda r: self.coord(r, axes)))

    def first(self, rank: int, axes: tuple[str, ...]) -> int:
        """The first of the ranks that differ from `rank` along `axes` only."""
        if rank == 0:
            return 0
        coords = self.coords(rank) | dict.fromkeys(axes, 0)
        if set(axes) & set(EXPERT_AXES):
            return (coords["pp"] * self.dp_replicate + coords["dp_replicate"]) * self.edp * self.ep + coords["edp"] * self.ep + coords["ep"]
        position = 0
        for axis in AXES:
            position = position * self.degree(axis) + coords[axis]
        return position

    def groups(self, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
        """Every group of a collective over `axes`, each once."""
        return sorted({self.peers(rank, axes) for rank in range(self.num_ranks)})

    @cached_property
    def _all_coords(self) -> tuple[dict[str, int], ...]:
        return tuple(self.coords(rank) for rank in range(self.num_ranks))

    def __str__(self) -> str:
        named = [f"{axis} {self.degree(axis)}" for axis in (*AXES, "ep") if self.degree(axis) > 1]
        return " x ".join(named) or "one rank"


@dataclass(frozen=True)
class Layout:
    """A mesh and what the strategy does on it: everything that `rules` needs to place a tensor."""

    mesh: Mesh = Mesh()
    shard: Shard = "none"
    sequence_parallel: bool = False
    context: ContextWay = "ring"

    @cached_property
    def _hash(self) -> int:
        return hash((self.mesh, self.shard, self.sequence_parallel, self.context))

    def __hash__(self) -> int:
        """Computed once: what follows from a layout is remembered under it, thousands of times in a plan."""
        return self._hash

    @property
    def strategy(self) -> str:
        """Name of the strategy: `ddp`, `zero1`, `zero2`, `full_shard`, `hybrid_shard`, or `multi_axis` beyond the data axes."""
        if self.mesh.degree("pp", "cp", "tp", "ep") > 1:
            return "multi_axis"
        if self.cuts_weights:
            return "hybrid_shard" if self.mesh.dp_replicate > 1 else "full_shard"
        return {"none": "ddp", "optimizer": "zero1", "gradients": "zero2"}[self.shard]

    @property
    def cuts_state(self) -> bool:
        """Whether each rank updates its share only, to which gradients are reduced block by block: all strategies but DDP."""
        return self.shard != "none"

    @property
    def cuts_weights(self) -> bool:
        """Whether weights rest in shares too: full and hybrid shard."""
        return self.shard == "parameters"

    @property
    def seq_multiple(self) -> int:
        """What the length of a sequence has to be a multiple of (`job.division`)."""
        return sequence_pieces(self.mesh.cp, self.mesh.tp if self.sequence_parallel else 1, self.context)

    def ranks(self) -> range:
        return range(self.mesh.num_ranks)


def all_meshes(num_ranks: int) -> list[Mesh]:
    """Every dense mesh of `num_ranks` ranks, without experts; for tests and search."""
    divisors = [d for d in range(1, num_ranks + 1) if num_ranks % d == 0]
    return [Mesh(*degrees) for degrees in itertools.product(divisors, repeat=len(AXES)) if math.prod(degrees) == num_ranks]
