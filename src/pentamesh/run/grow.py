"""Grow: a model folder with new tokens, as the folder that a run trains from - its tokenizer with them, its embedding and head with their rows.

A new row is the mean of the rows of all tokens that there were: what the model knows of a token is nothing, and the mean neither is louder than
what it has learned nor changes the odds among it. The rows are made once, by one process, and are therefore those of any layout.
Source: Hewitt, Initializing New Word Embeddings for Pretrained Language Models (2021); transformers' `resize_token_embeddings(mean_resizing=True)`
draws them from a narrow normal distribution around it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AddedToken, PreTrainedTokenizerBase

from pentamesh.checkpoint.disk import check_room, write_text
from pentamesh.checkpoint.export import COMPANIONS, PASSED_ON, RECORD, copy_companions
from pentamesh.checkpoint.headers import write_tensors
from pentamesh.checkpoint.weights import INDEX, SINGLE, Stored, Weights
from pentamesh.errors import InputError
from pentamesh.model.files import pieces
from pentamesh.model.read import read_model
from pentamesh.model.vocabulary import WHERE, existing
from pentamesh.run.made import made_once

__all__ = ["grown_folder", "with_tokens"]

# Rows of which the mean is taken at a time.
ROWS_AT_ONCE = 4096


def with_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> list[int]:
    """Add `tokens` as special ones, so that text is split around each, and return their ids. Raises InputError for those that it has."""
    if not tokens:
        return []
    ids = tokenizer.get_vocab()
    if problems := [*existing(tokens, lambda text: ids[text] if text in ids else _learned(tokenizer, text))]:
        raise InputError(*problems)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens], special_tokens=True)
    ids = tokenizer.get_vocab()
    return [ids[token] for token in tokens]


def _learned(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    """The id of the one token that `text` is made of already, however the vocabulary spells it."""
    found = tokenizer.encode(text, add_special_tokens=False)
    whole = len(found) == 1 and tokenizer.decode(found, clean_up_tokenization_spaces=False) == text
    return found[0] if whole else None


def grown_folder(source: Path, tokens: Sequence[str], folder: Path, tokenizer_of: Callable[[Path], PreTrainedTokenizerBase]) -> Path:
    """The folder `source` with `tokens`, made now or found at `folder`; it appears at once, whole. Raises InputError.

    Files of weights that do not change are linked where the disk allows it, else copied.
    """
    record = {"schema": "pentamesh.grown", "version": 1, "model": str(source), "tokens": list(tokens), "files": _files(source)}
    return made_once(folder, "the model with its new tokens", record, lambda partial: _write(source, tokens, partial, tokenizer_of(source)))


def _files(source: Path) -> dict[str, list[int]]:
    """Size and time of every file that decides the content, by its name in the folder: weights, and what goes along with them."""
    found = {path for pattern in ("*.safetensors", "*.json", "*.model", *COMPANIONS) for path in source.glob(pattern) if path.is_file()}
    kept = sorted(found - {source / RECORD})
    return {path.relative_to(source).as_posix(): [path.stat().st_size, path.stat().st_mtime_ns] for path in kept}


def _write(source: Path, tokens: Sequence[str], partial: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = with_tokens(tokenizer, tokens)
    tokenizer.save_pretrained(partial)
    copy_companions(partial, source, PASSED_ON)
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    rows = max(read_model(str(source)).vocab, max(ids) + 1)
    write_text(partial / "config.json", json.dumps(config | {"vocab_size": rows}, indent=2) + "\n")
    if (source / SINGLE).exists() or (source / INDEX).exists():
        _write_weights(source, partial, ids, rows)


def _write_weights(source: Path, partial: Path, ids: Sequence[int], rows: int) -> None:
    model, weights = read_model(str(source)), Weights.open(source)
    if not model.is_described:
        raise InputError(f"new tokens need a model of a described family, and {model.name} is of none", where=WHERE, hint="leave them out")
    weights.check(model)
    growing = {piece.name for t in model.tensors if t.dims[0].name == "vocab" for piece in pieces(t)} & weights.tensors.keys()
    files = {stored.path for stored in weights.tensors.values()}
    changed = {weights.tensors[name].path for name in growing}
    more = sum((rows - weights.tensors[name].entry.shape[0]) * _row_bytes(weights.tensors[name]) for name in growing)
    check_room(partial, more + sum(path.stat().st_size for path in changed))
    for path in sorted(files):
        target = partial / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path in changed:
            within = {name: stored for name, stored in weights.tensors.items() if stored.path == path}
            _rewrite(target, within, growing, ids, rows)
        else:
            _share(path, target)
    if (source / INDEX).exists():
        index = json.loads((source / INDEX).read_text())
        if isinstance(index.get("metadata"), dict) and "total_size" in index["metadata"]:
            index["metadata"]["total_size"] += more
        write_text(partial / INDEX, json.dumps(index, indent=2) + "\n")


def _row_bytes(stored: Stored) -> int:
    return (stored.entry.end - stored.entry.begin) // max(1, stored.entry.shape[0])


def _share(path: Path, target: Path) -> None:
    try:
        os.link(path.resolve(), target)
    except OSError:
        shutil.copyfile(path, target)


def _rewrite(target: Path, within: dict[str, Stored], growing: set[str], ids: Sequence[int], rows: int) -> None:
    """The tensors of one file, those in `growing` with `rows` rows; one of them is in memory at a time."""
    names = sorted(within, key=lambda name: (-within[name].entry.torch_dtype.itemsize, within[name].entry.begin))
    shapes = {name: within[name].entry.shape for name in names}
    shapes |= {name: (rows, *shapes[name][1:]) for name in names if name in growing}

    def tensors() -> Iterator[torch.Tensor]:
        for name in names:
            with safe_open(within[name].path, framework="pt") as file:
                there = file.get_tensor(name)
            yield _with_rows(there, ids, rows) if name in growing else there

    write_tensors(target, {name: (within[name].entry.torch_dtype, shapes[name]) for name in names}, tensors())


def _with_rows(there: torch.Tensor, ids: Sequence[int], rows: int) -> torch.Tensor:
    """A tensor of `rows` rows, of which those of `ids`, and all that were not there, are the mean of those of all tokens before them."""
    whole = there.new_empty((rows, *there.shape[1:]))
    whole[: len(there)] = there
    mean = _mean(there[: min(ids)])
    whole[len(there) :] = mean
    whole[list(ids)] = mean
    return whole


def _mean(rows: torch.Tensor) -> torch.Tensor:
    total = sum((some.double().sum(0) for some in rows.split(ROWS_AT_ONCE)), torch.zeros(rows.shape[1:], dtype=torch.float64))
    return (total / len(rows)).to(rows.dtype)
