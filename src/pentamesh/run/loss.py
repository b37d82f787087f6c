"""The loss: the sum over trained tokens, to be divided once by the number of trained tokens of the whole global batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pentamesh.model.spec import ModelSpec
from pentamesh.run.context import context_of
from pentamesh.run.data.batches import IGNORED, Micro
from pentamesh.run.head import Targets
from pentamesh.run.world import World

__all__ = ["weighted_loss"]


def weighted_loss(module: nn.Module, micro: Micro, model: ModelSpec, world: World, weight: float = 1.0) -> torch.Tensor:
    """`weight` times the sum of the cross-entropies of a micro-batch's trained tokens, in float32 (float64 for a float64 model).

    A micro-batch without trained tokens gives 0 with a connected graph, so that its rank takes part in every collective. What no family describes has
    logits that only its own code knows, all at once.
    """
    given: dict[str, Any] = {"input_ids": micro.input_ids, "position_ids": _position_ids(micro, world), "use_cache": False}
    if micro.bounds is not None:
        given["documents"] = micro.bounds
    if (context := context_of(world)) is not None:
        given["context"] = context
    if model.is_described:
        return module(**given, labels=Targets(micro.labels.flatten(), micro.num_trained, weight)).loss
    assert micro.bounds is None, "attention that only its own code knows would look across samples"
    logits = module(**given).logits.flatten(0, 1)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return weight * cross_entropy(logits, micro.labels.flatten(), ignore_index=IGNORED, reduction="sum")


def _position_ids(micro: Micro, world: World) -> torch.Tensor | None:
    """At which positions tokens stand, where the length of the stream does not say so: theirs are not the first, or tensor ranks cut it."""
    if micro.positions is None and world.layout.sequence_parallel:
        return torch.arange(micro.input_ids.shape[1], device=micro.input_ids.device).unsqueeze(0)
    return micro.positions
