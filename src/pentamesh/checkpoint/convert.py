"""Convert: a checkpoint written anew, in whole tensors and files of a size, so that nothing in it tells of the ranks that wrote it.

One process does it, tensor by tensor. What comes out is a checkpoint like any other: verified, loaded under any layout, resumed from and exported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from pentamesh.checkpoint.disk import check_room, write_text, writing
from pentamesh.checkpoint.finite import check_finite
from pentamesh.checkpoint.headers import DTYPES, dtype_name, grouped, weight_dtype, write_tensors
from pentamesh.checkpoint.manifest import MANIFEST, File, Manifest, TensorFacts, check_back, encloses, file_facts, misnamed, verify
from pentamesh.checkpoint.parts import Part, misfit, parts, whole
from pentamesh.errors import InputError, Problem

__all__ = ["FILE_BYTES", "convert"]

FILE_BYTES = 5_000_000_000
_WEIGHTS = "model."

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # dtype and whole shape by name


def convert(
    checkpoint: Path,
    target: Path,
    *,
    file_bytes: float = FILE_BYTES,
    weights_only: bool = False,
    dtype: str | None = None,
    written: Callable[[int], object] = lambda _: None,
) -> Path:
    """Write a published checkpoint to `target` in whole tensors, and return it; it is there when all of it is written and on disk.

    Files have at most `file_bytes`, or one tensor. `weights_only` leaves out optimizer and random state; then `dtype` casts the weights. All else is
    bit for bit what it was, the facts too, with `converted_from` beside them. At most one tensor is in memory; `written` hears the bytes of each.

    Raises InputError for a checkpoint that is not whole, a target that is there, or too little room; RunFailed for weights not finite in `dtype`.
    """
    if dtype is not None and not weights_only:
        what = f"dtype = {dtype} with the state of the optimizer, which goes with weights as they are"
        raise InputError(what, where="--dtype", hint="add --weights-only, or leave --dtype out")
    _refuse([*verify(checkpoint), *_occupied(target), *encloses(checkpoint, target)])
    manifest = Manifest.read(checkpoint)
    _refuse(list(misnamed(target, manifest.step)))
    pieces = parts(checkpoint / name for name in sorted(manifest.files))
    _refuse([problem for name, facts in manifest.tensors.items() for problem in misfit(name, facts, pieces.get(name, []))])
    tensors = _converted(manifest, weights_only, weight_dtype(dtype) if dtype is not None else None)
    if not tensors:
        raise InputError(f"{checkpoint.name} holds no weights", where=str(checkpoint))
    check_room(target.parent, sum(math.prod(shape) * to.itemsize for to, shape in tensors.values()))
    with writing(target) as partial:
        files = _write(partial, tensors, pieces, file_bytes, written, checkpoint)
        described = {name: TensorFacts(dtype_name(to), shape) for name, (to, shape) in tensors.items()}
        write_text(partial / MANIFEST, Manifest(manifest.step, _facts(checkpoint, manifest, weights_only), described, files).text())
    return target


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise InputError(*problems)


def _occupied(target: Path) -> Iterator[Problem]:
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        yield Problem(f"{target.name} is there already and is not overwritten", str(target), "name a folder that does not exist yet")


def _converted(manifest: Manifest, weights_only: bool, dtype: torch.dtype | None) -> Shapes:
    """What will be written, by name."""
    kept = {name: facts for name, facts in manifest.tensors.items() if not weights_only or name.startswith(_WEIGHTS)}
    return {name: (_cast(DTYPES[facts.dtype], dtype), facts.shape) for name, facts in kept.items()}


def _cast(was: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and was.is_floating_point else was


def _facts(checkpoint: Path, manifest: Manifest, weights_only: bool) -> dict[str, Any]:
    origin = {"folder": checkpoint.name, "manifest_sha256": file_facts(checkpoint / MANIFEST).sha256, "weights_only": weights_only}
    return manifest.facts | {"converted_from": origin}


def _write(
    partial: Path, tensors: Shapes, pieces: dict[str, list[Part]], file_bytes: float, written: Callable[[int], object], origin: Path
) -> dict[str, File]:
    """Write the tensors, and return what lies in each file, which was read back."""

    def read(name: str) -> torch.Tensor:
        dtype, shape = tensors[name]
        found = whole(pieces.get(name, []), shape, dtype)
        if any(piece.entry.torch_dtype != dtype for piece in pieces.get(name, [])):
            check_finite(found, name, origin)
        written(found.nbytes)
        return found

    groups, files = list(grouped(tensors, file_bytes)), {}
    for number, names in enumerate(groups, 1):
        path = partial / f"whole-{number:05d}-of-{len(groups):05d}.safetensors"
        files[path.name] = write_tensors(path, {name: tensors[name] for name in names}, map(read, names))
        check_back(path, files[path.name])
    return files
