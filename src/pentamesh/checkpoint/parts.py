"""Parts: a stored tensor read piece by piece, and put together from the pieces that ranks wrote.

Files are opened and sought in, never mapped, so that a folder may lie anywhere that a path can: here or on an object store.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import BinaryIO

import torch

from pentamesh.checkpoint.headers import DTYPES, Entry, read_header
from pentamesh.checkpoint.manifest import MANIFEST, TensorFacts
from pentamesh.errors import InputError, Problem
from pentamesh.model.files import Region, overlap

__all__ = ["Part", "fill", "misfit", "parts", "read_box", "unfilled", "whole"]

# Bytes that are read at once beside the tensor that they become.
BLOCK_BYTES = 2**24
# Runs of bytes shorter than this are read together with what lies between them: a seek costs more than the gap.
RUN_BYTES = 2**16


@dataclass(frozen=True)
class Part:
    """A piece of a stored tensor: the file it lies in, and its entry there."""

    path: Path
    entry: Entry


def read_box(path: Path, entry: Entry, offset: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
    """A rectangle of a stored tensor, in its dtype and in host memory; beside it at most BLOCK_BYTES are held.

    `offset` counts from the first value of `entry`, whatever the place of the entry in a whole tensor. Shapes: `size`.
    Raises InputError naming the file where it is shorter than its header says or cannot be read; ValueError for a box that is not in the entry.
    """
    inside = len(offset) == len(size) == len(entry.shape) and all(
        low >= 0 and length >= 0 and low + length <= end for low, length, end in zip(offset, size, entry.shape, strict=True)
    )
    if not inside:
        raise ValueError(f"the box {list(size)} at {list(offset)} is not in a tensor of {list(entry.shape)}")
    found = torch.empty(size, dtype=entry.torch_dtype)
    if found.numel():
        try:
            with path.open("rb") as file:
                _fill(found.reshape(-1).view(torch.uint8), file, entry, offset, size)
        except EOFError:
            what = f"{path.name} is truncated: it ends before byte {entry.end:,}, where its header says that a tensor does"
            raise InputError(what, where=str(path), hint="copy or download the file again") from None
        except OSError as error:
            raise InputError(f"{path.name} cannot be read: {error.strerror or error}", where=str(path)) from error
    return found


def _fill(target: torch.Tensor, file: BinaryIO, entry: Entry, offset: tuple[int, ...], size: tuple[int, ...]) -> None:
    """Read the box into `target`, its bytes in order. Raises EOFError where the file ends early."""
    whole_from = len(size)  # dims from here on are taken whole
    while whole_from and size[whole_from - 1] == entry.shape[whole_from - 1]:
        whole_from -= 1
    at = max(0, whole_from - 1)  # the dim along which values of the box follow each other in the file
    strides = [math.prod(entry.shape[i + 1 :]) * entry.torch_dtype.itemsize for i in range(len(size))]
    run = math.prod(size[at:]) * entry.torch_dtype.itemsize
    begin = entry.begin + sum(low * stride for low, stride in zip(offset, strides, strict=True))
    # Runs a constant stride apart, those of one place in the dims outside of them.
    rows, stride = (size[at - 1], strides[at - 1]) if at else (1, run)
    starts = (
        begin + sum(map(math.prod, zip(place, strides[: max(0, at - 1)], strict=True))) for place in product(*map(range, size[: max(0, at - 1)]))
    )
    for number, start in enumerate(starts):
        _read_rows(target[number * rows * run : (number + 1) * rows * run], file, start, rows, run, stride)


def _read_rows(target: torch.Tensor, file: BinaryIO, start: int, rows: int, run: int, stride: int) -> None:
    """`rows` runs of `run` bytes, the first at byte `start` and each `stride` after the one before: several at once where they are short."""
    together = max(1, BLOCK_BYTES // stride) if run < RUN_BYTES else 1
    for row in range(0, rows, together):
        count = min(together, rows - row)
        file.seek(start + row * stride)
        into = target[row * run : (row + count) * run]
        if count == 1 or run == stride:
            _read_into(into, file)
        else:
            block = torch.empty((count - 1) * stride + run, dtype=torch.uint8)
            _read_into(block, file)
            into.view(count, run).copy_(block.as_strided((count, run), (stride, 1)))


def _read_into(target: torch.Tensor, file: BinaryIO) -> None:
    view = memoryview(target.numpy().data)
    for low in range(0, len(view), BLOCK_BYTES):
        block = view[low : low + BLOCK_BYTES]
        while block:
            if not (count := file.readinto(block)):  # pyright: ignore[reportAttributeAccessIssue]
                raise EOFError
            block = block[count:]


def parts(paths: Iterable[Path]) -> dict[str, list[Part]]:
    """The pieces of every tensor in these safetensors files, by its name; pieces without values are left out. Raises InputError."""
    found: dict[str, list[Part]] = {}
    for path in paths:
        for name, entry in read_header(path).entries.items():
            pieces = found.setdefault(name, [])
            if math.prod(entry.shape):
                pieces.append(Part(path, entry))
    return found


def misfit(name: str, facts: TensorFacts, pieces: list[Part]) -> Iterator[Problem]:
    """Everything in which the pieces of a tensor are not what the manifest says of it: its values, each once, in its dtype."""
    if facts.dtype not in DTYPES:
        yield Problem(f"{name} is {facts}, a dtype that no checkpoint has", hint=f"known are {', '.join(DTYPES)}")
    yield from unfilled(name, facts.shape, pieces)
    if pieces and pieces[0].entry.dtype != facts.dtype:
        yield Problem(f"{name} is {facts.dtype} in {MANIFEST} and {pieces[0].entry.dtype} in {pieces[0].path.name}", str(pieces[0].path))


def unfilled(name: str, shape: tuple[int, ...], pieces: list[Part]) -> Iterator[Problem]:
    """What keeps the pieces from being the whole of a tensor, each value once."""
    outside = [piece for piece in pieces if not _lies_in(piece.entry, shape)]
    for piece in outside:
        where = f"{list(piece.entry.shape)} at {list(piece.entry.offset)}"
        yield Problem(f"a part of {name}, {where}, does not lie in {list(shape)}", str(piece.path))
    wanted, found = math.prod(shape), sum(math.prod(piece.entry.shape) for piece in pieces)
    if found != wanted:
        yield Problem(f"{name} has {wanted:,} values, {found:,} are in the checkpoint", str(pieces[0].path.parent) if pieces else "")
    elif not outside and (twice := _overlapping(pieces)):
        yield Problem(f"two parts of {name} hold the same values, and others are in none", str(twice.path))
    for piece in (p for p in pieces if p.entry.dtype != pieces[0].entry.dtype):
        yield Problem(f"parts of {name} are {pieces[0].entry.dtype} and {piece.entry.dtype}", str(piece.path))


def _lies_in(entry: Entry, shape: tuple[int, ...]) -> bool:
    same = len(entry.offset) == len(entry.shape) == len(shape) and all(type(low) is int for low in entry.offset)
    return same and all(low >= 0 and low + length <= end for low, length, end in zip(entry.offset, entry.shape, shape, strict=True))


def _overlapping(pieces: list[Part]) -> Part | None:
    """A piece that holds a value of another one, or None."""
    active: list[Entry] = []
    for piece in sorted(pieces, key=lambda piece: piece.entry.offset):
        low = piece.entry.offset[:1]
        active = [entry for entry in active if not low or entry.offset[0] + entry.shape[0] > low[0]]
        if any(_share(entry, piece.entry) for entry in active):
            return piece
        active.append(piece.entry)
    return None


def _share(one: Entry, other: Entry) -> bool:
    return all(
        low < start + length and start < low + extent
        for low, extent, start, length in zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    )


def whole(pieces: list[Part], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor put together from its pieces and cast, some rows at a time. Shapes: `shape`. Raises InputError as `read_box` does."""
    if len(pieces) == 1 and pieces[0].entry.torch_dtype == dtype:
        return read_box(pieces[0].path, pieces[0].entry, (0,) * len(shape), shape)
    found = torch.empty(shape, dtype=dtype)
    fill(found, pieces)
    return found


