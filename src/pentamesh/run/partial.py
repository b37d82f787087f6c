"""Partial gradients: what several tensor ranks hold alike and apply to their own heads or tokens has a part of its gradient on each."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pentamesh.layout.rules import tensor_partial
from pentamesh.layout.split import split
from pentamesh.model.dims import TensorSpec
from pentamesh.model.roles import Role
from pentamesh.model.spec import ModelSpec
from pentamesh.run.place import local
from pentamesh.run.world import World

__all__ = ["sum_partial_gradients"]


def sum_partial_gradients(parameters: dict[str, torch.Tensor], model: ModelSpec, world: World) -> None:
    """Sum them over tensor ranks, in place and as one buffer for each group of ranks. Collective over the tensor axis.

    Source: `layout.rules.tensor_partial`, from which `layout.rhythm.partial_sums` predicts the same buffers.
    """
    layout = world.layout
    groups: dict[tuple[str, ...], list[TensorSpec]] = {}
    for tensor in model.parameters if layout.mesh.tp > 1 else ():
        if tensor.trained and (axes := tensor_partial(tensor, layout)):
            groups.setdefault(axes, []).append(tensor)
    for axes, tensors in sorted(groups.items()):
        _sum(parameters, tensors, world, axes)


def _sum(parameters: dict[str, torch.Tensor], tensors: list[TensorSpec], world: World, axes: tuple[str, ...]) -> None:
    sizes = [split(t, Role.STATE, world.layout).max_local_numel for t in tensors]  # the same on every rank, however uneven the cut
    grads = [local(grad) for t in tensors if (grad := parameters[t.name].grad) is not None]
    buffer = grads[0].new_zeros(sum(sizes))
    places = [place[: grad.numel()].view_as(grad) for place, grad in zip(buffer.split(sizes), grads, strict=True)]
    torch._foreach_copy_(places, grads)
    with world.bookkeeping():
        dist.all_reduce(buffer, group=world.group(axes))
    torch._foreach_copy_(grads, places)
