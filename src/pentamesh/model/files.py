"""Files: of which tensors in a model's files a tensor in memory is put together, and which region of it each of them is.

The map is reversible: the pieces of a tensor are all of it, each value once, so reading goes by it and writing too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from pentamesh.model.dims import TensorSpec

__all__ = ["Piece", "Region", "fused", "overlap", "pieces"]

Sizes = tuple[int, ...]


class Region(NamedTuple):
    """A rectangle of a tensor, in elements per dim."""

    offset: Sizes
    size: Sizes


class Piece(NamedTuple):
    """One tensor of a file: its name there, the region of the tensor in memory that it is, and whether it lacks the first dim, along which many such
    are stacked."""

    name: str
    region: Region
    is_stacked: bool = False

    @property
    def shape(self) -> Sizes:
        """Of the tensor in the file."""
        return self.region.size[1:] if self.is_stacked else self.region.size


def pieces(tensor: TensorSpec) -> Iterator[Piece]:
    """The tensors of files that `tensor` is put together of: for a name with `{}` one for each index along the first dim, in place of which it
    stands; for several names, those of what is fused, in order; else one, of its own name where no other is given."""
    names = tensor.file_names or (tensor.name,)
    whole = Region((0,) * len(tensor.shape), tensor.shape)
    for name, (offset, size) in zip(names, fused(tensor) if len(names) > 1 else (whole,), strict=True):
        if "{}" in name:
            stack = (Region((index, *offset[1:]), (1, *size[1:])) for index in range(size[0]))
            yield from (Piece(name.format(region.offset[0]), region, is_stacked=True) for region in stack)
        else:
            yield Piece(name, Region(offset, size))


def fused(tensor: TensorSpec) -> tuple[Region, ...]:
    """The regions of the tensors that are fused in `tensor`, in order; itself where none are."""
    along = next((at for at, dim in enumerate(tensor.dims) if len(dim.parts) > 1), None)
    if along is None:
        return (Region((0,) * len(tensor.shape), tensor.shape),)
    parts = tensor.dims[along].parts
    before, behind = tensor.shape[:along], tensor.shape[along + 1 :]
    starts = itertools.accumulate(parts[:-1], initial=0)
    offsets = ((*(0 for _ in before), start, *(0 for _ in behind)) for start in starts)
    return tuple(Region(offset, (*before, length, *behind)) for offset, length in zip(offsets, parts, strict=True))


def overlap(one: Region, other: Region) -> Region | None:
    """The values that two regions of a tensor have in common, None where there are none."""
    offset = tuple(map(max, one.offset, other.offset))
    ends = (min(a + length, b + extent) for a, length, b, extent in zip(*one, *other, strict=True))
    size = tuple(end - low for low, end in zip(offset, ends, strict=True))
    return Region(offset, size) if all(length > 0 for length in size) else None
