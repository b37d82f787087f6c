"""Names: which checkpoints a folder has, told by the names in it, and the pointers to the latest and the best. Without torch.

step-00000050             published: finished, named, complete when it was
step-00000050.partial     being written, or left by a run that died
step-00000050.replaced    the one published before under the same step; gone as soon as the new one is named
step-00000050.removed     being removed
step-00000050.2           in an object store, which cannot rename: the second one written of that step; without a manifest.json none is published
latest.json               a pointer for people and tools; the folders themselves are the truth
best.json                 the same to the one with the lowest held-out loss, where any was evaluated
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pentamesh.checkpoint.disk import is_remote, reached, write_text
from pentamesh.checkpoint.manifest import MANIFEST, Manifest, name_of
from pentamesh.errors import InputError

__all__ = [
    "BEST",
    "LATEST",
    "best_first",
    "finite",
    "held_out_loss",
    "latest",
    "left",
    "new_name",
    "point",
    "point_best",
    "published",
    "step_of",
]

LATEST, BEST = "latest.json", "best.json"
_PUBLISHED = re.compile(r"step-(\d{8,})(?:\.(?:replaced|\d+))?")
_LEFT = re.compile(r"step-(\d{8,})\.(partial|removed)")


def step_of(checkpoint: Path) -> int:
    """The step that a published checkpoint's name says."""
    match = _PUBLISHED.fullmatch(checkpoint.name)
    assert match, f"{checkpoint} is not a published checkpoint"
    return int(match[1])


def published(folder: Path) -> list[Path]:
    """Every published checkpoint, newest step first; nothing is said about whether it is still whole."""
    found = [path for path in _entries(folder) if _is_published(path)]
    return sorted(found, key=lambda path: (step_of(path), _writing(path)), reverse=True)


def new_name(folder: Path, step: int) -> str:
    """The name that a step's checkpoint will be published under. An object store cannot put it in the place of one that is there already."""
    before = [path for path in published(folder) if step_of(path) == step] if is_remote(folder) else []
    return f"{name_of(step)}.{_writing(before[0]) + 1}" if before else name_of(step)


def _is_published(path: Path) -> bool:
    return _PUBLISHED.fullmatch(path.name) is not None and (not is_remote(path) or (path / MANIFEST).exists())


def _writing(checkpoint: Path) -> int:
    """Which writing of its step a published checkpoint is: the later one is the newer."""
    number = checkpoint.name.partition(".")[2] or "1"
    return 0 if number == "replaced" else int(number)


def _entries(folder: Path) -> list[Path]:
    """The checkpoints of a folder, published or not. Raises InputError for a store that cannot be reached."""
    with reached(folder):
        return [path for path in folder.iterdir() if path.name.startswith("step-")] if folder.is_dir() else []


def left(folder: Path) -> list[tuple[Path, int, str]]:
    """What was being written (`partial`) or removed (`removed`), with its step: by a run that is at work, or one that died."""
    if is_remote(folder):
        found = [(path, step_of(path), "partial") for path in _entries(folder) if _PUBLISHED.fullmatch(path.name) and not _is_published(path)]
    else:
        found = [(path, int(match[1]), match[2]) for path in _entries(folder) if (match := _LEFT.fullmatch(path.name))]
    return sorted(found, key=lambda item: item[0].name)


def held_out_loss(checkpoint: Path) -> float | None:
    """The held-out loss that its manifest says, or None: not evaluated, not finite, or not to be read."""
    try:
        return finite(Manifest.read(checkpoint).facts.get("held_out_loss"))
    except InputError:
        return None


def finite(value: Any) -> float | None:
    """The number, where it is one that can be compared."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return found if math.isfinite(found := float(value)) else None
    except OverflowError:
        return None


def best_first(checkpoints: Iterable[Path]) -> list[tuple[Path, float]]:
    """Those with a held-out loss, the lowest first; of equal ones the earlier. Only manifests are read."""
    found = [(path, loss) for path in checkpoints if (loss := held_out_loss(path)) is not None]
    return sorted(found, key=lambda item: (item[1], step_of(item[0]), item[0].name))


def point(checkpoint: Path) -> None:
    """Let `latest.json` name a checkpoint, and `best.json` the best of those up to it: later ones are of a future that was given up."""
    folder, step = checkpoint.parent, step_of(checkpoint)
    write_text(folder / LATEST, json.dumps({"schema": "pentamesh.latest", "version": 1, "step": step, "folder": checkpoint.name}) + "\n")
    point_best([path for path in published(folder) if step_of(path) <= step], folder)


def point_best(checkpoints: Iterable[Path], folder: Path) -> None:
    """Let `best.json` name the best of these checkpoints; where none has a held-out loss there is no such file."""
    if not (found := best_first(checkpoints)):
        (folder / BEST).unlink(missing_ok=True)
        return
    path, loss = found[0]
    facts = {"schema": "pentamesh.best", "version": 1, "step": step_of(path), "folder": path.name, "held_out_loss": loss}
    write_text(folder / BEST, json.dumps(facts) + "\n")


def latest(folder: Path) -> Path | None:
    """What `latest.json` names, or None; for people and tools that want the last one without verifying any."""
    try:
        return folder / Path(json.loads((folder / LATEST).read_text())["folder"]).name
    except (OSError, ValueError, KeyError, TypeError):
        return None
