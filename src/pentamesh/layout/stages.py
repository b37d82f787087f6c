"""Stages: what one pipeline stage holds of a model - its run of blocks, the embedding on the first, final norm and head on the last."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache

from pentamesh.model.dims import TensorSpec
from pentamesh.model.spec import ModelSpec

__all__ = ["on_stage", "stage_layers", "stage_root"]


def stage_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of every pipeline stage: as even as they go, the first stages one more (126 over 8: six of 16, two of 15)."""
    each, more = divmod(num_layers, num_stages)
    return tuple(each + (stage < more) for stage in range(num_stages))


def stage_root(model: ModelSpec, num_stages: int, stage: int) -> tuple[TensorSpec, ...]:
    """The parameters of the root that a stage holds; a tied embedding is on the first stage and, as its head, on the last."""
    if num_stages == 1:
        return model.units.get("", ())
    home = {"lookup": 0}
    return tuple(replace(t, tied_to=None) for t in model.tensors if not t.unit and stage == home.get(t.kind, num_stages - 1))


@lru_cache(maxsize=256)
def on_stage(model: ModelSpec, num_stages: int, stage: int) -> ModelSpec:
    """The part of a model that one stage holds, as a model of its own."""
    if num_stages == 1:
        return model
    blocks = [unit for unit in dict.fromkeys(t.unit for t in model.tensors) if unit]
    bounds = list(itertools.accumulate(stage_layers(len(blocks), num_stages), initial=0))
    units, root = set(blocks[bounds[stage] : bounds[stage + 1]]), {t.name: t for t in stage_root(model, num_stages, stage)}
    tensors = tuple(root.get(t.name, t) for t in model.tensors if t.unit in units or t.name in root)
    return replace(model, num_layers=stage_layers(model.num_layers, num_stages)[stage], tensors=tensors)
