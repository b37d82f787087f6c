"""Kept: which checkpoints people mean by a path - those of a run, of a folder, or one. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pentamesh.checkpoint import disk
from pentamesh.checkpoint.manifest import MANIFEST
from pentamesh.checkpoint.names import LATEST, left, published, step_of
from pentamesh.errors import InputError, Problem
from pentamesh.run.folder import RunFolder

__all__ = ["Kept", "kept", "location"]

WANTED = "give a run folder, its checkpoints folder, or one checkpoint"


@dataclass(frozen=True)
class Kept:
    """Checkpoints, newest first; the `folder` of them, unless one was meant; and the run that they are of, where it is there."""

    checkpoints: list[Path]
    folder: Path | None = None
    run: RunFolder | None = None

    def of_step(self, step: int) -> Path:
        """The newest checkpoint of a step, also where its name says that it was to be replaced. Raises InputError, with those that there are."""
        if (path := next((path for path in self.checkpoints if step_of(path) == step), None)) is not None:
            return path
        there = ", ".join(str(step_of(path)) for path in reversed(self.checkpoints))
        raise InputError(f"there is no checkpoint of step {step}", where=str(self.folder or ""), hint=f"there are those of {there}")


def location(text: str) -> Path:
    """The path or URL that people wrote."""
    path = disk.location(text)
    return path if disk.is_remote(path) else _plain(path)


def _plain(path: Path) -> Path:
    return path if path.name and ".." not in path.parts else path.resolve()


def kept(text: str) -> Kept:
    """The checkpoints of a run folder, of a folder of checkpoints, or the one that a path leads to. Raises InputError, saying what it leads to."""
    path = location(text)
    if (path / MANIFEST).is_file() or (path.is_dir() and path in published(path.parent)):
        return Kept([path], run=_run_of(path.parent))
    folder = RunFolder(path).checkpoints
    for found in (folder, path):
        if checkpoints := published(found):
            return Kept(checkpoints, found, _run_of(found))
    raise InputError(_none(path, folder))


def _run_of(folder: Path) -> RunFolder | None:
    """The run whose checkpoints lie in a folder."""
    folder = folder.absolute()
    run = RunFolder(folder.parent)
    return run if folder.name == run.checkpoints.name and run.plan.is_file() else None


def _none(path: Path, folder: Path) -> Problem:
    """Why there is no checkpoint at a path."""
    if not path.exists():
        return Problem(f"there is no {path}", hint=WANTED)
    if not path.is_dir():
        return Problem(f"{path.name} is a file", str(path), WANTED)
    if path in [unfinished for unfinished, _, _ in left(path.parent)]:
        return Problem(f"{path.name} is no finished checkpoint: it is being written or removed, or a run died at that", str(path), WANTED)
    if RunFolder(path).plan.is_file() or folder.is_dir() or (path / LATEST).is_file() or left(path):
        return Problem("no checkpoint is there yet", str(path), "one is saved every `checkpoint.every` steps, and after the last")
    if (path / "config.json").is_file():
        hint = "a run starts from such a folder by model.name, and `pentamesh export` writes one; " + WANTED
        return Problem(f"{path.name} is a Hugging Face model folder and holds no checkpoint", str(path), hint)
    return Problem(f"{path.name or path} holds no checkpoint", str(path), WANTED)
