"""Places: where rows lie, from what a job names - files of this machine, or a split of a data set on the hub."""

from __future__ import annotations

import difflib
import glob
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pentamesh.errors import InputError, reason
from pentamesh.job.files import KINDS, file_kind
from pentamesh.job.job import Rows
from pentamesh.job.read import is_hub_data
from pentamesh.run.data.rows import HubSplit, HubStream, Place
from pentamesh.units import format_path

__all__ = ["find_files", "find_places", "hub_split", "hub_stream"]

# What turns files into tables without running code that came with them. Source: datasets, packaged_modules.
SAFE_BUILDERS = ("arrow", "csv", "json", "parquet", "text")


# Where the split of a source is given that has no keys of its own.
SPLIT_KEYS = {"data.train": "data.split", "data.held_out": "data.held_out_split"}


def find_places(rows: Rows, key: str, base: Path, usual_split: str = "train", *, streaming: bool = False) -> tuple[Place, ...]:
    """The files that a source names, or the split of the hub data set that it names where there is no such file.

    Raises InputError where there are none, or a split is given of files.
    """
    if is_hub_data(rows.rows, base):
        return ((hub_stream if streaming else hub_split)(rows.rows, rows.subset, rows.split or usual_split, key),)
    places = {"split": SPLIT_KEYS.get(key, f"{key}.split"), "subset": "data.subset" if key in SPLIT_KEYS else f"{key}.subset"}
    for given, where in places.items():
        if value := getattr(rows, given):
            what = f"{where.rpartition('.')[2]} = {value} and {key} = {rows.rows}, which is no hub data set"
            raise InputError(what, where=where, hint="leave it out")
    return find_files(rows.rows, base, key)


def find_files(pattern: str, base: Path, key: str) -> tuple[Path, ...]:
    """The files that `pattern` (a path, a folder or a glob, relative to `base`) names, sorted. Raises InputError where there is none to read."""
    path = Path(format_path(base / pattern))  # rows are named by their file, in errors and in a preview
    if path.is_symlink() and not path.exists():
        raise InputError(f"{path} is a link to {path.readlink()}, which is not there", where=key, hint="name the file itself")
    if path.is_file():
        return (_readable(path, key),)
    if path.is_dir():
        return _in_folder(path, key)
    found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
    files = tuple(_readable(file, key) for file in found if file.is_file())
    if not files:
        raise InputError(f"no file {pattern!r}: looked for {path.absolute()}", where=key, hint=_similar(path))
    return files


def _readable(path: Path, key: str) -> Path:
    if not any(file_kind(path.name)):
        raise InputError(f"{path} is none of the kinds that are read: {KINDS}", where=key, hint="convert it to .jsonl, one JSON object a line")
    return path


def _in_folder(folder: Path, key: str) -> tuple[Path, ...]:
    """The files of rows that lie in a folder itself, sorted; of one that `datasets` has saved, those that its state names, in that order."""
    if (splits := folder / "dataset_dict.json").is_file():
        names = ", ".join(f"`{folder.name}/{name}`" for name in _saved(splits, "splits", key))
        raise InputError(f"{folder} holds several splits", where=key, hint=f"name one of them: {names}")
    if (state := folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return tuple(_there(folder / str(file["filename"]), key) for file in _saved(state, "_data_files", key))
    beside = sorted(path for path in folder.iterdir() if not path.name.startswith((".", "_")))
    if files := tuple(path for path in beside if path.is_file() and any(file_kind(path.name))):
        return files
    inner = any(path.is_dir() for path in beside)
    hint = f"name the folder that has them, or a glob: `{folder.name}/**/*.jsonl`" if inner else f"kinds that are read: {KINDS}"
    raise InputError(f"{folder} is a folder without files of rows", where=key, hint=hint)


def _there(file: Path, key: str) -> Path:
    if not file.is_file():
        raise InputError(f"{file} is not there, and state.json names it", where=key, hint="save the data set again with save_to_disk")
    return _readable(file, key)


def _saved(file: Path, field: str, key: str) -> list[Any]:
    """What `datasets` wrote of a folder that it saved."""
    try:
        return list(json.loads(file.read_text(encoding="utf-8"))[field])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} cannot be read: {reason(error)}", where=key, hint="save the data set again with save_to_disk") from error


def _similar(path: Path) -> str:
    names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=3)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return "paths are relative to the job file" if path.parent.is_dir() else f"there is no folder {path.parent.absolute()}"


def hub_split(name: str, subset: str | None, split: str, key: str) -> HubSplit:
    """A split of a data set of the hub, brought into the local cache if it is not there. No code of the data set is run, and nothing unpickled.

    Raises InputError where it cannot be reached, has no such subset or split, or is no table of rows.
    """
    with _reached(name, subset, split, key):
        builder = _builder(name, subset, key)
        builder.download_and_prepare()
        files = builder.as_dataset(split=split).cache_files
    return HubSplit(_called(name, subset, split), tuple(Path(file["filename"]) for file in files))


def hub_stream(name: str, subset: str | None, split: str, key: str) -> HubStream:
    """The same, read over the network row by row and kept nowhere."""
    with _reached(name, subset, split, key):
        found = _builder(name, subset, key).as_streaming_dataset(split=split)

    def read() -> Iterator[dict[str, Any]]:
        with _reached(name, subset, split, key):
            yield from found

    return HubStream(_called(name, subset, split), read)


def _called(name: str, subset: str | None, split: str) -> str:
    return f"{name}{f'/{subset}' if subset else ''} {split}"


@contextmanager
def _reached(name: str, subset: str | None, split: str, key: str) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # of the network, the hub, the library and the formats it reads
        raise _unreachable(name, subset, split, key, error) from error


def _builder(name: str, subset: str | None, key: str) -> Any:
    import datasets
    import huggingface_hub

    datasets.disable_progress_bars()
    for library in (datasets, huggingface_hub):  # what they say of a failure, the exception says too
        library.logging.set_verbosity(logging.CRITICAL)
    builder = datasets.load_dataset_builder(name, subset)
    _check_safe(name, type(builder).__module__.split(".")[-2], key)
    return builder


def _check_safe(name: str, kind: str, key: str) -> None:
    if kind not in SAFE_BUILDERS:
        raise InputError(f"{name} is made of {kind} files, not of rows", where=key, hint=f"kinds that are read: {', '.join(SAFE_BUILDERS)}")


def _unreachable(name: str, subset: str | None, split: str, key: str, error: Exception) -> InputError:
    offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") or os.environ.get("HF_DATASETS_OFFLINE") else ""
    cause: BaseException = error
    while cause.__cause__:
        cause = cause.__cause__
    asked = f"{name}, subset {subset}, split {split}" if subset else f"{name}, split {split}"
    return InputError(
        f"{asked} is neither a file here nor data that the hub gives{offline}: {reason(cause)}",
        where=key,
        hint="check the name, data.subset and the split; for data of your own give a file",
    )
