"""Load: a checkpoint back into the tensors of a run, whatever layout wrote it and whatever layout reads it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner

from pentamesh.checkpoint.headers import dtype_name
from pentamesh.checkpoint.manifest import PER_RANK, Manifest, TensorFacts, verify
from pentamesh.checkpoint.parts import Part, misfit, parts
from pentamesh.checkpoint.phases import announce
from pentamesh.checkpoint.save import said
from pentamesh.checkpoint.shards import Reader, without_group
from pentamesh.checkpoint.together import Group, place_in, together
from pentamesh.errors import InputError, Problem, RunFailed

__all__ = ["load"]


def load(checkpoint: Path, tensors: dict[str, torch.Tensor], *, verified: bool = False, group: Group = None) -> dict[str, Any]:
    """Fill `tensors`, in place, from a published checkpoint and return its facts, `step` among them.

    Collective: every rank calls it and verifies a share of the files, unless they have just been `verified` (by `agreed`). Together the ranks ask
    for every tensor of the checkpoint; of what each rank has for itself (`rng.<rank>`) some may be left.

    Raises InputError on all ranks: for a checkpoint that is not whole (naming the file or the tensor), and for names, shapes or dtypes that differ.
    """
    announce("restore")
    share = place_in(group)
    if not verified:
        together("verifying the checkpoint", lambda: _refuse(verify(checkpoint, share)), group)
    manifest = together("reading the manifest", lambda: Manifest.read(checkpoint), group)[0]
    asked = {name for names in together("comparing names", lambda: list(tensors), group) for name in names}
    together("comparing tensors", lambda: _refuse([*_differing(manifest, tensors, checkpoint), *_unasked(manifest, asked, checkpoint)]), group)
    pieces = _pieces(checkpoint, manifest, share, group)
    together("comparing files", lambda: _refuse(list(_misfitting(manifest, pieces, share))), group)
    together("reading the checkpoint", lambda: _read(Reader(manifest.tensors, pieces), tensors, group), group)
    return {"step": manifest.step, **manifest.facts}


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise InputError(*problems)


def _differing(manifest: Manifest, tensors: dict[str, torch.Tensor], checkpoint: Path) -> Iterator[Problem]:
    for name, tensor in tensors.items():
        found, wanted = manifest.tensors.get(name), TensorFacts(dtype_name(tensor.dtype), tuple(tensor.shape))
        if found is None:
            near = difflib.get_close_matches(name, manifest.tensors, 1)
            yield Problem(f"{name} is not in the checkpoint", str(checkpoint), f"it has {near[0]}" if near else "")
        elif found != wanted:
            yield Problem(f"{name} is {found} in the checkpoint and {wanted} in the run", str(checkpoint))


def _unasked(manifest: Manifest, asked: set[str], checkpoint: Path) -> Iterator[Problem]:
    for name in sorted(manifest.tensors.keys() - asked):
        if not PER_RANK.match(name):
            yield Problem(f"{name} {manifest.tensors[name]} is in the checkpoint and not in the run", str(checkpoint))


def _pieces(checkpoint: Path, manifest: Manifest, share: tuple[int, int], group: Group) -> dict[str, list[Part]]:
    """Where every tensor lies: each rank reads the headers of a share of the files and tells the others."""
    mine = [checkpoint / name for name in sorted(manifest.files)[share[0] :: share[1]]]
    found: dict[str, list[Part]] = {}
    for some in together("reading headers", lambda: parts(mine), group):
        for name, pieces in some.items():
            found.setdefault(name, []).extend(pieces)
    return found


def _misfitting(manifest: Manifest, pieces: dict[str, list[Part]], share: tuple[int, int]) -> Iterator[Problem]:
    """What keeps files from holding the tensors of the manifest, of a share of them: torch reads what is there and leaves the rest as it was."""
    for name in sorted(manifest.tensors)[share[0] :: share[1]]:
        yield from misfit(name, manifest.tensors[name], pieces.get(name, []))


def _read(reader: Reader, tensors: dict[str, torch.Tensor], group: Group) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with without_group():
            dcp.load(tensors, storage_reader=reader, planner=planner, process_group=group, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise RunFailed(*said(error, "the checkpoint could not be read")) from error
