"""Tensor and sequence parallel: what crosses the borders of a block, on Hugging Face's own modules.

Every rank of the tensor axis holds the heads, columns or rows that `split` gives it, so a module computes its own part as it stands. What is
left to do lies at the borders, once for each whatever number of projections lies between, and follows from the table: a sublayer whose
projections are cut along their output is entered from the residual stream; a projection whose input is cut leaves a partial sum, which goes
back onto the stream. Sequence parallel cuts the stream itself between blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pentamesh.layout.mesh import Layout
from pentamesh.layout.rules import cutting_axes, partial_axes
from pentamesh.layout.split import split
from pentamesh.model.dims import TensorSpec
from pentamesh.model.roles import Role
from pentamesh.model.spec import ModelSpec
from pentamesh.run.world import World

__all__ = ["ATTENTION", "cross_borders", "cut", "sum_partial_gradients", "vocabulary_loss_sum"]

AXIS = ("tp",)
# Causal attention without a mask: transformers would make one as long as the stream, which sequence parallel has cut.
ATTENTION = "pentamesh_causal"
ALL_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_attention_forward)


def cut(built: nn.Module, model: ModelSpec, layout: Layout, world: World) -> None:
    """Give every parameter, still without storage, the shape that this rank works with."""
    for tensor in model.parameters:
        whole = built.get_parameter(tensor.name)
        shape = split(tensor, Role.USE, layout).local_shape(world.rank)
        _set(built, tensor.name, nn.Parameter(torch.empty(shape, dtype=whole.dtype, device="meta")))
    for tensor in model.tensors:
        if tensor.tied_to is not None:
            _set(built, tensor.name, built.get_parameter(tensor.tied_to))


def cross_borders(built: nn.Module, model: ModelSpec, layout: Layout, world: World) -> None:
    """Hook what crosses onto the modules at the borders."""
    borders = _Borders(world.group(AXIS), layout.sequence_parallel)
    for path in _entered(model, layout):
        built.get_submodule(path).register_forward_pre_hook(borders.enter, with_kwargs=True)
    for tensor in model.tensors:
        module = built.get_submodule(_module(tensor))
        if tensor.kind == "matmul" and _is_cut(tensor, 1, layout):
            if module._parameters.get("bias") is not None:
                module.forward = MethodType(_without_bias, module)
            module.register_forward_hook(borders.leave)
        elif tensor.kind == "lookup" and _is_cut(tensor, 0, layout):
            rows = _Rows(*split(tensor, Role.USE, layout).intervals(world.rank, 0)[0])
            rows.localise(module)
            module.register_forward_pre_hook(rows.before)
            module.register_forward_hook(rows.after)
            module.register_forward_hook(borders.leave)


def _set(built: nn.Module, name: str, parameter: torch.Tensor) -> None:
    path, _, own = name.rpartition(".")
    built.get_submodule(path)._parameters[own] = parameter  # pyright: ignore[reportArgumentType]


def _module(tensor: TensorSpec) -> str:
    return tensor.name.rpartition(".")[0]


def _is_cut(tensor: TensorSpec, position: int, layout: Layout) -> bool:
    return "tp" in cutting_axes(tensor, position, Role.USE, layout)


def _entered(model: ModelSpec, layout: Layout) -> list[str]:
    """The modules that read the residual stream for projections that are cut along their output: the sublayers, and the head."""
    heads = (_module(t) for t in model.tensors if t.kind == "matmul" and _is_cut(t, 0, layout))
    return list(dict.fromkeys(path.rpartition(".")[0] or path for path in heads))


# Moves of the stream


@dataclass(frozen=True)
class _Borders:
    """How the stream is entered from and left onto: copied and summed, or gathered and scattered along the sequence."""

    group: dist.ProcessGroup
    sequence: bool

    def enter(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        moves = ("gather", "scatter") if self.sequence else ("copy", "sum")
        if args:
            return (_Cross.apply(args[0], *moves, self.group), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": _Cross.apply(kwargs["hidden_states"], *moves, self.group)}

    def leave(self, module: nn.Module, _args: object, output: torch.Tensor) -> torch.Tensor:
        moves = ("scatter", "gather") if self.sequence else ("sum", "copy")
        stream = _Cross.apply(output, *moves, self.group)
        bias = module._parameters.get("bias")
        return stream if bias is None else stream + bias.to(stream.dtype)


class _Cross(torch.autograd.Function):
    """One move of the stream in forward, and its mirror image in backward."""

    @staticmethod
    def forward(ctx: Any, stream: torch.Tensor, forward: str, backward: str, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.mirror, ctx.group = backward, group
        return _MOVES[forward](stream, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _MOVES[ctx.mirror](gradient, ctx.group), None, None, None


def _sum(stream: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = stream.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gather(stream: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    mine = stream.transpose(0, 1).contiguous()
    whole = mine.new_empty((mine.shape[0] * group.size(), *mine.shape[1:]))
    dist.all_gather_single(whole, mine, group=group)
    return whole.transpose(0, 1).contiguous()


def _scatter(stream: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    whole = stream.transpose(0, 1).contiguous()
    mine = whole.new_empty((whole.shape[0] // group.size(), *whole.shape[1:]))
    dist.reduce_scatter_single(mine, whole, group=group)
    return mine.transpose(0, 1).contiguous()


_MOVES = {"copy": lambda stream, _group: stream.view_as(stream), "sum": _sum, "gather": _gather, "scatter": _scatter}


def _without_bias(module: nn.Linear, stream: torch.Tensor) -> torch.Tensor:
    """A projection's partial sum; the bias belongs to the whole sum, and is added there."""
    return nn.functional.linear(stream, module.weight)


