"""Export: a published checkpoint as a Hugging Face folder, by one process, tensor by tensor.

No process group is needed: the shards of a checkpoint are safetensors whose headers say where each part lies in the whole, so a tensor of the files
- one expert's, where a checkpoint has those of a layer in one - is put together from parts, cast, written and forgotten. What came in as a Hugging
Face folder goes out as one: same names, dtypes and companions.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch

from pentamesh.checkpoint.disk import check_room, write_text, writing
from pentamesh.checkpoint.finite import check_finite
from pentamesh.checkpoint.headers import grouped, weight_dtype, write_tensors
from pentamesh.checkpoint.held import Portion, portions
from pentamesh.checkpoint.manifest import Manifest, encloses, is_of_step, verify
from pentamesh.checkpoint.parts import Part, fill, parts, unfilled
from pentamesh.checkpoint.weights import INDEX, SINGLE, Weights, inside
from pentamesh.errors import InputError, Problem
from pentamesh.model.dims import TensorSpec
from pentamesh.model.files import Piece, Region, overlap, pieces
from pentamesh.model.spec import ModelSpec

__all__ = ["COMPANIONS", "PASSED_ON", "RECORD", "copy_companions", "export"]

# What goes along whatever the tokenizer: how to generate, and what a licence asks to pass on.
PASSED_ON = ("generation_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*")
# Everything beside weights and config that `from_pretrained` of a model or tokenizer may read, and what a licence asks to pass on. Never code.
# Source: transformers, tokenization_utils_base and generation (their *_FILE names); saved tokenizers of the families we describe.
COMPANIONS = (
    *PASSED_ON,
    "tokenizer*.json",
    "tokenizer*.model*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates/*.jinja",
)
# The file by which we know a folder that we exported, and may replace; it says where the weights came from.
RECORD = "pentamesh.json"
_CONFIG = "config.json"


class Written(NamedTuple):
    """A tensor of an exported file: of which tensor of the model, which piece of it, and its dtype."""

    tensor: TensorSpec
    piece: Piece
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.piece.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def export(
    checkpoint: Path,
    model: ModelSpec,
    source: Path | None,
    target: Path,
    dtype: str | None = None,
    max_shard_bytes: float = 5e9,
    chat_template: str | None = None,
) -> Path:
    """Write the weights of a published checkpoint to `target` as a Hugging Face folder, and return it.

    `source` is the model folder that the run started from: its config, tokenizer, chat template and licence go along, and its dtypes are kept
    unless `dtype` names another. Where it has no weights the dtype is float32; without it the config is the model's own. A `chat_template` takes
    the place of the source's. At most one tensor of the files is in memory at a time. `target` may be absent, empty, or an earlier export, which is
    replaced when the new one is whole.

    Raises InputError when the checkpoint is not whole, lacks a tensor, or `target` holds something else; RunFailed for values not finite.
    """
    _refuse([*verify(checkpoint), *_occupied(target), *encloses(checkpoint, target)])
    manifest = Manifest.read(checkpoint)
    kept = parts(checkpoint / name for name in sorted(manifest.files))
    _refuse(list(_lacking(model, manifest, kept, checkpoint)))
    written = _written(model, source, dtype)
    check_room(target.parent, sum(found.nbytes for found in written.values()))
    with writing(target) as partial:
        _write_weights(partial, model, kept, written, max_shard_bytes)
        _write_config(partial, model, source, written, dtype)
        copy_companions(partial, source)
        if chat_template is not None:
            _write_template(partial, chat_template)
        _write_record(partial, manifest, model)
    return target


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise InputError(*problems)


def _occupied(target: Path) -> Iterator[Problem]:
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        yield Problem(f"{target.name} is a file or a link, not a folder to export to", str(target), "name a folder that does not exist yet")
    elif is_of_step(target.name):
        yield Problem(f"{target.name} is the name of a checkpoint, and a run would take the model for one", str(target), "use another name")
    elif target.is_dir() and any(target.iterdir()) and not (target / RECORD).is_file():
        hint = "name a folder that does not exist yet, or empty this one"
        yield Problem(f"{target.name} holds files that Pentamesh did not export; they are not overwritten", str(target), hint)


def _stored(tensor: TensorSpec) -> dict[str, Portion]:
    """By the names in the checkpoint, the parts of a tensor: one, or those that are fused in it."""
    return {f"model.{tensor.name}{portion.suffix}": portion for portion in portions(tensor)}


def _lacking(model: ModelSpec, manifest: Manifest, kept: dict[str, list[Part]], checkpoint: Path) -> Iterator[Problem]:
    for tensor, name, portion in ((t, *item) for t in (*model.parameters, *model.buffers) for item in _stored(t).items()):
        found, shape = manifest.tensors.get(name), list(portion.shape)
        if found is None:
            yield Problem(f"{tensor} is not in the checkpoint", str(checkpoint))
        elif found.shape != portion.shape:
            yield Problem(f"{tensor}{portion.suffix} should be {shape} and is {list(found.shape)}", str(checkpoint))
        else:
            yield from unfilled(f"{tensor}{portion.suffix}", portion.shape, kept.get(name, []))


def _written(model: ModelSpec, source: Path | None, dtype: str | None) -> dict[str, Written]:
    """What the files will hold, by the names there: in the dtype that is asked for, or the source's own, or float32. No cast of a model touches a
    buffer: it is in the source's, or in float32."""
    weights = None
    if dtype is None and _has_weights(source):
        weights = Weights.open(source)
        weights.check(model)
    asked = weight_dtype(dtype or "float32")
    found = {}
    for tensor in (*model.parameters, *model.buffers):
        for piece in pieces(tensor):
            kept = torch.float32 if tensor.kind == "buffer" else asked
            found[piece.name] = Written(tensor, piece, weights.tensors[piece.name].entry.torch_dtype if weights else kept)
    return found


