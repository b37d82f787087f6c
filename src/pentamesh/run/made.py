"""Made: a model folder that a run makes once beside itself and finds there again, as long as what it is made of stays as it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pentamesh.checkpoint.disk import write_text, writing
from pentamesh.checkpoint.export import RECORD
from pentamesh.errors import InputError

__all__ = ["made_once"]


def made_once(folder: Path, what: str, record: Mapping[str, Any], write: Callable[[Path], None]) -> Path:
    """`folder`, found there with this record of what decides it, or made now by `write`; it appears at once, whole.

    Raises InputError where something else is in its place: it may be the user's own and is not removed.
    """
    if folder.exists() or folder.is_symlink():
        if not (folder / RECORD).is_file():
            raise InputError(
                f"{folder} is needed for {what} and is not ours to replace", where="logging.folder", hint="choose a folder of its own for the run"
            )
        if json.loads((folder / RECORD).read_text()) == record:
            return folder
    with writing(folder) as partial:
        write(partial)
        write_text(partial / RECORD, json.dumps(record, indent=2) + "\n")
    return folder
