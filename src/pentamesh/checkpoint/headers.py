"""Headers: what a safetensors file says of itself, read and written without its tensors.

    8 bytes             length n of the header, little-endian
    n bytes             JSON: {name: {dtype, shape, data_offsets}, "__metadata__": {text: text}}
    the rest            the tensors, one after the other, without gaps

Source: the format's own description (safetensors, README, "Format"). A shard of a checkpoint also says where in the whole tensor it lies: torch's
writer keeps the offsets under DCP_SHARDING_INFO (torch.distributed.checkpoint._hf_utils).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from pentamesh.checkpoint.disk import settle
from pentamesh.checkpoint.manifest import File
from pentamesh.errors import InputError, Problem

__all__ = ["DTYPES", "Entry", "Header", "dtype_name", "grouped", "holds_weights", "read_header", "weight_dtype", "write_tensors"]

# Names of the format for the dtypes of weights and states that we keep.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# Of weights that are stored quantised, so that they are told what they are; no checkpoint has them.
_READ = DTYPES | {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
_BLOCK_BYTES = 2**24  # hashed and written at a time
# A longer header is refused by the format's own reader too (safetensors, MAX_HEADER_SIZE).
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class Entry:
    """One stored tensor: its dtype in the format's words, its shape, where its bytes lie, and its `offset` in the whole tensor."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    offset: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return _READ[self.dtype]


@dataclass(frozen=True)
class Header:
    """The tensors of one safetensors file by name; `begin` and `end` of an entry count from the start of the file."""

    path: Path
    entries: dict[str, Entry]


def dtype_name(dtype: torch.dtype) -> str:
    """The format's name of a dtype (`BF16`). Raises ValueError for one that is not kept."""
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise ValueError(f"tensors of {dtype} are not kept in files")


def holds_weights(dtype: torch.dtype) -> bool:
    """Whether weights are kept in it: floats, of which those of 8 bits need scales beside them."""
    return dtype.is_floating_point and dtype.itemsize > 1


def weight_dtype(name: str) -> torch.dtype:
    """The dtype of weights that torch calls so (`bfloat16`). Raises InputError."""
    known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values() if holds_weights(dtype)}
    if name not in known:
        raise InputError(f"{name} is not a dtype of weights", hint=f"use one of {', '.join(known)}")
    return known[name]


def read_header(path: Path) -> Header:
    """The header of a safetensors file, every byte accounted for.

    Raises InputError naming the file, with bytes expected and found where it is truncated.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > _MAX_HEADER_BYTES or 8 + length > size:
                raise InputError(_broken(path, f"its header says {length:,} bytes and the file has {size:,}"))
            found = json.loads(file.read(length))
        entries = _entries(found, 8 + length)
    except OSError as error:
        raise InputError(f"{path.name} cannot be read: {error.strerror}", where=str(path)) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(_broken(path, f"its header cannot be understood ({error})")) from error
    expected = max((entry.end for entry in entries.values()), default=8 + length)
    if expected != size:
        kind = "is truncated" if size < expected else "is too long"
        raise InputError(_broken(path, f"it {kind}: {expected:,} bytes expected, {size:,} found"))
    return Header(path, entries)


def _broken(path: Path, why: str) -> Problem:
    return Problem(f"{path.name} is not a whole safetensors file: {why}", str(path), "copy or download the file again")


def _entries(found: dict, start: int) -> dict[str, Entry]:
    """Entries of a parsed header whose data begins at byte `start`. Raises ValueError where shape and bytes disagree."""
    sharding = json.loads(found.pop("__metadata__", {}).get("DCP_SHARDING_INFO", "{}"))
    entries = {}
    for name, entry in found.items():
        if entry["dtype"] not in _READ:
            raise ValueError(f"{name} has dtype {entry['dtype']}, known are {', '.join(DTYPES)}")
        shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
            raise ValueError(f"{name} has a shape or offsets that are not whole numbers")
        if math.prod(shape) * _READ[entry["dtype"]].itemsize != end - begin:
            raise ValueError(f"{name} {list(shape)} {entry['dtype']} does not take {end - begin} bytes")
        offset = tuple(sharding[name]["saved_offsets"]) if name in sharding else (0,) * len(shape)
        entries[name] = Entry(entry["dtype"], shape, start + begin, start + end, offset)
    ends = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != ends:
            raise ValueError(f"{name} begins at byte {entry.begin:,}, and what is before it ends at {ends:,}")
        ends = entry.end
    return entries


Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def grouped(shapes: Shapes, max_bytes: float) -> Iterator[list[str]]:
    """The names of the tensors of each file, in order, the widest dtype first within a file; a file holds at least one, else at most `max_bytes`."""
    group: list[str] = []
    filled = 0
    for name, (dtype, shape) in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        if group and filled + size > max_bytes:
            yield sorted(group, key=lambda name: -shapes[name][0].itemsize)
            group, filled = [], 0
        group.append(name)
        filled += size
    yield sorted(group, key=lambda name: -shapes[name][0].itemsize)


def write_tensors(path: Path, shapes: Shapes, tensors: Iterable[torch.Tensor], offsets: Mapping[str, tuple[int, ...]] | None = None) -> File:
    """Write a safetensors file tensor by tensor, in the order of `shapes`, and return its size and SHA-256; only one tensor is in memory at a time.

    The widest dtypes should come first, so that every tensor starts on a multiple of its element. `offsets` say where in the whole each part
    lies. The file is on disk when this returns.
    """
    with path.open("wb") as opened:
        file = _Hashed(opened)
        file.write(_header(shapes, offsets))
        coming = iter(tensors)
        for dtype, shape in shapes.values():
            tensor = next(coming)
            assert tensor.dtype == dtype
            assert tuple(tensor.shape) == shape
            if tensor.numel():
                file.write(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            del tensor  # before the next one is made
        assert next(coming, None) is None
        settle(opened)
    return file.facts()


class _Hashed:
    """A file that is written, its size and SHA-256 so far."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest, self._size = file, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> None:
        for low in range(0, len(data), _BLOCK_BYTES):
            block = data[low : low + _BLOCK_BYTES]
            self._digest.update(block)
            self._file.write(block)
        self._size += len(data)

    def facts(self) -> File:
        return File(self._size, self._digest.hexdigest())


def _header(shapes: Shapes, offsets: Mapping[str, tuple[int, ...]] | None) -> bytes:
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    if offsets is not None:
        places = {name: {"saved_offsets": list(offset)} for name, offset in offsets.items()}
        described["__metadata__"] |= {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
    end = 0
    for name, (dtype, shape) in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        described[name] = {"dtype": dtype_name(dtype), "shape": list(shape), "data_offsets": [begin, end]}
    header = json.dumps(described, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header
