"""Catalogue: the sizes of published models, known without a network. Configs are in `catalogue.json`, found by full or short name here; the
tensors of those that no family describes are in `facts/`, one file a model, read when asked for (`pentamesh.model.traced`)."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

__all__ = ["Entry", "Found", "entries", "find", "nearest"]


@dataclass(frozen=True)
class Entry:
    """A published model.

    variants     other published models of the same sizes (instruction-tuned ones, mostly)
    unpublished  names that people use and no repository has
    config       its config.json, of described families in transformers 5's spelling; token ids and dtype only where the source has them
    note         what of the published model is not in it
    """

    id: str
    variants: tuple[str, ...]
    unpublished: tuple[str, ...]
    num_parameters: int
    licence: str
    source: str
    config: dict[str, Any]
    note: str = ""


class Found(NamedTuple):
    """The entry that a name means, the published name it stands for, and what should be said about that."""

    entry: Entry
    name: str
    notes: tuple[str, ...] = ()


@cache
def entries() -> tuple[Entry, ...]:
    """Every model of the catalogue."""
    found = json.loads((files("pentamesh.model") / "catalogue.json").read_text(encoding="utf-8"))["models"]
    return tuple(Entry(**model | {key: tuple(model[key]) for key in ("variants", "unpublished")}) for model in found)


def find(name: str) -> Found | None:
    """What `name` means: a hub id in any case, or its last part (`llama-3.1-8b`); None where the catalogue does not know it."""
    return _by_name().get(_plain(name))


def nearest(name: str) -> str:
    """A hint at the names close to one that is not known, or at what the catalogue has."""
    near = difflib.get_close_matches(_plain(name), _by_name(), n=3, cutoff=0.75)
    ids = list(dict.fromkeys(_by_name()[key].name for key in near))
    return f"did you mean {' or '.join(ids)}?" if ids else "give a folder with a config.json, a hub id, or a catalogue name like `llama-3.1-8b`"


@cache
def _by_name() -> dict[str, Found]:
    found: dict[str, Found] = {}
    for entry in entries():
        for meant, name in _meant(entry):
            for spelling in _spellings(name):
                found.setdefault(spelling, meant)
    return found


def _meant(entry: Entry) -> Iterator[tuple[Found, str]]:
    """What each name of an entry stands for."""
    yield Found(entry, entry.id), entry.id
    for name in entry.variants:
        yield Found(entry, name, (f"{name} has the sizes of {entry.id}; other values of its config.json may differ",)), name
    for name in entry.unpublished:
        yield Found(entry, entry.id, (f"{name} is not published: {entry.id} is meant",)), name


def _spellings(name: str) -> tuple[str, ...]:
    """A hub id and the short forms people use of it: without organisation, without `Meta-` in front or `-hf` behind."""
    short = name.rpartition("/")[2]
    bare = re.sub(r"^meta-|-hf$", "", short, flags=re.IGNORECASE)
    return tuple(dict.fromkeys(map(_plain, (name, short, bare))))


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name.lower())
