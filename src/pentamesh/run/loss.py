"""The loss: the sum over trained tokens, to be divided once by the number of trained tokens of the whole global batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pentamesh.layout.mesh import Layout
from pentamesh.model.spec import ModelSpec
from pentamesh.run.data.batches import IGNORED, Micro
from pentamesh.run.head import Targets

__all__ = ["weighted_loss"]


def weighted_loss(module: nn.Module, micro: Micro, model: ModelSpec, layout: Layout, weight: float = 1.0) -> torch.Tensor:
    """`weight` times the sum of the cross-entropies of a micro-batch's trained tokens, in float32 (float64 for a float64 model).

    Shapes: `input_ids`, `labels` [batch, seq], labels already shifted. A micro-batch without trained tokens gives 0 with a connected graph,
    so that its rank takes part in every collective. What no family describes has logits that only its own code knows, all at once.
    """
    given: dict[str, Any] = {"input_ids": micro.input_ids, "position_ids": None, "use_cache": False}
    if micro.packed is not None:
        given |= {"position_ids": micro.packed.positions, "documents": micro.packed.bounds}
    elif layout.sequence_parallel:  # the length of a stream that is cut no longer says at which positions its tokens stand
        given["position_ids"] = torch.arange(micro.input_ids.shape[1], device=micro.input_ids.device).unsqueeze(0)
    if model.is_described:
        return module(**given, labels=Targets(micro.labels.flatten(), micro.num_trained, weight)).loss
    assert micro.packed is None, "attention that only its own code knows would look across samples"
    logits = module(**given).logits.flatten(0, 1)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return weight * cross_entropy(logits, micro.labels.flatten(), ignore_index=IGNORED, reduction="sum")
