"""Disk: effects that last. A file is written whole or not at all, and what is said to be there survives a power cut."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pentamesh.errors import InputError, Problem
from pentamesh.units import format_bytes

__all__ = ["check_room", "discard", "publish", "sync_file", "sync_folder", "write_text"]

# What is written to learn whether a folder can be written: enough to need a block of its own on any file system.
_TRIAL_BYTES = 2**20


def check_room(folder: Path, bytes_needed: int) -> None:
    """Make sure, before any work is done, that `bytes_needed` can be written to `folder`: it is made, a trial is written, free space compared.

    Raises InputError.
    """
    trial = folder / f".trial-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < bytes_needed:
            lacking = f"{format_bytes(bytes_needed)} are needed and {format_bytes(free)} are free"
            raise InputError(Problem(f"not enough disk: {lacking}", str(folder), "free some, keep fewer checkpoints or use another folder"))
        try:
            trial.write_bytes(bytes(_TRIAL_BYTES))
            sync_file(trial)
        finally:
            trial.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(Problem(f"the folder cannot be written: {error.strerror}", str(folder), "use another folder")) from error


def sync_file(path: Path) -> None:
    """Return once the file's bytes are on disk, whoever wrote them."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Return once the names in a folder are on disk: a renamed file is only there for good when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a small file: it is whole or as before, and on disk when this returns."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def publish(partial: Path, target: Path) -> None:
    """Give a finished folder its name. One that has the name already steps aside to `<name>.replaced`, and goes when the new one is there."""
    aside = target.with_name(target.name + ".replaced")
    sync_folder(partial)
    if target.exists():
        discard(aside)
        target.rename(aside)
    partial.rename(target)
    sync_folder(target.parent)
    discard(aside)


def discard(folder: Path) -> None:
    """Remove a folder that may be there; a link to one is removed, not followed."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)
