"""A checkpoint whose manifest vouches for files that do not hold what it says: refused, and nothing of a run is left as it was by accident."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pentamesh.checkpoint.headers import write_tensors
from pentamesh.checkpoint.keep import newest
from pentamesh.checkpoint.load import load
from pentamesh.checkpoint.manifest import MANIFEST, File, Manifest, _digest, name_of, verify
from pentamesh.checkpoint.save import save
from pentamesh.errors import InputError

WHOLE = torch.arange(6.0).view(3, 2)


def of_one(folder: Path, values: torch.Tensor = WHOLE, offset: tuple[Any, ...] = (0, 0), name: str = "one.safetensors") -> dict[str, File]:
    """A file with a part of `model.w`, and what a manifest says of it."""
    shapes = {"model.w": (values.dtype, tuple(values.shape))}
    return {name: write_tensors(folder / name, shapes, [values], {"model.w": offset})}


def crafted(root: Path, files: Callable[[Path], dict[str, File]] = of_one, change: Callable[[dict[str, Any]], object] = lambda _: None) -> Path:
    """A checkpoint of step 2 beside a sound one of step 1, whose manifest is `change`d and vouches for itself and its `files`."""
    sound = save(root, 1, {"model.w": WHOLE}, {})
    target = root / name_of(2)
    shutil.copytree(sound, target)
    for path in target.glob("*.safetensors"):
        path.unlink()
    facts = json.loads(replace(Manifest.read(sound), step=2, files=files(target)).text())
    del facts["sha256"]
    change(facts)
    (target / MANIFEST).write_text(json.dumps(facts | {"sha256": _digest(facts)}))
    return target


def overlapping(folder: Path) -> dict[str, File]:
    return of_one(folder, WHOLE[:2]) | of_one(folder, WHOLE[:1], (1, 0), "two.safetensors")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (lambda folder: of_one(folder, WHOLE[:2]), r"model\.w has 6 values, 4 are in the checkpoint"),
        (lambda folder: of_one(folder, offset=(1, 0)), r"a part of model\.w, \[3, 2\] at \[1, 0\], does not lie in \[3, 2\]"),
        (lambda folder: of_one(folder, offset=(-1, 0)), "does not lie in"),
        (lambda folder: of_one(folder, offset=("x", 0)), "does not lie in"),
        (lambda folder: of_one(folder, offset=(0,)), "does not lie in"),
        (overlapping, r"two parts of model\.w hold the same values"),
        (lambda folder: of_one(folder, WHOLE.double()), r"model\.w is F32 in manifest\.json and F64 in one\.safetensors"),
    ],
)
def test_files_that_do_not_hold_each_value_once_are_not_loaded(files: Callable[[Path], dict[str, File]], said: str, tmp_path: Path) -> None:
    checkpoint = crafted(tmp_path, files)
    assert verify(checkpoint) == []
    found = {"model.w": torch.full((3, 2), 9.0)}
    with pytest.raises(InputError, match=said):
        load(checkpoint, found)
    assert bool((found["model.w"] == 9).all())


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: facts.update(step="../../x"),
        lambda facts: facts["files"].update({"one.safetensors": {"bytes": "x", "sha256": "y"}}),
        lambda facts: facts["tensors"].update({"model.w": {"dtype": "F32", "shape": "32"}}),
    ],
)
def test_a_manifest_with_text_for_numbers_is_passed_over(change: Callable[[dict[str, Any]], object], tmp_path: Path) -> None:
    heard: list[str] = []
    crafted(tmp_path, change=change)
    assert newest(tmp_path, say=heard.append) == tmp_path / name_of(1)
    assert "manifest.json is not a checkpoint's manifest" in heard[0]
