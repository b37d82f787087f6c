"""The head and its loss in one: from the stream to cross-entropies, piece by piece, so that no rank ever holds the logits of a whole batch.

A piece's logits become its losses, in the same memory their own gradients, and at once the gradients of the stream and of the head's weight, as far
as these have any: nothing of them waits for backward. Only tokens that are trained are computed. Under tensor parallel each rank has its part of the
vocabulary, in one piece of all tokens, and three numbers a token are summed over ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from pentamesh.layout.policy import tokens_at_once
from pentamesh.layout.split import split
from pentamesh.model.roles import Role
from pentamesh.model.spec import ModelSpec
from pentamesh.run.data.batches import IGNORED
from pentamesh.run.world import World

__all__ = ["Targets", "join_head_and_loss"]


@dataclass(frozen=True)
class Targets:
    """What a forward pass is told, as its `labels`: the next token of each, IGNORED where that is not trained; how many are; and by what each
    cross-entropy is multiplied.

    Shapes: labels [tokens].
    """

    labels: torch.Tensor
    num_trained: int
    weight: float


def join_head_and_loss(built: PreTrainedModel, model: ModelSpec, world: World) -> None:
    """Let the head keep the stream that it reads, and the model's loss function go on from there.

    Both run inside the model's own forward, where the weight is what its sharding or its casts show. The model then returns no logits.
    """
    spec = next(t for t in model.tensors if t.kind == "matmul" and not t.unit)
    low, count = split(spec, Role.USE, world.layout).intervals(world.rank, 0)[0]
    head: Any = built.get_output_embeddings()
    joint = _Joint(weakref.ref(head), _Part(low, count, world.group(("tp",)) if world.layout.mesh.tp > 1 else None, model.logit_cap))
    head.forward = joint.read
    built.loss_function = joint.loss


@dataclass(frozen=True)
class _Part:
    """The rows of the vocabulary that this rank has, with whom it shares the rest, and where logits saturate."""

    low: int
    count: int
    group: dist.ProcessGroup | None
    cap: float | None


@dataclass
class _Joint:
    """A head, which it does not keep alive, and the stream that it has read, until the loss takes it."""

    head: weakref.ref[nn.Module]
    part: _Part
    stream: torch.Tensor | None = None

    def read(self, stream: torch.Tensor) -> torch.Tensor:
        self.stream = stream
        return stream.new_empty(0)

    def loss(self, logits: torch.Tensor, labels: Targets, *_: object, **__: object) -> torch.Tensor:
        stream, self.stream = self.stream, None
        head = self.head()
        assert stream is not None
        assert head is not None
        trains = [torch.is_grad_enabled() and read.requires_grad for read in (stream, head.weight)]
        return _HeadLoss.apply(stream.flatten(0, 1), head.weight, labels, self.part, *trains)


class _HeadLoss(torch.autograd.Function):
    """weight * sum of (log(sum exp(logits)) - logit of the label) over trained tokens, where logits = stream @ head.T, or with a cap
    cap * tanh(stream @ head.T / cap)."""

    @staticmethod
    def forward(ctx: Any, stream: torch.Tensor, head: torch.Tensor, targets: Targets, part: _Part, passes: bool, trains: bool) -> torch.Tensor:
        wide = torch.float64 if stream.dtype == torch.float64 else torch.float32
        pieces, total = _pieces(targets, part, stream.device.type), torch.zeros((), dtype=wide, device=stream.device)
        ctx.dtype = head.dtype
        # Products of several pieces add up in full width.
        of_stream = torch.zeros_like(stream) if passes else stream.new_empty(0)
        of_head = torch.zeros_like(head, dtype=wide if len(pieces) > 1 else head.dtype) if trains else head.new_empty(0)
        for tokens in pieces:
            read = stream[tokens]
            logits = (read @ head.T).to(wide)
            shares = None
            if part.cap:
                shares = logits.div_(part.cap).tanh_()
                logits = shares * part.cap
            total += _losses_to_gradients(logits, targets.labels[tokens], targets.weight, part).sum()
            if passes or trains:
                if shares is not None:
                    logits.addcmul_(logits, shares.square_(), value=-1)
                gradient = logits.to(stream.dtype)
                del logits, shares
                if passes:
                    of_stream[tokens] = gradient @ head
                if trains:
                    _add_product(of_head, gradient.T, read)
                del gradient
        ctx.stream, ctx.head = of_stream if passes else None, of_head if trains else None
        return total.mul_(targets.weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        stream = None if ctx.stream is None else ctx.stream.mul_(gradient)
        head = None if ctx.head is None else ctx.head.mul_(gradient).to(ctx.dtype)
        ctx.stream = ctx.head = None
        return stream, head, None, None, None, None


def _pieces(targets: Targets, part: _Part, kind: str) -> Sequence[torch.Tensor | slice]:
    """The tokens of each piece: of those that are trained; all in one where ranks have to meet over each."""
    if part.group is not None:
        return (slice(None),)
    # Their number is known: on a GPU nobody waits for it.
    trained = torch.nonzero_static(targets.labels != IGNORED, size=targets.num_trained).squeeze(-1)
    return trained.split(tokens_at_once(part.count, kind)) if targets.num_trained else ()


def _losses_to_gradients(logits: torch.Tensor, labels: torch.Tensor, weight: float, part: _Part) -> torch.Tensor:
    """The cross-entropies of a piece; `logits` become their gradients, times `weight`.

    Shapes: logits [tokens, local vocabulary], labels [tokens].
    """
    largest = logits.amax(-1)
    if part.group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=part.group)
    trained, mine = labels != IGNORED, (labels >= part.low) & (labels < part.low + part.count)
    index = (labels - part.low).where(mine, 0).unsqueeze(-1)
    picked = logits.gather(-1, index).squeeze(-1).where(mine, 0.0)
    sums = torch.stack([logits.sub_(largest.unsqueeze(-1)).exp_().sum(-1), picked])
    if part.group is not None:
        dist.all_reduce(sums, group=part.group)
    each = trained.to(logits.dtype) * weight
    logits.mul_((each / sums[0]).unsqueeze(-1))
    logits.scatter_add_(-1, index, -(each * mine).unsqueeze(-1))
    return (sums[0].log() + largest - sums[1]) * trained


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right; what is narrower than the total is made and widened some rows at a time."""
    if total.dtype == right.dtype:
        total.addmm_(left, right)
        return
    rows = tokens_at_once(total.shape[1], total.device.type)
    for some, of in zip(total.split(rows), left.split(rows), strict=True):
        some += of @ right
