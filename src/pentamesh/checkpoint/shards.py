"""Shards: how torch.distributed.checkpoint writes and reads our files - safetensors, tensor by tensor, in a folder here or in an object store.

torch plans which rank writes and reads what, and checks that all of a tensor is written. Its own storages for safetensors hold a whole file in
memory while they write, know no object store, and let every rank open every file.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import Metadata, StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pentamesh.checkpoint.headers import DTYPES, grouped, write_tensors
from pentamesh.checkpoint.manifest import File, TensorFacts
from pentamesh.checkpoint.parts import Part, read_box
from pentamesh.errors import PentameshError, RunFailed, reason

__all__ = ["FILE_BYTES", "Reader", "Writer", "without_group"]

# Files of this size: what is lost with one that is damaged, and what is read again when it is verified.
FILE_BYTES = 1_000_000_000


class Writer(StorageWriter):
    """Writes what one rank has to, and keeps size and SHA-256 of each file as it was meant to be, in `files`."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self.files: dict[str, File] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        """The folder is there already."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of this rank's plan in files of at most FILE_BYTES, or of one tensor."""
        with _in_words():
            self._write(plan, planner)
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, _chunk(item).sizes.numel() * _dtype(item).itemsize, None) for item in plan.items])
        return done

    def _write(self, plan: SavePlan, planner: SavePlanner) -> None:
        items = {item.index.fqn: item for item in plan.items}
        assert len(items) == len(plan.items)  # a file holds one part of a tensor
        shapes = {name: (_dtype(item), tuple(_chunk(item).sizes)) for name, item in items.items()}
        files = list(grouped(shapes, FILE_BYTES)) if items else []
        for number, names in enumerate(files, 1):
            file = f"shard-{self._rank + 1:05d}-model-{number:05d}-of-{len(files):05d}.safetensors"
            offsets = {name: tuple(_chunk(items[name]).offsets) for name in names}
            values = (_resolved(planner, items[name]) for name in names)
            self.files[file] = write_tensors(self._folder / file, {name: shapes[name] for name in names}, values, offsets)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The manifest is `save`'s to write."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any folder."""
        return True


def _dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None  # a checkpoint holds tensors only
    return item.tensor_data.properties.dtype


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _resolved(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    found = planner.resolve_data(item)
    assert isinstance(found, torch.Tensor)
    return found.detach()


class Reader(StorageReader):
    """Reads what the ranks ask for from the `pieces` of each tensor; `tensors` are dtype and whole shape, as the manifest says."""

    def __init__(self, tensors: dict[str, TensorFacts], pieces: dict[str, list[Part]]) -> None:
        self._tensors, self._pieces = tensors, pieces

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """What the checkpoint has, of what was read before."""
        return Metadata({name: self._described(name, facts) for name, facts in self._tensors.items()})

    def _described(self, name: str, facts: TensorFacts) -> TensorStorageMetadata:
        entries = [piece.entry for piece in self._pieces.get(name, [])]
        chunks = [ChunkStorageMetadata(torch.Size(entry.offset), torch.Size(entry.shape)) for entry in entries]
        return TensorStorageMetadata(TensorProperties(dtype=DTYPES[facts.dtype]), torch.Size(facts.shape), chunks)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        """The pieces are known already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read each item of this rank's plan into its place."""
        with _in_words():
            self._read(plan, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        found = {(name, piece.entry.offset): piece for name, pieces in self._pieces.items() for piece in pieces}
        for item in plan.items:
            piece = found[_place(item.storage_index)]
            values = read_box(piece.path, piece.entry, tuple(item.storage_offsets), tuple(item.lengths))
            target = planner.resolve_tensor(item).detach()
            target.copy_(values.view(target.shape))
            planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any folder."""
        return True


def _place(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    return index.fqn, tuple(index.offset or ())


@contextmanager
def _in_words() -> Iterator[None]:
    """Raise what fails as one of our errors: torch pickles it for the other ranks, which would wait in vain for a library's that cannot be."""
    try:
        yield
    except PentameshError:
        raise
    except Exception as error:
        raise RunFailed(f"{type(error).__name__}: {reason(error)}") from error


@contextmanager
def without_group() -> Iterator[None]:
    """Let torch save or load in one process without saying so, where that is meant.

    What is caught is caught on all threads: never beside the steps of a run, which has a group.
    """
    if dist.is_initialized():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
