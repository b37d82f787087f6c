"""The loss: the sum over trained tokens, to be divided once by the number of trained tokens of the whole global batch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pentamesh.run.data.batches import IGNORED, Micro

__all__ = ["token_loss_sum"]


def token_loss_sum(module: nn.Module, micro: Micro) -> torch.Tensor:
    """Sum of the cross-entropies of a micro-batch's trained tokens, in float32 (float64 for a float64 model).

    Shapes: `input_ids`, `labels` [batch, seq], labels already shifted. A micro-batch without trained tokens gives 0 with a connected graph,
    so that its rank takes part in every collective.
    """
    logits = module(input_ids=micro.input_ids, use_cache=False).logits
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return cross_entropy(logits.flatten(0, 1), micro.labels.flatten(), ignore_index=IGNORED, reduction="sum")
