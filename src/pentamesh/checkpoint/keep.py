"""Keep: which checkpoints there are, which one to go on from, and which to let go.

step-00000050             published: finished, named, complete when it was
step-00000050.partial     being written, or left by a run that died
step-00000050.replaced    the one published before under the same step; gone as soon as the new one is named
step-00000050.removed     being removed
step-00000050.2           in an object store, which cannot rename: the second one written of that step; without a manifest.json none is published
latest.json               a pointer for people and tools; `newest` looks at the folders themselves
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from pentamesh.checkpoint.disk import discard, is_remote, retire, write_text
from pentamesh.checkpoint.manifest import MANIFEST, verify
from pentamesh.checkpoint.phases import announce
from pentamesh.checkpoint.together import Group, first, place_in, together
from pentamesh.errors import Problem

__all__ = ["LATEST", "agreed", "latest", "name_of", "names_for", "newest", "point", "prune", "published", "step_of"]

LATEST = "latest.json"
_PUBLISHED = re.compile(r"step-(\d{8,})(?:\.(replaced|\d+))?")
_LEFT = re.compile(r"step-(\d{8,})\.(partial|removed)")


def name_of(step: int) -> str:
    """The folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The step that a published checkpoint's name says."""
    match = _PUBLISHED.fullmatch(checkpoint.name)
    assert match, f"{checkpoint} is not a published checkpoint"
    return int(match[1])


def published(folder: Path) -> list[Path]:
    """Every published checkpoint, newest step first; nothing is said about whether it is still whole."""
    found = [path for path in _entries(folder) if _PUBLISHED.fullmatch(path.name)]
    if is_remote(folder):
        found = [path for path in found if (path / MANIFEST).exists()]
    return sorted(found, key=lambda path: (step_of(path), _writing(path)), reverse=True)


def names_for(folder: Path, step: int) -> tuple[str, str]:
    """The name under which a step's checkpoint is written, and the one that it has when it is published."""
    name = name_of(step)
    if not is_remote(folder):
        return f"{name}.partial", name
    if before := [path for path in published(folder) if step_of(path) == step]:
        name = f"{name}.{_writing(before[0]) + 1}"
    return name, name


def _writing(checkpoint: Path) -> int:
    """Which writing of its step a published checkpoint is: the later one is the newer."""
    number = checkpoint.name.partition(".")[2] or "1"
    return 0 if number == "replaced" else int(number)


def _entries(folder: Path) -> list[Path]:
    """The checkpoints of a folder, published or not."""
    return [path for path in folder.iterdir() if path.name.startswith("step-")] if folder.is_dir() else []


def newest(folder: Path, *, say: Callable[[str], object] | None = None) -> Path | None:
    """The newest published checkpoint that verifies, or None; why a newer one was passed over goes to `say`, or to stderr.

    It reads whole checkpoints, on this rank alone; `agreed` shares the work.
    """
    return _newest(published(folder), verify, say or sys.stderr.write)


def agreed(folder: Path, *, say: Callable[[str], object] | None = None, group: Group = None) -> Path | None:
    """As `newest`, the same on all ranks: each checksums a share of the files, and the first speaks. Collective: every rank calls it."""
    rank, size = place_in(group)
    names = first("looking for checkpoints", lambda: [path.name for path in published(folder)], group)

    def shared(checkpoint: Path) -> list[Problem]:
        answers = together("verifying a checkpoint", lambda: verify(checkpoint, (rank, size)), group)
        return list(dict.fromkeys(problem for found in answers for problem in found))

    return _newest([folder / name for name in names], shared, (say or sys.stderr.write) if rank == 0 else (lambda _: None))


def _newest(candidates: list[Path], check: Callable[[Path], list[Problem]], say: Callable[[str], object]) -> Path | None:
    for checkpoint in candidates:
        problems = check(checkpoint)
        if not problems:
            return checkpoint
        say("\n".join([f"passing over checkpoint {checkpoint.name}, which cannot be used:", *map(str, problems), ""]))
    return None


def prune(folder: Path, keep: int, good: Path | None = None) -> list[Path]:
    """Remove published checkpoints beyond the `keep` newest, and what dead runs left; return those removed. Only the first rank acts.

    `good` is one known to be whole (just saved, or just loaded). Where none of the kept ones is, they are verified, and if none of them holds,
    the newest whole one before them stays; where none is whole, nothing goes.
    """
    assert keep >= 1
    if place_in()[0] != 0:
        return []
    announce("prune")
    found = published(folder)
    kept, rest = found[:keep], found[keep:]
    if rest and good not in kept and all(map(verify, kept)):
        spared = next((path for path in rest if not verify(path)), None)
        rest = [path for path in rest if path != spared] if spared else []
    for path in reversed(rest):
        retire(path, MANIFEST)
    _sweep(folder, step_of(found[0]) if found else 0)
    return rest


def _sweep(folder: Path, step: int) -> None:
    """Remove what was being removed, and what was being written of steps before `step`: a run saves one step at a time."""
    there = {path.name for path in published(folder)}
    for path in _entries(folder):
        match = (_PUBLISHED if is_remote(folder) else _LEFT).fullmatch(path.name)
        if match and path.name not in there and (match[2] == "removed" or int(match[1]) < step):
            discard(path)


def point(checkpoint: Path) -> None:
    """Let `latest.json` name a published checkpoint."""
    body = {"schema": "pentamesh.latest", "version": 1, "step": step_of(checkpoint), "folder": checkpoint.name}
    write_text(checkpoint.parent / LATEST, json.dumps(body) + "\n")


def latest(folder: Path) -> Path | None:
    """What `latest.json` names, or None; for people and tools that want the last one without verifying any."""
    try:
        return folder / Path(json.loads((folder / LATEST).read_text())["folder"]).name
    except (OSError, ValueError, KeyError, TypeError):
        return None
