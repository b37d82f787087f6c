"""Save: the state of a run, by all its ranks, as a checkpoint that exists or does not.

Shards go into `step-00000050.partial`, are brought to disk, read back and compared by whoever wrote them; the manifest is written last, and
the folder gets its name at once. Object stores have no renaming: there a folder without a manifest is no checkpoint. A failure anywhere is a
failure everywhere, and leaves earlier checkpoints as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner

from pentamesh.checkpoint.disk import discard, publish, unfinished, write_text
from pentamesh.checkpoint.headers import dtype_name
from pentamesh.checkpoint.manifest import MANIFEST, File, Manifest, TensorFacts, check_back
from pentamesh.checkpoint.names import new_name, point
from pentamesh.checkpoint.phases import announce
from pentamesh.checkpoint.shards import Writer, without_group
from pentamesh.checkpoint.together import Group, first, place_in, together
from pentamesh.errors import PentameshError, Problem, RunFailed, reason

__all__ = ["said", "save"]


def save(folder: Path, step: int, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any], *, group: Group = None) -> Path:
    """Save `tensors` and `facts` as the checkpoint of `step` in `folder`, and return its path. Collective: every rank calls it.

    A tensor that is cut is `Held`; a plain one of the same name on several ranks is the same on all of them and written once. `facts` are JSON.

    Raises RunFailed on all ranks when any rank cannot; then no checkpoint of this step is published.
    """
    described = _merged(together("describing tensors", lambda: _described(tensors), group))

    def manifest(files: dict[str, File]) -> Manifest:
        return Manifest(step, {"world_size": place_in(group)[1], **facts}, described, files)

    target = folder / first("preparing the checkpoint", lambda: _prepare(folder, manifest({})), group)
    partial = unfinished(target)
    announce("flush")
    try:
        written = together("writing the checkpoint", lambda: _write(partial, tensors, group), group)
        files = {name: file for mine in written for name, file in mine.items()}
        first("publishing the checkpoint", lambda: _publish(target, manifest(files)), group)
    except BaseException:
        if place_in(group)[0] == 0:
            discard(partial)
        raise
    return target


def _described(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorFacts]:
    return {name: TensorFacts(dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()}


def _merged(everyone: list[dict[str, TensorFacts]]) -> dict[str, TensorFacts]:
    """One description of all ranks' tensors. Raises RunFailed where ranks disagree on what a name means."""
    merged: dict[str, TensorFacts] = {}
    problems = []
    for rank, described in enumerate(everyone):
        for name, facts in described.items():
            if (known := merged.setdefault(name, facts)) != facts:
                hint = "a tensor that is cut over ranks is saved as what each holds of it"
                problems.append(Problem(f"{name} is {known} on an earlier rank and {facts} on rank {rank}", hint=hint))
    if problems:
        raise RunFailed(*problems)
    return merged


def _prepare(folder: Path, manifest: Manifest) -> str:
    """Make an empty folder to write into, and return the name that it gets in the end.

    What a dead run left of this step goes. Facts that are not JSON fail here, before any byte.
    """
    manifest.text()
    name = new_name(folder, manifest.step)
    partial = unfinished(folder / name)
    discard(partial)
    partial.mkdir(parents=True)
    return name


def _write(partial: Path, tensors: Mapping[str, torch.Tensor], group: Group) -> dict[str, File]:
    """Write what is this rank's to write and read it back: what the disk gives has to be what memory had."""
    writer = Writer(partial, place_in(group)[0])
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with without_group():
            dcp.save(dict(tensors), storage_writer=writer, planner=planner, process_group=group, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise RunFailed(*said(error, "the checkpoint could not be written")) from error
    for name, file in writer.files.items():
        check_back(partial / name, file)
    return writer.files


def _publish(target: Path, manifest: Manifest) -> None:
    announce("publish")
    partial = unfinished(target)
    found = {path.name: path.stat().st_size for path in partial.iterdir()}
    expected = {name: file.bytes for name, file in manifest.files.items()}
    if found != expected:
        differing = ", ".join(sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)))
        hint = "the checkpoint folder must be one that all hosts share"
        raise RunFailed(f"the first rank does not see the files that all ranks wrote: {differing}", where=str(partial), hint=hint)
    write_text(partial / MANIFEST, manifest.text())
    publish(partial, target)
    with suppress(Exception):  # it is published now, whatever becomes of the pointers: people and tools have them, a resume looks at the folders
        point(target)


def said(error: CheckpointException, what: str) -> list[Problem]:
    """torch's collected failures as problems, one a rank."""
    return [Problem(f"{what}: {_reason(failure[0])}", f"rank {rank}") for rank, failure in error.failures.items()]


def _reason(error: BaseException) -> str:
    if isinstance(error, PentameshError):
        return "; ".join(problem.what for problem in error.problems)
    return f"{type(error).__name__}: {reason(error)}"