def _has_weights(source: Path | None) -> TypeGuard[Path]:
    return source is not None and ((source / SINGLE).exists() or (source / INDEX).exists())


def _write_weights(partial: Path, model: ModelSpec, kept: dict[str, list[Part]], written: dict[str, Written], max_shard_bytes: float) -> None:
    """One file, or several with an index, named as transformers names them."""
    shapes = {name: (found.dtype, found.piece.shape) for name, found in written.items()}
    shards = list(grouped(shapes, max_shard_bytes))
    places: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        places |= dict.fromkeys(names, file)
        write_tensors(partial / file, {name: shapes[name] for name in names}, (_put_together(written[name], kept) for name in names))
    if len(shards) > 1:
        metadata = {"total_parameters": model.num_parameters, "total_size": sum(found.nbytes for found in written.values())}
        write_text(partial / INDEX, json.dumps({"metadata": metadata, "weight_map": dict(sorted(places.items()))}, indent=2) + "\n")


def _put_together(written: Written, kept: dict[str, list[Part]]) -> torch.Tensor:
    """A tensor of a file, put together from what a checkpoint has kept of it and cast. Raises RunFailed where it is not finite."""
    tensor, piece, dtype = written
    whole = torch.empty(piece.region.size, dtype=dtype)
    for name, portion in _stored(tensor).items():
        if common := overlap(piece.region, Region(portion.offset, portion.shape)):
            place = (slice(low - first, low - first + n) for low, first, n in zip(common.offset, piece.region.offset, common.size, strict=True))
            fill(whole[tuple(place)], kept[name], tuple(low - first for low, first in zip(common.offset, portion.offset, strict=True)))
    check_finite(whole, f"{tensor}" if piece.name == tensor.name else piece.name, kept[next(iter(_stored(tensor)))][0].path.parent)
    return whole.reshape(piece.shape)


def _write_config(partial: Path, model: ModelSpec, source: Path | None, written: dict[str, Written], dtype: str | None) -> None:
    """The source's config.json byte for byte; where its dtype is another now, or there is none, with the dtype that was written."""
    original = source / _CONFIG if source is not None else None
    if original is not None and dtype is None and _has_weights(source):
        shutil.copyfile(original, partial / _CONFIG)
        return
    config: dict[str, Any] = json.loads(original.read_text()) if original is not None else dict(model.config)
    spelling = "torch_dtype" if "torch_dtype" in config else "dtype"
    most = max({found.dtype for found in written.values()}, key=lambda d: sum(found.numel for found in written.values() if found.dtype == d))
    config |= {spelling: str(most).removeprefix("torch.")}
    write_text(partial / _CONFIG, json.dumps(config, indent=2) + "\n")


def copy_companions(partial: Path, source: Path | None, patterns: Iterable[str] = COMPANIONS) -> None:
    """Copy the files of `source` that match `patterns`. Raises InputError for one that leads out of it."""
    for path in (p for pattern in patterns for p in sorted(source.glob(pattern))) if source is not None else ():
        assert source is not None
        if not inside(path, source):
            raise InputError(f"{path.name} leads out of the folder", where=str(path), hint="put the file itself into the folder")
        if path.is_file():
            copy = partial / path.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)


def _write_template(partial: Path, chat_template: str) -> None:
    """The template in its own file, and no other beside it: loaders read those as well."""
    for other in (*partial.glob("chat_template*"), *partial.glob("additional_chat_templates/*")):
        other.unlink()
    write_text(partial / "chat_template.jinja", chat_template)
    config = partial / "tokenizer_config.json"
    if config.is_file():
        facts = json.loads(config.read_text(encoding="utf-8"))
        if facts.pop("chat_template", None) is not None:
            write_text(config, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")


def _write_record(partial: Path, manifest: Manifest, model: ModelSpec) -> None:
    record = {"schema": "pentamesh.export", "version": 1, "model": model.name, "step": manifest.step, "plan": manifest.facts.get("plan")}
    write_text(partial / RECORD, json.dumps(record, indent=2) + "\n")
