"""Weights: a Hugging Face folder as names, shapes and files, of which each rank reads only its boxes."""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from pentamesh.checkpoint.finite import num_not_finite
from pentamesh.checkpoint.headers import Entry, holds_weights, read_header
from pentamesh.errors import InputError, Problem
from pentamesh.layout.split import Box, Split
from pentamesh.model.dims import TensorSpec
from pentamesh.model.files import Piece, Region, overlap, pieces
from pentamesh.model.spec import ModelSpec

__all__ = ["INDEX", "SINGLE", "Stored", "Weights", "inside"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# A buffer that files of old kept for each layer; it is computed from the config (transformers drops it too: modeling_utils, inv_freq).
_COMPUTED = re.compile(r"\.rotary_emb\.inv_freq$")
_COMPARE_BYTES = 2**20
# Elements that are read and cast together: beside the tensor that they go to, no more than these are in memory.
_READ_NUMEL = 2**22
_MAX_NAME_BYTES = 255  # of Linux and macOS (NAME_MAX)
# A config of another model differs in every layer: these say enough.
_MAX_PROBLEMS = 20
# Names among which one like a missing one is looked for: comparing texts is slow, and so many mean another model.
_MAX_COMPARED = 1000


@dataclass(frozen=True)
class Stored:
    """Where one tensor lies: its file and its entry there."""

    path: Path
    entry: Entry


class Wanted(NamedTuple):
    """A tensor of the model, and one that files have of it."""

    tensor: TensorSpec
    piece: Piece

    def __str__(self) -> str:
        """By the name in files, and by that in memory where it is another."""
        name, is_whole = self.piece.name, self.piece.shape == self.tensor.shape
        return str(self.tensor) if name == self.tensor.name else f"{name} ({'' if is_whole else 'a part of '}{self.tensor})"


@dataclass(frozen=True)
class Weights:
    """The tensors of a model folder by the names of its files; nothing but headers has been read."""

    folder: Path
    tensors: dict[str, Stored]

    @classmethod
    def open(cls, folder: Path) -> Weights:
        """The weights of a folder with `model.safetensors` or an index of shards.

        Raises InputError with every problem at once: no safetensors, files missing, truncated or outside the folder, an index that disagrees.
        """
        problems: list[Problem] = []
        tensors: dict[str, Stored] = {}
        index = folder / INDEX
        if not index.exists() and not (folder / SINGLE).exists():
            raise InputError(_no_weights(folder))
        for file, expected in (_indexed(index, problems) if index.exists() else {SINGLE: set[str]()}).items():
            path = folder / file
            try:
                entries = read_header(_checked(folder, file)).entries
            except InputError as error:
                problems += error.problems
                continue
            tensors |= {name: Stored(path, entry) for name, entry in entries.items()}
            lost = sorted(expected - entries.keys())
            problems += [Problem(f"{name} is not in {file}, where {INDEX} says it is", str(path)) for name in lost]
        if problems:
            raise InputError(*problems)
        return cls(folder, tensors)

    @property
    def dtype(self) -> str:
        """The dtype that most values have, in the format's words (`BF16`)."""
        counts: Counter[str] = Counter()
        for stored in self.tensors.values():
            counts[stored.entry.dtype] += stored.entry.end - stored.entry.begin
        return counts.most_common(1)[0][0] if counts else "F32"

    def check(self, model: ModelSpec) -> None:
        """Raise InputError with everything in which the folder is not `model`: tensors missing, unexpected, of another shape or wrongly tied."""
        wanted = {piece.name: Wanted(tensor, piece) for tensor in (*model.tensors, *model.buffers) for piece in pieces(tensor)}
        problems = [*self._missing(wanted), *self._unexpected(wanted, model), *self._misshapen(wanted), *self._not_weights(wanted)]
        if not problems:
            problems = [problem for found in wanted.values() if found.tensor.tied_to for problem in self._untied(*found)]
        if len(problems) > _MAX_PROBLEMS:
            problems[_MAX_PROBLEMS:] = [Problem(f"{len(problems) - _MAX_PROBLEMS} more tensors do not fit the config", str(self.folder))]
        if problems:
            raise InputError(*problems)

    def _missing(self, wanted: dict[str, Wanted]) -> Iterator[Problem]:
        others = self.tensors.keys() - wanted.keys()
        for name in sorted(wanted.keys() - self.tensors.keys()):
            if wanted[name].tensor.tied_to is None:
                near = difflib.get_close_matches(name, others, 1) if len(others) <= _MAX_COMPARED else []
                yield Problem(f"{wanted[name]} is missing", str(self.folder), f"the folder has {near[0]}" if near else "")

    def _unexpected(self, wanted: dict[str, Wanted], model: ModelSpec) -> Iterator[Problem]:
        for name in sorted(self.tensors.keys() - wanted.keys()):
            if not _COMPUTED.search(name) and not name.startswith(model.unbuilt):
                yield Problem(f"{name} is not part of {model.name} ({model.family})", str(self.tensors[name].path))

    def _misshapen(self, wanted: dict[str, Wanted]) -> Iterator[Problem]:
        for name in sorted(self.tensors.keys() & wanted.keys()):
            found, shape = self.tensors[name].entry.shape, wanted[name].piece.shape
            if found != shape:
                yield Problem(f"{wanted[name]} should be {list(shape)} and is {list(found)}", str(self.tensors[name].path))

    def _not_weights(self, wanted: dict[str, Wanted]) -> Iterator[Problem]:
        for name in sorted(self.tensors.keys() & wanted.keys()):
            if not holds_weights(self.tensors[name].entry.torch_dtype):
                what = f"{wanted[name]} is stored as {self.tensors[name].entry.dtype}, which is no dtype of weights"
                yield Problem(what, str(self.tensors[name].path), "quantised weights are not trained: give the model that they were made from")

    def _untied(self, tensor: TensorSpec, piece: Piece) -> Iterator[Problem]:
        """A problem when the file has both names of a tied tensor with different values: one of them would be lost in silence."""
        name = piece.name
        if name in self.tensors and not _same_bytes(self.tensors[name], self.tensors[str(tensor.tied_to)]):
            hint = "set tie_word_embeddings to false in config.json, or remove one of the two from the file"
            yield Problem(f"config.json ties {name} to {tensor.tied_to}, and their values differ", str(self.tensors[name].path), hint)

    def read(self, tensor: TensorSpec, split: Split, rank: int, dtype: torch.dtype) -> torch.Tensor:
        """What `rank` holds of `tensor`, as `read_into` reads it. Shapes: `split.local_shape(rank)`."""
        local = torch.empty(split.local_shape(rank), dtype=dtype)
        self.read_into(tensor, split, rank, local)
        return local

    def read_into(self, tensor: TensorSpec, split: Split, rank: int, local: torch.Tensor) -> None:
        """Fill `local` with what `rank` holds of `tensor`: box by box, of every tensor in the files that a box meets some rows at a time, cast to its
        dtype and moved to its device.

        Shapes: `split.local_shape(rank)`. Raises InputError where the values are not all finite.
        """
        boxes = split.boxes(rank) if local.numel() else ()
        met = [(piece, box, common) for piece in pieces(tensor) for box in boxes if (common := overlap(piece.region, Region(box.offset, box.size)))]
        paths = []
        for path, some in itertools.groupby(met, key=lambda found: self.tensors[found[0].name].path):
            paths.append(str(path))
            with safe_open(path, framework="pt") as file:
                for piece, box, common in some:
                    _read(file.get_slice(piece.name), piece, box, common, local)
        if bad := num_not_finite(local):
            where = f"{', '.join(dict.fromkeys(paths))} (rank {rank})"
            raise InputError(f"{tensor.name} holds {bad} of {local.numel()} values that are NaN or infinite as {local.dtype}", where=where)


def _read(stored: Any, piece: Piece, box: Box, common: Region, local: torch.Tensor) -> None:
    """Read what a tensor of a file and a box have in common to its place in `local`."""
    within = tuple(low - first for low, first in zip(common.offset, piece.region.offset, strict=True))
    place = tuple(here + low - first for here, low, first in zip(box.local_offset, common.offset, box.offset, strict=True))
    size = common.size
    if piece.is_stacked:
        local, within, place, size = local[place[0]], within[1:], place[1:], size[1:]
    for slab in Box(within, size, place).slabs(_READ_NUMEL):
        local[_slices(slab.local_offset, slab)] = stored[_slices(slab.offset, slab)].to(local.dtype)


def inside(path: Path, folder: Path) -> bool:
    """Whether `path`, links followed, stays in `folder`, or in the store that a folder of the hub's cache links to.

    Source: huggingface_hub, cache layout: `models--x--y/snapshots/REVISION/file` is a link to `models--x--y/blobs/HASH`.
    """
    home, target = folder.resolve(), path.resolve()
    blobs = home.parent.parent / "blobs"
    return target.is_relative_to(home) or (home.parent.name == "snapshots" and target.is_relative_to(blobs))


def _slices(offset: tuple[int, ...], box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, low + length) for low, length in zip(offset, box.size, strict=True))


