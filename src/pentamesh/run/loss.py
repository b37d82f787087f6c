"""The loss: the sum over trained tokens, to be divided once by the number of trained tokens of the whole global batch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pentamesh.layout.mesh import Layout
from pentamesh.model.spec import ModelSpec
from pentamesh.run.data.batches import IGNORED, Micro
from pentamesh.run.vocabulary import vocabulary_loss_sum
from pentamesh.run.world import World

__all__ = ["logits", "token_loss_sum"]


def logits(module: nn.Module, input_ids: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The logits of a micro-batch; under tensor parallel those of this rank's part of the vocabulary.

    Shapes: input_ids [batch, seq] of whole sequences. Where the stream is cut, its length no longer says at which positions tokens stand.
    """
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0) if layout.sequence_parallel else None
    return module(input_ids=input_ids, position_ids=positions, use_cache=False).logits


def token_loss_sum(module: nn.Module, micro: Micro, model: ModelSpec, world: World) -> torch.Tensor:
    """Sum of the cross-entropies of a micro-batch's trained tokens, in float32 (float64 for a float64 model).

    Shapes: `input_ids`, `labels` [batch, seq], labels already shifted. A micro-batch without trained tokens gives 0 with a connected graph,
    so that its rank takes part in every collective.
    """
    found = logits(module, micro.input_ids, world.layout).flatten(0, 1)
    found = found if found.dtype == torch.float64 else found.float()
    labels = micro.labels.flatten()
    if world.layout.mesh.tp > 1:
        return vocabulary_loss_sum(found, labels, IGNORED, model, world)
    return cross_entropy(found, labels, ignore_index=IGNORED, reduction="sum")
