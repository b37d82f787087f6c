"""Initial: random weights for pre-training, the same whatever the mesh, of which each rank draws only the tiles it holds a part of."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator

import numpy
import torch

from pentamesh.layout.split import Box, Split
from pentamesh.model.dims import TensorSpec

__all__ = ["drawing", "initial"]

# Rows and columns of a tile: a multiple of every head size, and 512 KiB of float32, so that drawing one costs a hundred times its seeding.
TILE = (128, 1024)


def initial(
    tensor: TensorSpec,
    split: Split,
    rank: int,
    *,
    seed: int,
    std: float = 0.02,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """The random initial values of what `rank` holds of `tensor`: normal(0, std) for matrices (narrower by
    a tensor's `spread`), ones for scales, zeros for biases and for what a scale has over one.

    Drawn in float32 (float64 when `dtype` is that), then cast. The embedding of a padding token is drawn like any other.

    Shapes: `split.local_shape(rank)`. Source: transformers, PreTrainedModel._init_weights; std is the config's `initializer_range`.
    """
    local = torch.zeros(split.local_shape(rank), dtype=dtype)
    if tensor.kind == "scale":
        local.fill_(1)
    elif tensor.kind in ("matmul", "lookup", "sink"):
        for box in split.boxes(rank):
            _draw(local, tensor, box, seed, std)
    elif tensor.kind not in ("bias", "excess", "buffer"):
        raise ValueError(f"{tensor} is a {tensor.kind}, which has no initial value")
    return local.to(device)


def drawing(seed: int, std: float = 0.02) -> Callable[[TensorSpec, Split, int, torch.Tensor], None]:
    """What fills a rank's local part of any tensor with its initial values, in the dtype and on the device of that part."""

    def fill(tensor: TensorSpec, split: Split, rank: int, local: torch.Tensor) -> None:
        local.copy_(initial(tensor, split, rank, seed=seed, std=std, dtype=local.dtype))

    return fill


def _draw(local: torch.Tensor, tensor: TensorSpec, box: Box, seed: int, std: float) -> None:
    """Fill the place of `box` in `local` from the tiles that it meets."""
    for tile in _tiles(tensor.shape, box):
        values = _tile(tensor, tile, seed, std * tensor.spread, local.dtype)
        inner = [_common(low, length, at, size) for low, length, at, size in zip(*tile, box.offset, box.size, strict=True)]
        source = tuple(slice(low - start, high - start) for (low, high), start in zip(inner, tile[0], strict=True))
        shift = [to - at for to, at in zip(box.local_offset, box.offset, strict=True)]
        target = tuple(slice(low + by, high + by) for (low, high), by in zip(inner, shift, strict=True))
        local[target] = values[source].to(local.dtype)


Tile = tuple[tuple[int, ...], tuple[int, ...]]  # offset and size per dim


def _tiles(shape: tuple[int, ...], box: Box) -> Iterator[Tile]:
    """The tiles of a tensor that a box meets; the last two dims are tiled, the ones before them taken one by one."""
    steps = (1,) * (len(shape) - 2) + (TILE if len(shape) > 1 else TILE[1:])
    starts = [range(low // step * step, low + length, step) for low, length, step in zip(box.offset, box.size, steps, strict=True)]
    for offset in itertools.product(*starts):
        yield offset, tuple(min(step, n - low) for step, n, low in zip(steps, shape, offset, strict=True))


def _tile(tensor: TensorSpec, tile: Tile, seed: int, std: float, dtype: torch.dtype) -> torch.Tensor:
    """Normal values of one tile: a function of the seed, the tensor's name and the tile's place.

    torch's CPU generator keeps 32 bits of a seed, in which the tiles of a large model would collide; Philox takes a key of 128.
    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
    """
    offset, size = tile
    key = hashlib.sha256(f"{seed}/{tensor.name}/{','.join(map(str, offset))}".encode()).digest()[:16]
    generator = numpy.random.Generator(numpy.random.Philox(key=int.from_bytes(key, "little")))
    values = generator.standard_normal(size, dtype=numpy.float64 if dtype == torch.float64 else numpy.float32)
    values *= std  # by numpy, on this thread: torch would wake others for each small tile
    return torch.from_numpy(values)


def _common(low: int, length: int, start: int, size: int) -> tuple[int, int]:
    """Where two intervals overlap."""
    return max(low, start), min(low + length, start + size)
