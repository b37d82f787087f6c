"""Held: what a rank has of a tensor, as torch's checkpointing sees it - by the boxes of `split`, since not every cut has a DTensor placement.

A tensor that is several fused in one is kept part by part: a rank's boxes then lie each in a tensor of its own, as a file of one name can hold
one of them.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from pentamesh.layout.split import Box, Split, chunk
from pentamesh.model.dims import TensorSpec
from pentamesh.model.files import fused

__all__ = ["Held", "Portion", "held", "portions"]

# Below this, what many ranks hold is saved by one: a file of many small pieces is slow to write and to read.
SHARE_BYTES = 2**20


@dataclass(frozen=True)
class Portion:
    """One of the tensors that are fused in one: what its name ends with, and where in the whole it lies."""

    suffix: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def portions(tensor: TensorSpec) -> tuple[Portion, ...]:
    """The tensors that are fused in `tensor`, in order; itself where none are."""
    regions = fused(tensor)
    return tuple(Portion(f".part{number}" if len(regions) > 1 else "", *region) for number, region in enumerate(regions))


def held(name: str, local: torch.Tensor, split: Split, rank: int, *, shared: bool = False) -> dict[str, torch.Tensor]:
    """What `rank` holds of a tensor, in the storage of `local`, by the names under which a checkpoint keeps it.

    With `shared` it is what `rank` saves: where others hold the same, each saves a part of the rows, so that all have about as much to write.
    """
    found: dict[str, torch.Tensor] = {}
    for portion in portions(split.tensor):
        ends = [low + length for low, length in zip(portion.offset, portion.shape, strict=True)]
        inside = [box for box in split.boxes(rank) if all(map(_lies, box.offset, portion.offset, ends))]
        if shared:
            inside = [part for box in inside if (part := _share(box, f"{name}{portion.suffix}", local.itemsize, *split.copy(rank))) is not None]
        boxes = [Box(tuple(a - b for a, b in zip(box.offset, portion.offset, strict=True)), box.size, box.local_offset) for box in inside]
        found[name + portion.suffix] = Held(local, portion.shape, boxes)
    return found


def _share(box: Box, name: str, itemsize: int, copy: int, num_copies: int) -> Box | None:
    """The rows of a box that its holder number `copy` of `num_copies` saves; small boxes go whole to one, which the name decides."""
    num_parts = min(num_copies, max(1, box.numel * itemsize // SHARE_BYTES))
    number = (copy + zlib.crc32(name.encode())) % num_copies
    low, length = chunk(box.size[0], number, num_parts) if number < num_parts else (0, 0)
    return box.rows(low, length) if length else None


def _lies(at: int, low: int, high: int) -> bool:
    return low <= at < high


class Held(torch.Tensor):
    """A tensor of its whole shape, of which the values in `boxes` are here: those of `local`, which are read and written and never computed with.

    Source: the protocol of torch.distributed._checkpointable.
    """

    local: torch.Tensor
    boxes: list[Box]

    @staticmethod
    def __new__(cls, local: torch.Tensor, shape: tuple[int, ...], boxes: list[Box]) -> Held:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        made.local, made.boxes = local, boxes
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"{func} of a tensor that is partly elsewhere")

    def part(self, box: Box) -> torch.Tensor:
        """The values of one of the boxes, where they are."""
        return self.local[tuple(slice(low, low + length) for low, length in zip(box.local_offset, box.size, strict=True))]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        data = [TensorWriteData(chunk=chunk, properties=properties, size=self.shape) for chunk in self.__create_chunk_list__()]
        return [WriteItem(MetadataIndex(fqn, part.chunk.offsets), WriteItemType.SHARD, tensor_data=part) for part in data]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size)) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.part(next(box for box in self.boxes if box.offset == tuple(index.offset or ())))
