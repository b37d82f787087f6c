"""Held-out loss: the mean over trained tokens of rows that are never trained on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from pentamesh.run.data.batches import held_out_batches
from pentamesh.run.data.samples import Samples
from pentamesh.run.loss import token_loss_sum
from pentamesh.run.step import TOKEN_AXES
from pentamesh.run.world import World

__all__ = ["HeldOut", "held_out"]


@dataclass(frozen=True)
class HeldOut:
    """Mean loss per trained token over `num_tokens` of them."""

    loss: float
    num_tokens: int


@torch.no_grad()
def held_out(module: nn.Module, samples: Samples, micro_batch: int, world: World) -> HeldOut:
    """The held-out loss of the whole set; every rank computes its share, in as many micro-batches as every other."""
    was_training = module.training
    module.eval()
    loss_sum, num_tokens = 0.0, 0
    for micro in held_out_batches(samples, micro_batch, world.data_rank, world.data_degree):
        micro = micro.to(world.device)
        loss_sum += float(token_loss_sum(module, micro))
        num_tokens += micro.num_trained
    module.train(was_training)
    total_loss, total_tokens = world.sum([loss_sum, float(num_tokens)], TOKEN_AXES)
    return HeldOut(total_loss / max(1.0, total_tokens), int(total_tokens))
