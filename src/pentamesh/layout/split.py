"""`split`: what one rank holds of one tensor in one role, as boxes.

A *box* is a rectangle of the global tensor and where it lies in the local one. A plain tensor has one box a rank; a fused one, cut by parts,
has several, and no DTensor placement that a checkpoint would accept. Loading, checkpoints and export therefore go by boxes.

The cut of a rank follows torch's chunk rule: chunks of ceil(n / k), the last ones shorter or empty. Tensor-parallel axes cut units of the
grain, part by part; the data axes cut elements of what is then local, and so does every axis that cuts a sequence. Context ranks *fold* a sequence
in the middle: each holds an early run of it and the late one that mirrors it, so that under causal attention all have as much to do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from pentamesh.layout.mesh import AXES, EXPERT_AXES, Layout
from pentamesh.layout.rules import copies, cutting_axes, on_expert_view, partial_axes, sharding_of
from pentamesh.model.dims import Dim, TensorSpec
from pentamesh.model.roles import Role

__all__ = ["Box", "Cut", "Split", "chunk", "folded_chunk", "split"]

SEQUENCES = ("seq", "kv_seq")


@dataclass(frozen=True)
class Box:
    """A rectangle of the global tensor (`offset`, `size`) and its place in the local one (`local_offset`), in elements per dim."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    local_offset: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def rows(self, low: int, length: int) -> Box:
        """Some of its rows, the first of them number `low` of the box."""
        offset, local_offset = ((at[0] + low, *at[1:]) for at in (self.offset, self.local_offset))
        return Box(offset, (length, *self.size[1:]), local_offset)

    def slabs(self, numel: int) -> Iterator[Box]:
        """The box, cut into runs of whole rows of about `numel` elements; itself where it has no dim or no element."""
        rows = max(1, numel * self.size[0] // self.numel) if self.numel and self.size else 0
        if not rows:
            yield self
            return
        for low in range(0, self.size[0], rows):
            yield self.rows(low, min(rows, self.size[0] - low))


@dataclass(frozen=True)
class Cut:
    """One division of a dim over `axes` taken together: by units of the grain and part by part, or by elements, which may lie `folded`."""

    axes: tuple[str, ...]
    by_element: bool = False
    folded: bool = False


Interval = tuple[int, int]  # global offset and length, in elements


def chunk(length: int, index: int, count: int) -> Interval:
    """Offset and length of chunk `index` of `count`, as torch.chunk cuts: ceil(length / count) each, the last ones shorter or empty."""
    step = -(-length // count)
    low = min(index * step, length)
    return low, min(low + step, length) - low


def folded_chunk(length: int, index: int, count: int) -> tuple[Interval, Interval]:
    """The two runs of chunk `index` of `count` where the length is folded in the middle: as many elements as `chunk` gives it, the odd one early."""
    step, (_, size) = -(-length // count), chunk(length, index, count)
    return (index * -(-step // 2), -(-size // 2)), (length - index * (step // 2) - size // 2, size // 2)


@dataclass(frozen=True)
class Split:
    """How one tensor is held in one role: per dim the cuts, outer to inner, and the axes over which it is a partial sum."""

    tensor: TensorSpec
    role: Role
    layout: Layout
    cuts: tuple[tuple[Cut, ...], ...]
    partial: tuple[str, ...] = ()

    def intervals(self, rank: int, dim: int) -> tuple[Interval, ...]:
        """The pieces of global dim `dim` that `rank` holds, in local order."""
        spec = self.tensor.dims[dim]
        pieces = _parts(spec)
        for cut in self.cuts[dim]:
            index, count = self.layout.mesh.coord(rank, cut.axes), self.layout.mesh.degree(*cut.axes)
            if cut.by_element:
                length = sum(n for _, n in pieces)
                runs = folded_chunk(length, index, count) if cut.folded else (chunk(length, index, count),)
                pieces = [piece for run in runs for piece in _elements(pieces, *run)]
            else:
                shared = copies(spec, count)
                pieces = _units(pieces, spec.grain, index // shared, count // shared)
        return tuple(p for p in pieces if p[1]) or ((0, 0),)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        return tuple(sum(length for _, length in self.intervals(rank, dim)) for dim in range(len(self.tensor.dims)))

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """The rectangles that `rank` holds; none when its share is empty."""
        per_dim = [_with_local_offsets(self.intervals(rank, dim)) for dim in range(len(self.tensor.dims))]
        boxes = (Box(*map(tuple, zip(*combo, strict=True))) for combo in itertools.product(*per_dim))
        return tuple(box for box in boxes if box.numel)

    def copy(self, rank: int) -> tuple[int, int]:
        """Which of the ranks that hold the same boxes `rank` is, and how many they are."""
        view = ("dp_replicate", *EXPERT_AXES) if on_expert_view(self.tensor, self.layout) else AXES[1:]
        free = tuple(axis for axis in view if axis not in self.axes)
        index, count = self.layout.mesh.coord(rank, free), self.layout.mesh.degree(*free)
        for dim, cuts in zip(self.tensor.dims, self.cuts, strict=True):
            for cut in (cut for cut in cuts if not cut.by_element):
                shared = copies(dim, self.layout.mesh.degree(*cut.axes))
                index, count = index * shared + self.layout.mesh.coord(rank, cut.axes) % shared, count * shared
        return index, count

    @cached_property
    def max_local_numel(self) -> int:
        """Elements of the largest share: what padding rounds every share up to. Rank 0 has the first, hence the largest chunk."""
        return math.prod(self.local_shape(0))

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis that cuts this tensor."""
        return tuple(axis for cuts in self.cuts for cut in cuts for axis in cut.axes)

    def placements(self) -> dict[tuple[str, ...], str] | None:
        """Names of DTensor placements by mesh axes (`Shard(0)`, `_StridedShard(0, split_factor=2)`), or None where boxes are the only way.

        A dim that tensor axes and data axes both cut is strided seen from the outer mesh axis, since the inner one cuts first. DTensor knows
        neither parts nor a grain: it would cut through a head that the degree leaves whole.
        """
        names: dict[tuple[str, ...], str] = {}
        for position, cuts in enumerate(self.cuts):
            dim, degree = self.tensor.dims[position], self.layout.mesh.degree(*(axis for cut in cuts if not cut.by_element for axis in cut.axes))
            if degree > 1 and (len(dim.parts) > 1 or (dim.grain > 1 and dim.num_units % degree)):
                return None
            for i, cut in enumerate(cuts):
                factor = math.prod(self.layout.mesh.degree(*inner.axes) for inner in cuts[:i])
                names[cut.axes] = f"_StridedShard({position}, split_factor={factor})" if factor > 1 else f"Shard({position})"
        return names

    def __str__(self) -> str:
        def one(dim: Dim, cuts: tuple[Cut, ...]) -> str:
            return "/".join([str(dim), *("*".join(cut.axes) for cut in cuts)])

        dims = ", ".join(one(d, c) for d, c in zip(self.tensor.dims, self.cuts, strict=True))
        partial = f" {{{', '.join(self.partial)}: partial}}" if self.partial else ""
        return f"{self.tensor.name} [{dims}]{partial}"


@lru_cache(maxsize=2**14)
def split(tensor: TensorSpec, role: Role, layout: Layout) -> Split:
    """How `tensor` is held in `role` under `layout`: per dim the axes that cut it, and where it is a partial sum.

    Source: the table in `pentamesh.layout.rules`.
    """
    cuts = [tuple(_cut(dim, axis, layout) for axis in cutting_axes(tensor, position, role, layout)) for position, dim in enumerate(tensor.dims)]
    position, axes = sharding_of(tensor, role, layout)
    if axes:
        cuts[position] = (*cuts[position], Cut(axes, by_element=True))
    return Split(tensor, role, layout, tuple(cuts), partial_axes(tensor, layout) if role is Role.COMPUTED else ())


def _cut(dim: Dim, axis: str, layout: Layout) -> Cut:
    """Tokens have no grain. Ulysses gives attention whole sequences, of which no part has more to do than another."""
    tokens = dim.name in SEQUENCES
    return Cut((axis,), by_element=tokens, folded=tokens and axis == "cp" and layout.context != "ulysses")


def _parts(dim: Dim) -> list[Interval]:
    offsets = itertools.accumulate(dim.parts, initial=0)
    return list(zip(offsets, dim.parts)) if dim.parts else [(0, dim.size)]  # noqa: B905 - one offset too many


def _units(pieces: list[Interval], grain: int, index: int, count: int) -> list[Interval]:
    shares = [(offset, chunk(length // grain, index, count)) for offset, length in pieces]
    return [(offset + low * grain, length * grain) for offset, (low, length) in shares]


def _elements(pieces: list[Interval], low: int, length: int) -> list[Interval]:
    kept, start = [], 0
    for offset, size in pieces:
        first, last = max(low, start), min(low + length, start + size)
        if first < last:
            kept.append((offset + first - start, last - first))
        start += size
    return kept


def _with_local_offsets(intervals: tuple[Interval, ...]) -> list[tuple[int, int, int]]:
    local = itertools.accumulate((length for _, length in intervals), initial=0)
    return [(offset, length, start) for (offset, length), start in zip(intervals, local)]  # noqa: B905 - one offset too many