def fill(target: torch.Tensor, pieces: list[Part], origin: tuple[int, ...] | None = None) -> None:
    """Write the pieces of a tensor to their places in `target`, some rows at a time; what of them lies outside is not read.

    `target` is the tensor, or the region of its shape that begins at `origin`. Raises InputError as `read_box` does.
    """
    wanted = Region(origin or (0,) * target.dim(), tuple(target.shape))
    for piece in pieces:
        for slab in _slabs(overlap(wanted, Region(piece.entry.offset, piece.entry.shape)), piece.entry.torch_dtype.itemsize):
            place = tuple(slice(low - first, low - first + length) for low, first, length in zip(slab.offset, wanted.offset, slab.size, strict=True))
            within = tuple(low - first for low, first in zip(slab.offset, piece.entry.offset, strict=True))
            target[place] = read_box(piece.path, piece.entry, within, slab.size).to(target.dtype)


def _slabs(region: Region | None, itemsize: int) -> Iterator[Region]:
    """Whole rows of a region, at most BLOCK_BYTES of them or one at a time, which are the region together."""
    if region is None:
        return
    if not region.size:
        yield region
        return
    (low, *offset), (length, *size) = region
    rows = max(1, BLOCK_BYTES // (math.prod(size) * itemsize))
    for row in range(0, length, rows):
        yield Region((low + row, *offset), (min(rows, length - row), *size))