@dataclass
class _Rows:
    """The rows of the vocabulary that this rank looks up; other tokens give zero, and the sum over ranks gives each its row."""

    low: int
    count: int
    foreign: torch.Tensor | None = None

    def localise(self, module: nn.Module) -> None:
        """Say which of these rows, if any, is the padding's."""
        padding = getattr(module, "padding_idx", None)
        if padding is not None:
            module.padding_idx = padding - self.low if self.low <= padding < self.low + self.count else None  # pyright: ignore

    def before(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[torch.Tensor]:
        local = args[0] - self.low
        self.foreign = (local < 0) | (local >= self.count)
        return (local.masked_fill(self.foreign, 0),)

    def after(self, _module: nn.Module, _args: object, output: torch.Tensor) -> torch.Tensor:
        foreign, self.foreign = self.foreign, None
        return output.masked_fill(foreign.unsqueeze(-1), 0.0) if foreign is not None else output


# Gradients and loss


def sum_partial_gradients(parameters: dict[str, torch.Tensor], model: ModelSpec, world: World) -> None:
    """Sum over tensor ranks, in place and as one buffer, the gradients of which each has a part: those of what all hold and each applies to
    its own heads or tokens (`layout.rules.partial_axes`). Collective over the tensor axis."""
    layout = world.layout
    partial = [t for t in model.parameters if "tp" in partial_axes(t, layout)]
    if layout.mesh.tp == 1 or not partial:
        return
    sizes = [split(t, Role.STATE, layout).max_local_numel for t in partial]  # the same on every rank, however uneven the cut
    grads = [_local_gradient(parameters[t.name]) for t in partial]
    buffer = grads[0].new_zeros(sum(sizes))
    places = [place[: grad.numel()].view_as(grad) for place, grad in zip(buffer.split(sizes), grads, strict=True)]
    torch._foreach_copy_(places, grads)
    with world.bookkeeping():
        dist.all_reduce(buffer, group=world.group(AXIS))
    torch._foreach_copy_(grads, places)


def _local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    grad: Any = parameter.grad
    return grad.to_local() if hasattr(grad, "to_local") else grad


def vocabulary_loss_sum(logits: torch.Tensor, labels: torch.Tensor, ignored: int, model: ModelSpec, world: World) -> torch.Tensor:
    """Sum of the cross-entropies of the labels that are not `ignored`, where each tensor rank has the logits of its part of the vocabulary.

    Shapes: logits [tokens, local vocabulary], labels [tokens]. No rank ever holds the whole logits; three numbers a token are summed.
    """
    head = next(t for t in model.tensors if t.kind == "matmul" and not t.unit)
    low, count = split(head, Role.USE, world.layout).intervals(world.rank, 0)[0]
    return _VocabularyLoss.apply(logits, labels, ignored, low, count, world.group(AXIS))


class _VocabularyLoss(torch.autograd.Function):
    """log(sum exp(logits)) - logit of the label, over a vocabulary that is cut; backward is softmax less one at the label."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, ignored: int, low: int, count: int, group: dist.ProcessGroup) -> torch.Tensor:
        floor = torch.finfo(logits.dtype).min
        largest = logits.amax(-1) if count else logits.new_full(logits.shape[:1], floor)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        exps = (logits - largest.unsqueeze(-1)).exp_()
        mine = (labels >= low) & (labels < low + count)
        index = (labels - low).where(mine, 0).unsqueeze(-1)
        picked = logits.gather(-1, index).squeeze(-1).where(mine, 0.0) if count else torch.zeros_like(largest)
        sums = torch.stack([exps.sum(-1), picked])
        dist.all_reduce(sums, group=group)
        trained = labels != ignored
        ctx.save_for_backward(exps.div_(sums[0].unsqueeze(-1)), index, mine & trained, trained)
        return ((sums[0].log() + largest - sums[1]) * trained).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        softmax, index, mine, trained = ctx.saved_tensors
        found = softmax * (trained * gradient).unsqueeze(-1)
        if found.shape[-1]:
            found.scatter_add_(-1, index, -(mine * gradient).unsqueeze(-1).to(found.dtype))
        return found, None, None, None, None, None
