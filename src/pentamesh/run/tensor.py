"""Tensor and sequence parallel: what crosses the borders of a block, on Hugging Face's own modules.

Every rank of the tensor axis holds the heads, columns or rows that `split` gives it, so a module computes its own part as it stands. What is
left to do lies at the borders, once for each whatever number of projections lies between, and follows from the table: a sublayer whose
projections are cut along their output is entered from the residual stream; a projection whose input is cut leaves a partial sum, which goes
back onto the stream. Sequence parallel cuts the stream itself between blocks.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.pytorch_utils import Conv1D

from pentamesh.layout.mesh import Layout
from pentamesh.layout.rules import cutting_axes
from pentamesh.layout.split import split
from pentamesh.model.dims import TensorSpec
from pentamesh.model.roles import Role
from pentamesh.model.spec import ModelSpec
from pentamesh.run.world import World

__all__ = ["AXIS", "cross_borders", "cut"]

AXIS = ("tp",)
# The operators that torch.compile recognises beside a matmul.
_FUNCTIONAL = torch.ops._c10d_functional


def cut(built: nn.Module, model: ModelSpec, layout: Layout, world: World) -> None:
    """Give every parameter, still without storage, the shape that this rank works with - its heads, columns, rows or experts - and the modules that
    know their sizes by heart these."""
    for tensor in model.parameters:
        whole = built.get_parameter(tensor.name)
        shape = split(tensor, Role.USE, layout).local_shape(world.rank)
        _set(built, tensor.name, nn.Parameter(torch.empty(shape, dtype=whole.dtype, device="meta")))
    for tensor in model.tensors:
        if tensor.tied_to is not None:
            _set(built, tensor.name, built.get_parameter(tensor.tied_to))
    for module in built.modules():
        _resize(module, layout.mesh.tp)


def cross_borders(built: nn.Module, model: ModelSpec, layout: Layout, world: World) -> None:
    """Hook what crosses onto the modules at the borders."""
    borders = _Borders(world.group(AXIS), layout.sequence_parallel)
    for path in _entered(model, layout):
        built.get_submodule(path).register_forward_pre_hook(borders.enter, with_kwargs=True)
    for tensor in model.tensors:
        module = built.get_submodule(_module(tensor))
        if tensor.kind == "matmul" and _is_cut(tensor, _reads(tensor), layout):
            if module._parameters.get("bias") is not None:
                module.forward = MethodType(_without_bias, module)
            module.register_forward_hook(borders.leave)
        elif tensor.kind == "lookup" and _is_cut(tensor, 0, layout):
            rows = _Rows(*split(tensor, Role.USE, layout).intervals(world.rank, 0)[0])
            rows.localise(module)
            module.register_forward_pre_hook(rows.before)
            module.register_forward_hook(rows.after)
            module.register_forward_hook(borders.leave)


def _resize(module: Any, tp: int) -> None:
    """Of what a module's code takes apart by sizes from the config, those that are this rank's."""
    if hasattr(module, "qkv_proj"):
        module.config = copy(module.config)
        module.config.num_attention_heads //= tp
        module.num_key_value_heads //= tp
    elif hasattr(module, "split_size"):
        module.split_size //= tp
    elif isinstance(module, Conv1D):
        module.nf = module.weight.shape[1]


def _set(built: nn.Module, name: str, parameter: torch.Tensor) -> None:
    path, _, own = name.rpartition(".")
    built.get_submodule(path)._parameters[own] = parameter  # pyright: ignore[reportArgumentType]


def _module(tensor: TensorSpec) -> str:
    return tensor.name.rpartition(".")[0]


def _is_cut(tensor: TensorSpec, position: int, layout: Layout) -> bool:
    return "tp" in cutting_axes(tensor, position, Role.USE, layout)


def _reads(tensor: TensorSpec) -> int:
    """Which dim of a projection is that of its input: the last of the activation that it acts on."""
    return next(i for i, dim in enumerate(tensor.dims) if dim.name == tensor.reads)


def _entered(model: ModelSpec, layout: Layout) -> list[str]:
    """The modules that read the residual stream for projections that are cut along their output: the sublayers, and the head."""
    projections = (t for t in model.tensors if t.kind == "matmul" and len(t.dims) == 2)
    heads = (_module(t) for t in projections if _is_cut(t, 1 - _reads(t), layout))
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
    parts = _FUNCTIONAL.wait_tensor(_FUNCTIONAL.all_gather_into_tensor(stream.contiguous(), group.size(), group.group_name))
    return torch.cat(parts.chunk(group.size(), dim=0), dim=1)


def _scatter(stream: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = torch.cat(stream.chunk(group.size(), dim=1), dim=0)
    return _FUNCTIONAL.wait_tensor(_FUNCTIONAL.reduce_scatter_tensor(parts, "sum", group.size(), group.group_name))


_MOVES = {"copy": lambda stream, _group: stream.view_as(stream), "sum": _sum, "gather": _gather, "scatter": _scatter}


def _without_bias(module: nn.Linear | Conv1D, stream: torch.Tensor) -> torch.Tensor:
    """A projection's partial sum; the bias belongs to the whole sum, and is added there."""
    return nn.functional.linear(stream, module.weight) if isinstance(module, nn.Linear) else stream @ module.weight


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
