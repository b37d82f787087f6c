"""Samples: prepared tokens on disk, mapped into memory by every rank and written by one.

A prepared folder holds data.json (the manifest) and, for each split, flat little-endian files: NAME.tokens (int32), NAME.trained (one byte a
token), NAME.spans (int64 pairs: offset and number of tokens of each sample) and, where rows hold several samples, NAME.packs (int32: the row of
each sample, the longest first). Windows of a document overlap, so spans may; a row that an epoch sees twice is stored once and has its spans twice.

The model reads the tokens of a sample but the last, which is only a target: the *length* of a sample is its number of tokens less one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pentamesh.errors import InputError
from pentamesh.run.data.order import Row, first_fit_decreasing, num_rows
from pentamesh.run.data.tally import Tally, total
from pentamesh.run.data.tokens import Cut, Encoded

__all__ = ["MANIFEST", "SCHEMA", "VERSION", "Prepared", "SampleWriter", "Samples", "check_replaceable", "open_prepared"]

SCHEMA, VERSION = "pentamesh.data", 5
MANIFEST = "data.json"
DTYPES = {"tokens": np.dtype("<i4"), "trained": np.dtype("?"), "spans": np.dtype("<i8"), "packs": np.dtype("<i4")}


@dataclass(frozen=True)
class Samples:
    """The samples of one split, mapped from disk.

    Shapes: tokens and trained [all tokens]; spans [num_samples, 2]; packs [num_samples], where rows hold several.
    Units: num_tokens counts what the model reads, num_trained the targets among the tokens that follow. No token is above largest_id.
    """

    tokens: np.ndarray
    trained: np.ndarray
    spans: np.ndarray
    num_tokens: int
    num_trained: int
    pad_id: int
    largest_id: int = 0
    packs: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.spans)

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""
        return num_rows(len(self), self.packs)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens that the model reads, by sample."""
        return self.spans[:, 1] - 1

    def length(self, row: Row) -> int:
        """Tokens that the model reads of the samples of a row."""
        return int(self.lengths[list(row)].sum())

    def within(self, vocab: int, model: str) -> Samples:
        """The same for a model of `vocab` tokens: where the tokenizer's padding is none of them, another token pads, which nobody reads either.

        Raises InputError where a token of the samples is none of the model's.
        """
        if self.largest_id >= vocab:
            what = f"the tokenizer gives token {self.largest_id}, and the vocabulary of {model} has {vocab:,} tokens"
            raise InputError(
                what, where="model.name", hint="give the tokenizer that belongs to the model, or a model with the tokenizer's vocabulary"
            )
        return self if self.pad_id < vocab else replace(self, pad_id=0)

    def sample(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of sample `i` and which of them are targets. Shapes: [n] int32, [n] bool; n is its length plus one."""
        offset, n = self.spans[i]
        return self.tokens[offset : offset + n], self.trained[offset : offset + n]


@dataclass(frozen=True)
class Prepared:
    """The data of a job as its ranks map it, and the report of how it was made (the manifest)."""

    folder: Path
    train: Samples
    held_out: Samples | None
    report: dict[str, Any]

    @property
    def train_digest(self) -> str:
        """Sixteen hex digits of the training samples in their order: what a place in them means."""
        return self.report["splits"]["train"]["digest"]


def check_replaceable(folder: Path) -> None:
    """Raises InputError for a folder that holds anything but prepared data, whole or torn: it may be the user's own and is not removed."""
    ours = {MANIFEST, *(f"{name}.{kind}" for name in ("train", "held_out") for kind in DTYPES)}
    others = [path.name for path in folder.iterdir() if path.name not in ours] if folder.is_dir() else [folder.name] if folder.exists() else []
    if others or folder.is_symlink():
        what = f"{folder} is needed for prepared data and is not ours to replace: it holds {', '.join(sorted(others)[:5]) or 'a link'}"
        raise InputError(what, where="logging.folder", hint="choose a folder of its own for the run")


def open_prepared(folder: Path) -> Prepared:
    """The prepared data in `folder`, mapped and not read. Raises InputError where the folder has none, or not all of it."""
    try:
        report = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if (report["schema"], report["version"]) != (SCHEMA, VERSION):
            raise InputError(f"{folder} is {report['schema']} version {report['version']}, not {SCHEMA} version {VERSION}")
        splits = {name: _mapped(folder, name, split, report["pad_id"]) for name, split in report["splits"].items()}
        return Prepared(folder, splits["train"], splits.get("held_out"), report)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder} holds no prepared data: {error}", hint="remove the folder: it is made again from the files of the job") from error


