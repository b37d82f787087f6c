"""Vocabulary: the loss over logits of which each tensor rank has its part, the whole never in one place."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from pentamesh.layout.split import split
from pentamesh.model.roles import Role
from pentamesh.model.spec import ModelSpec
from pentamesh.run.world import World

__all__ = ["vocabulary_loss_sum"]


def vocabulary_loss_sum(logits: torch.Tensor, labels: torch.Tensor, ignored: int, model: ModelSpec, world: World) -> torch.Tensor:
    """Sum of the cross-entropies of the labels that are not `ignored`, where each tensor rank has the logits of its part of the vocabulary.

    Shapes: logits [tokens, local vocabulary], labels [tokens]. No rank ever holds the whole logits; three numbers a token are summed.
    """
    head = next(t for t in model.tensors if t.kind == "matmul" and not t.unit)
    low, count = split(head, Role.USE, world.layout).intervals(world.rank, 0)[0]
    return _VocabularyLoss.apply(logits, labels, ignored, low, count, world.group(("tp",)))


class _VocabularyLoss(torch.autograd.Function):
    """log(sum exp(logits)) - logit of the label, over a vocabulary that is cut; backward is softmax less one at the label."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, ignored: int, low: int, count: int, group: dist.ProcessGroup) -> torch.Tensor:
        largest = logits.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        exps = (logits - largest.unsqueeze(-1)).exp_()
        mine = (labels >= low) & (labels < low + count)
        index = (labels - low).where(mine, 0).unsqueeze(-1)
        picked = logits.gather(-1, index).squeeze(-1).where(mine, 0.0)
        sums = torch.stack([exps.sum(-1), picked])
        dist.all_reduce(sums, group=group)
        trained = labels != ignored
        ctx.save_for_backward(exps.div_(sums[0].unsqueeze(-1)), index, mine & trained, trained)
        return ((sums[0].log() + largest - sums[1]) * trained).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        softmax, index, mine, trained = ctx.saved_tensors
        found = softmax * (trained * gradient).unsqueeze(-1)
        found.scatter_add_(-1, index, -(mine * gradient).unsqueeze(-1).to(found.dtype))
        return found, None, None, None, None, None
