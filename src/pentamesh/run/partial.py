"""Partial gradients: what every tensor rank holds whole and applies to its own heads or tokens has a part of its gradient on each."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pentamesh.layout.rules import partial_axes
from pentamesh.layout.split import split
from pentamesh.model.roles import Role
from pentamesh.model.spec import ModelSpec
from pentamesh.run.place import local
from pentamesh.run.world import World

__all__ = ["sum_partial_gradients"]


def sum_partial_gradients(parameters: dict[str, torch.Tensor], model: ModelSpec, world: World) -> None:
    """Sum them over tensor ranks, in place and as one buffer. Collective over the tensor axis.

    Source: `layout.rules.partial_axes`, from which `layout.rhythm.partial_sums` predicts the same buffer.
    """
    layout = world.layout
    partial = [t for t in model.parameters if "tp" in partial_axes(t, layout)]
    if not partial:
        return
    sizes = [split(t, Role.STATE, layout).max_local_numel for t in partial]  # the same on every rank, however uneven the cut
    grads = [local(grad) for t in partial if (grad := parameters[t.name].grad) is not None]
    buffer = grads[0].new_zeros(sum(sizes))
    places = [place[: grad.numel()].view_as(grad) for place, grad in zip(buffer.split(sizes), grads, strict=True)]
    torch._foreach_copy_(places, grads)
    with world.bookkeeping():
        dist.all_reduce(buffer, group=world.group(("tp",)))
    torch._foreach_copy_(grads, places)