def _mapped(folder: Path, name: str, split: dict[str, Any], pad_id: int) -> Samples:
    shapes = {"tokens": (split["stored_tokens"],), "trained": (split["stored_tokens"],), "spans": (split["samples"], 2)}
    shapes |= {"packs": (split["samples"],)} if "packs" in split else {}
    arrays = {}
    for kind, shape in shapes.items():
        dtype = DTYPES[kind]
        path = folder / f"{name}.{kind}"
        if path.stat().st_size != int(np.prod(shape)) * dtype.itemsize:
            raise ValueError(f"{path.name} has {path.stat().st_size} bytes, not those of {shape} {dtype}")
        arrays[kind] = np.memmap(path, dtype, mode="r", shape=shape)
    return Samples(**arrays, num_tokens=split["tokens"], num_trained=split["trained_tokens"], pad_id=pad_id, largest_id=split["largest_id"])


class SampleWriter:
    """Appends the rows of one split to its files, each once; its samples are spans of them, tallied by source."""

    def __init__(self, folder: Path, name: str, tallies: Sequence[Tally]) -> None:
        self._paths = {kind: folder / f"{name}.{kind}" for kind in DTYPES}
        self._files = {kind: self._paths[kind].open("wb") for kind in ("tokens", "trained")}
        self._tallies = tallies
        self._digest = hashlib.blake2b(digest_size=8)
        self._stored = self._largest_id = 0

    def drop(self, source: int, reason: str) -> None:
        """Count a row that is not used."""
        self._tallies[source].drop(reason)

    def add(self, source: int, row: Encoded, cut: Cut) -> None:
        """Store a row, or count it as dropped."""
        if cut.dropped:
            self.drop(source, cut.dropped)
            return
        for kind, values in (("tokens", row.ids), ("trained", row.trained)):
            content = values.astype(DTYPES[kind]).tobytes()
            self._digest.update(content)
            self._files[kind].write(content)
        self._tallies[source].add(row, cut, self._stored)
        self._stored += len(row.ids)
        self._largest_id = max(self._largest_id, int(row.ids.max()))

    def close(self, pack_to: int | None = None) -> dict[str, Any]:
        """Finish the files, with the samples packed into rows of so many tokens where that is asked. Returns what the manifest says of them; samples
        of the same digest are the same, wherever their rows came from."""
        for file in self._files.values():
            file.close()
        spans, counts = zip(*(tally.close() for tally in self._tallies), strict=True)
        seen = np.concatenate(spans)
        self._keep("spans", seen)
        packed = self._packed(seen[:, 1] - 1, pack_to) if pack_to is not None and len(seen) else {}
        stored = {"stored_tokens": self._stored, "largest_id": self._largest_id}
        return {**total(counts), **stored, **packed, "digest": self._digest.hexdigest(), "sources": list(counts)}

    def _packed(self, lengths: np.ndarray, pack_to: int) -> dict[str, int]:
        packs = first_fit_decreasing(np.sort(lengths)[::-1], pack_to)
        self._keep("packs", packs)
        return {"packs": num_rows(len(packs), packs)}

    def _keep(self, kind: str, values: np.ndarray) -> None:
        content = values.astype(DTYPES[kind]).tobytes()
        self._digest.update(content)
        self._paths[kind].write_bytes(content)
