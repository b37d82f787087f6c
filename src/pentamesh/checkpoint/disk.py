"""Disk: effects that last. A file is written whole or not at all, and what is said to be there survives a power cut.

A folder is a `pathlib.Path`, or, for a URL (`s3://bucket/run`), universal_pathlib's `UPath`, which has the same methods. An object store knows
neither renaming nor half-written objects: there a folder is finished once its last file is there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from pentamesh.errors import InputError, reason
from pentamesh.units import format_bytes

__all__ = [
    "check_room",
    "discard",
    "forget",
    "is_remote",
    "location",
    "publish",
    "reached",
    "retire",
    "settle",
    "sync_folder",
    "unfinished",
    "write_text",
    "writing",
]

# What is written to learn whether a folder can be written: enough to need a block of its own on any file system.
_TRIAL_BYTES = 2**20
_REMOTE_HINT = "see that its fsspec package is installed (s3fs, gcsfs, adlfs ...) and what it wants for credentials and endpoint in the environment"


def location(text: str) -> Path:
    """The folder that a path or a URL names. Raises InputError for a URL whose kind cannot be opened here."""
    kind, is_url, path = text.partition("://")
    if not is_url or kind in ("file", "local"):
        return Path(path or text)
    try:
        from upath import UPath
    except ImportError:
        raise InputError(f"{text} is a URL, and universal_pathlib is not installed", hint="pip install 'pentamesh[remote]'") from None
    try:
        folder = UPath(text, use_listings_cache=False)  # other processes write there too: no listing may be an old one
        folder.fs  # noqa: B018 - the package is imported now, not at step 500
    except (ImportError, ValueError) as error:
        raise InputError(f"{text} cannot be opened: {reason(error)}", hint=_REMOTE_HINT) from error
    return cast(Path, folder)


def is_remote(folder: Path) -> bool:
    """Whether a folder lies in an object store or on another machine."""
    return not isinstance(folder, Path)


@contextmanager
def reached(folder: Path) -> Iterator[None]:
    """Raise InputError where a store cannot be reached, or will not let us in: each kind has errors of its own."""
    try:
        yield
    except Exception as error:
        if not is_remote(folder) or isinstance(error, InputError):
            raise
        raise InputError(f"{folder} cannot be used: {type(error).__name__}: {reason(error)}", hint=_REMOTE_HINT) from error


def check_room(folder: Path, bytes_needed: int) -> None:
    """Make sure, before any work is done, that `bytes_needed` can be written to `folder`: it is made, a trial is written, free space compared.

    What an object store has free is not known. Raises InputError.
    """
    if is_remote(folder):
        _check_store(folder)
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(folder).free) >= bytes_needed:
            _try(folder / ".trial")  # one name: what a killed process left is written over
            return
    except OSError as error:
        raise InputError(f"the folder cannot be written: {error.strerror}", where=str(folder), hint="use another folder") from error
    lacking = f"{format_bytes(bytes_needed)} are needed and {format_bytes(free)} are free"
    raise InputError(f"not enough disk: {lacking}", where=str(folder), hint="free some, keep fewer checkpoints or use another folder")


def _check_store(folder: Path) -> None:
    """Raise InputError where a store is not there, which is its owner's to make and not a slip of the pen's, or takes nothing."""
    store = [folder, *folder.parents][-1]
    with reached(folder):
        if not store.exists():
            raise InputError(f"there is no {store}", where=str(folder), hint="make it, or see what name, credentials and endpoint lead to")
        folder.mkdir(parents=True, exist_ok=True)
        _try(folder / ".trial")


def _try(trial: Path) -> None:
    try:
        with trial.open("wb") as file:
            file.write(bytes(_TRIAL_BYTES))
            settle(file)
    finally:
        trial.unlink(missing_ok=True)


def settle(file: BinaryIO) -> None:
    """Return once an open file's bytes are on disk; what an object store has taken is there already."""
    if (handle := _handle(file)) is not None:
        file.flush()
        os.fsync(handle)


def forget(file: BinaryIO) -> None:
    """Drop what memory holds of an open file that is on disk: the next to read it reads the disk, and nobody else's pages had to go."""
    if (handle := _handle(file)) is not None and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _handle(file: BinaryIO) -> int | None:
    try:
        return file.fileno()
    except OSError:  # io.UnsupportedOperation too: no file of this machine
        return None


def sync_folder(folder: Path) -> None:
    """Return once the names in a folder are on disk: a renamed file is only there for good when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a small file: it is whole or as before, and on disk when this returns."""
    if is_remote(path):
        path.write_text(text)
        return
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(text.encode())
        settle(file)
    partial.replace(path)
    sync_folder(path.parent)


def unfinished(target: Path) -> Path:
    """Where a folder is written that will be published as `target`."""
    return target if is_remote(target) else target.with_name(target.name + ".partial")


@contextmanager
def writing(target: Path) -> Iterator[Path]:
    """An empty folder to write into, which is published as `target` when the block ends, and removed where it fails."""
    partial = unfinished(target)
    discard(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        publish(partial, target)
    except BaseException:
        discard(partial)
        raise


def publish(partial: Path, target: Path) -> None:
    """Give a finished folder its name. One that has the name already steps aside to `<name>.replaced`, and goes when the new one is there."""
    if partial == target:  # nobody takes it for finished without its last file
        return
    aside = target.with_name(target.name + ".replaced")
    sync_folder(partial)
    if target.exists():
        discard(aside)
        target.rename(aside)
    partial.rename(target)
    sync_folder(target.parent)
    discard(aside)


def retire(folder: Path, last: str) -> None:
    """Remove a published folder, which from the first moment is none any more: on disk by another name, elsewhere without its `last` file."""
    if is_remote(folder):
        (folder / last).unlink(missing_ok=True)
        discard(folder)
        return
    gone = folder.with_name(folder.name.partition(".")[0] + ".removed")
    discard(gone)
    folder.rename(gone)
    discard(gone)


def discard(folder: Path) -> None:
    """Remove a folder that may be there, or a file of its name; a link is removed, not followed."""
    if is_remote(folder):
        if folder.exists():
            folder.fs.rm(folder.path, recursive=True)  # pyright: ignore[reportAttributeAccessIssue]
    elif folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)
