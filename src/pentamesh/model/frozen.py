"""Frozen: which parameters of a model training leaves as they are, by patterns of their names."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from pentamesh.errors import InputError, Problem
from pentamesh.model.spec import ModelSpec

__all__ = ["frozen"]


def frozen(model: ModelSpec, patterns: Sequence[str]) -> ModelSpec:
    """The model with every parameter frozen that one of `patterns` matches, as a shell would match files.

    A tensor of two tied names is one: it is frozen under either, and `notes` says so. Raises InputError for patterns that match nothing, and where
    nothing is left to train.
    """
    if not patterns:
        return model
    matched = {t.name for t in model.tensors if any(fnmatchcase(t.name, pattern) for pattern in patterns)}
    if problems := [*_unmatched(model, patterns)]:
        raise InputError(*problems)
    owners = {t.tied_to or t.name for t in model.tensors if t.name in matched}
    if all(t.name in owners for t in model.parameters):
        what = f"{', '.join(patterns)} freezes every parameter of {model.name}: nothing is left to train"
        raise InputError(what, where="training.freeze", hint="freeze less")
    tensors = tuple(replace(t, trained=(t.tied_to or t.name) not in owners) for t in model.tensors)
    # A name that no pattern has is frozen with the one that it is tied to.
    ties = {t.name: t.tied_to for t in model.tensors if t.tied_to in owners}
    said = (f"{name} and {owner} are one tensor: it is frozen" for name, owner in ties.items() if name not in matched or owner not in matched)
    return replace(model, tensors=tensors, notes=(*model.notes, *said))


def _unmatched(model: ModelSpec, patterns: Sequence[str]) -> Iterator[Problem]:
    for pattern in patterns:
        if not any(fnmatchcase(t.name, pattern) for t in model.tensors):
            yield Problem(f"no parameter of {model.name} is called {pattern}", "training.freeze", _nearest(model, pattern))


def _nearest(model: ModelSpec, pattern: str) -> str:
    """Names that it may have meant: of parameters, of modules whose parameters all are, and of their last parts in any block."""
    names = [t.name for t in model.tensors]
    modules = [f"{name.rpartition('.')[0]}.*" for name in names]
    parts = [f"*{part}*" for name in names for part in name.split(".")[-3:-1] if not part.isdecimal()]
    near = difflib.get_close_matches(pattern, dict.fromkeys((*names, *modules, *parts)), n=3, cutoff=0.4)
    return f"near it are {', '.join(near)}" if near else f"it has {', '.join(names[:3])}, ..."