def _indexed(index: Path, problems: list[Problem]) -> dict[str, set[str]]:
    """The names that an index expects in each file."""
    try:
        places = json.loads(_checked(index.parent, index.name).read_text())["weight_map"]
        files: dict[str, set[str]] = {}
        for name, file in places.items():
            files.setdefault(PurePosixPath(file).as_posix(), set()).add(name)
        return files
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problems.append(Problem(f"{INDEX} is not an index of safetensors files: {error}", str(index)))
        return {}


def _checked(folder: Path, name: str) -> Path:
    """The file of that name, which stays in the folder. Raises InputError otherwise."""
    path = folder / name
    if "\0" in name or any(len(part.encode()) > _MAX_NAME_BYTES for part in PurePosixPath(name).parts):
        raise InputError(f"{name[:40]!r} is no name of a file", where=str(folder), hint="copy or download the folder again")
    if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute() or not inside(path, folder):
        raise InputError(f"{name} leads out of the folder", where=str(folder), hint="put the file itself into the folder")
    if not path.is_file():
        raise InputError(f"{name} is missing", where=str(folder), hint="copy or download the folder again")
    return path


def _no_weights(folder: Path) -> Problem:
    if not folder.is_dir():
        return Problem(f"{folder} is not a folder")
    pickles = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt*"))
    if pickles:
        hint = "convert it to safetensors: a pickle can run code while it is read, and is never opened"
        return Problem(f"the weights are pickles ({', '.join(pickles[:3])}) and not safetensors", str(folder), hint)
    return Problem(f"there is neither {SINGLE} nor {INDEX}", str(folder))


def _same_bytes(first: Stored, second: Stored) -> bool:
    if first.entry.dtype != second.entry.dtype:
        return False
    with first.path.open("rb") as one, second.path.open("rb") as other:
        one.seek(first.entry.begin)
        other.seek(second.entry.begin)
        left = first.entry.end - first.entry.begin
        while left > 0:
            chunk = min(left, _COMPARE_BYTES)
            if one.read(chunk) != other.read(chunk):
                return False
            left -= chunk
    return True
