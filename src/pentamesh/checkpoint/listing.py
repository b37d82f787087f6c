"""Listing: what a folder of checkpoints holds, and whether it is whole, as facts for people and tools. Without torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pentamesh.checkpoint.manifest import PER_RANK, Manifest, verify
from pentamesh.checkpoint.names import BEST, LATEST, finite, left, published
from pentamesh.errors import InputError, Problem
from pentamesh.layout.mesh import Layout, Mesh

__all__ = ["listing", "num_bytes", "verification"]

# What tensors are, by how their names begin; a run goes on from a checkpoint that holds all of them.
_KINDS = {"model": "weights", "optimizer": "optimizer state", "random": "random state"}


def listing(folder: Path | None, checkpoints: list[Path]) -> dict[str, Any]:
    """The JSON of `pentamesh checkpoint list`: the checkpoints in their order, and of their `folder` the pointers and what is unfinished.

    `folder` is None for a checkpoint that lies alone. Manifests are read and files looked at; nothing is checksummed.
    """
    pointers = {name: _pointed(folder / file) for name, file in (("latest", LATEST), ("best", BEST))} if folder is not None else {}
    there = {path.name for path in published(folder)} if folder is not None else set()
    return {
        "schema": "pentamesh.checkpoints",
        "version": 1,
        "folder": str(folder) if folder is not None else None,
        "checkpoints": [_row(path, [name for name, at in pointers.items() if at == path.name]) for path in checkpoints],
        "unfinished": [_unfinished(path, step, kind) for path, step, kind in left(folder)] if folder is not None else [],
        "lost_pointers": {name: at for name, at in pointers.items() if at is not None and at not in there},
    }


def _pointed(file: Path) -> str | None:
    """The folder that a pointer names, or None where there is none that can be read."""
    try:
        return str(json.loads(file.read_text())["folder"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _row(checkpoint: Path, pointers: list[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"folder": checkpoint.name, "step": None, "problem": None, "pointers": pointers}
    row |= dict.fromkeys(("saved_at", "layout", "num_ranks", "precision", "held_out_loss", "consumed_samples", "trained_tokens", "total_tokens"))
    row |= {"bytes": num_bytes(checkpoint), "holds": [], "converted_from": None, "replaced": checkpoint.name.endswith(".replaced")}
    try:
        manifest = Manifest.read(checkpoint)
    except InputError as error:
        return row | {"problem": error.problems[0].what}
    facts = manifest.facts
    counters = found if isinstance(found := facts.get("counters"), dict) else {}
    kinds = {"random" if PER_RANK.match(name) else name.partition(".")[0] for name in manifest.tensors}
    return row | {
        "step": manifest.step,
        "saved_at": facts.get("saved_at"),
        "layout": _layout(facts.get("layout")),
        "num_ranks": facts.get("world_size"),
        "precision": facts.get("precision"),
        "held_out_loss": finite(facts.get("held_out_loss")),
        "consumed_samples": counters.get("consumed"),
        "trained_tokens": counters.get("trained_tokens"),
        "total_tokens": counters.get("total_tokens"),
        "holds": [said for kind, said in _KINDS.items() if kind in kinds],
        "converted_from": facts.get("converted_from"),
    }


def _layout(facts: Any) -> dict[str, str] | None:
    """Strategy and mesh of the layout that wrote it, or None where the manifest does not say."""
    try:
        found = Layout(Mesh.of(facts), facts["shard"])
        return {"strategy": found.strategy, "mesh": str(found.mesh)}
    except (TypeError, KeyError, ValueError, InputError):
        return None


def _unfinished(path: Path, step: int, kind: str) -> dict[str, Any]:
    return {"folder": path.name, "step": step, "kind": kind, "bytes": num_bytes(path)}


def num_bytes(folder: Path) -> int:
    """Bytes of the files that lie in a folder; links are not followed."""
    try:
        return sum(path.stat().st_size for path in folder.iterdir() if path.is_file() and not path.is_symlink())
    except OSError:
        return 0


def verification(folder: Path | None, checkpoints: list[Path], hashed: Callable[[int], object] = lambda _: None) -> dict[str, Any]:
    """The JSON of `pentamesh checkpoint verify`: every problem of every checkpoint, and the newest whole one, from which a run would go on.

    `folder` is None for a checkpoint that is meant alone. Every file is read and its checksum compared; `hashed` hears the bytes of each. One that a
    run removed meanwhile is left out.
    """
    found = [(path, problems) for path in checkpoints if (problems := _problems(path, hashed)) is not None]
    return {
        "schema": "pentamesh.checkpoint_verification",
        "version": 1,
        "folder": str(folder) if folder is not None else None,
        "checkpoints": [{"folder": path.name, "is_whole": not problems, "problems": [vars(p) for p in problems]} for path, problems in found],
        "resume_from": next((path.name for path, problems in found if not problems), None),
    }


def _problems(checkpoint: Path, hashed: Callable[[int], object]) -> list[Problem] | None:
    problems = verify(checkpoint, hashed=hashed)
    return problems if not problems or checkpoint.exists() else None
