"""Save: the state of a run, by all its ranks, as a checkpoint that exists or does not.

Shards go into `step-XXXXXXXX.partial`, are brought to disk, read back and checksummed by whoever wrote them; the manifest is written last, and
the folder gets its name at once. A failure anywhere is a failure everywhere, and leaves earlier checkpoints as they were.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, HuggingFaceStorageWriter

from pentamesh.checkpoint.disk import discard, publish, sync_file, write_text
from pentamesh.checkpoint.headers import dtype_name
from pentamesh.checkpoint.held import Held
from pentamesh.checkpoint.keep import name_of, point
from pentamesh.checkpoint.manifest import MANIFEST, File, Manifest, TensorFacts, file_facts
from pentamesh.checkpoint.phases import announce
from pentamesh.checkpoint.together import Group, first, place_in, together
from pentamesh.errors import Problem, RunFailed

__all__ = ["FILE_BYTES", "said", "save"]

# torch's writer holds one file's tensors and their serialised bytes at a time, so this bounds the extra host memory of a save.
FILE_BYTES = 1_000_000_000


def save(folder: Path, step: int, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any], *, group: Group = None) -> Path:
    """Save `tensors` and `facts` as the checkpoint of `step` in `folder`, and return its path. Collective: every rank calls it.

    A tensor that is cut is `Held`; a plain one of the same name on several ranks is the same on all of them and written once. `facts` are JSON.

    Raises RunFailed on all ranks when any rank cannot; then no checkpoint of this step is published.
    """
    target = folder / name_of(step)
    partial = target.with_name(target.name + ".partial")
    announce("copy")
    described = _merged(together("describing tensors", lambda: _described(tensors), group))
    first("preparing the checkpoint", lambda: _prepare(partial, Manifest(step, dict(facts), {}, {})), group)
    announce("flush")
    try:
        together("writing the checkpoint", lambda: _write(partial, tensors, described, group), group)
        files = together("bringing the checkpoint to disk", lambda: _settled(partial, place_in(group)[0]), group)
        merged = {name: file for mine in files for name, file in mine.items()}
        manifest = Manifest(step, {"world_size": len(files), **facts}, {name: d[0] for name, d in described.items()}, merged)
        first("publishing the checkpoint", lambda: _publish(partial, target, manifest), group)
    except BaseException:
        if place_in(group)[0] == 0:
            discard(partial)
        raise
    return target


Described = dict[str, tuple[TensorFacts, int]]  # dtype and whole shape; bytes of the largest part


def _described(tensors: Mapping[str, torch.Tensor]) -> Described:
    def size(tensor: torch.Tensor) -> int:
        return tensor.held_bytes if isinstance(tensor, Held) else tensor.nbytes

    return {name: (TensorFacts(dtype_name(t.dtype), tuple(t.shape)), size(t)) for name, t in tensors.items()}


def _merged(everyone: list[Described]) -> Described:
    """One description of all ranks' tensors. Raises RunFailed where ranks disagree on what a name means."""
    merged: Described = {}
    problems = []
    for rank, described in enumerate(everyone):
        for name, (facts, size) in described.items():
            known, largest = merged.get(name, (facts, 0))
            merged[name] = known, max(largest, size)
            if known != facts:
                hint = "a tensor that is cut over ranks is saved as what each holds of it"
                problems.append(Problem(f"{name} is {known} on an earlier rank and {facts} on rank {rank}", hint=hint))
    if problems:
        raise RunFailed(*problems)
    return merged


def _prepare(partial: Path, manifest: Manifest) -> None:
    """Make an empty folder to write into; what a dead run left of this step goes. Facts that are not JSON fail here, before any byte."""
    manifest.text()
    discard(partial)
    partial.mkdir(parents=True)


def _write(partial: Path, tensors: Mapping[str, torch.Tensor], described: Described, group: Group) -> None:
    writer = HuggingFaceStorageWriter(str(partial), fqn_to_index_mapping=_file_numbers(described), save_distributed=True)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process without a group is meant
            dcp.save(dict(tensors), storage_writer=writer, planner=planner, process_group=group, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise RunFailed(*said(error, "the checkpoint could not be written")) from error


def _file_numbers(described: Described) -> dict[str, int]:
    """The number of the file, from 1, in which each rank keeps its part of a tensor: files of at most FILE_BYTES, or of one tensor."""
    numbers: dict[str, int] = {}
    number, filled = 1, 0
    for name, (_, size) in described.items():
        if filled and filled + size > FILE_BYTES:
            number, filled = number + 1, 0
        numbers[name], filled = number, filled + size
    return numbers


def _settled(partial: Path, rank: int) -> dict[str, File]:
    """What this rank wrote, on disk and read back. torch syncs its files before Python's buffer is flushed, which leaves small ones out."""
    files = {}
    for path in sorted(partial.glob(f"shard-{rank + 1:05d}-*.safetensors")):
        sync_file(path)
        files[path.name] = file_facts(path)
    return files


def _publish(partial: Path, target: Path, manifest: Manifest) -> None:
    announce("publish")
    write_text(partial / MANIFEST, manifest.text())
    found = {path.name: path.stat().st_size for path in partial.iterdir() if path.name != MANIFEST}
    expected = {name: file.bytes for name, file in manifest.files.items()}
    if found != expected:
        differing = ", ".join(sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)))
        hint = "the checkpoint folder must be one that all hosts share"
        raise RunFailed(f"the first rank does not see the files that all ranks wrote: {differing}", where=str(partial), hint=hint)
    publish(partial, target)
    point(target.parent, manifest.step)


def said(error: CheckpointException, what: str) -> list[Problem]:
    """torch's collected failures as problems, one a rank."""
    reasons = {rank: f"{type(failure[0]).__name__}: {failure[0]}".splitlines()[0] for rank, failure in error.failures.items()}
    return [Problem(f"{what}: {reason}", f"rank {rank}") for rank, reason in reasons.items()]
