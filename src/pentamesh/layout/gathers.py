"""Gathers: when parameters are gathered to be used, and their gradients reduced when they are done."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

from pentamesh.job.precision import ITEMSIZE, Precision
from pentamesh.layout.crossings import Crossing, fused
from pentamesh.layout.mesh import Layout
from pentamesh.layout.moves import Move, crossing, moves
from pentamesh.layout.policy import DDP_BUCKET_BYTES, Policy
from pentamesh.layout.rules import on_expert_view, tensor_partial
from pentamesh.layout.split import split
from pentamesh.model.dims import TensorSpec
from pentamesh.model.roles import Role
from pentamesh.model.spec import ModelSpec, Unit

__all__ = ["buckets", "parameters"]


def parameters(model: ModelSpec, layout: Layout, policy: Policy, precision: Precision, rank: int = 0) -> Iterator[Crossing]:
    """Of `rhythm`, what gathers the parameters of a stage and reduces their gradients over the data axes."""
    compute, reduce, weight = ITEMSIZE[precision.compute], ITEMSIZE[precision.reduce], ITEMSIZE[precision.weight]
    counts = _reductions(policy)
    if not layout.cuts_state:
        alike = Counter(tuple(model.first_alike[t.name] for t in bucket) for bucket in buckets(model, layout, weight, rank))
        for bucket, count in alike.items():
            reduced = fused(_reduction(t, Role.GRADIENT, layout, weight, rank) for t in bucket)
            yield from (Crossing("backward", move, count * counts[move.kind]) for move in reduced)
        return
    # What the optimizer updates is cut with its state, whatever else is: from there weights are gathered, and thither gradients go.
    for unit in model.kinds:
        gathered = _gathered(unit, layout, compute, rank)
        for phase, count in zip(("forward", "backward"), _gathers(unit, policy), strict=True):
            yield from (Crossing(phase, move, unit.count * count) for move in gathered)
        yield from (Crossing("backward", move, unit.count * counts[move.kind]) for move in _reduced(unit, layout, reduce, rank))


@lru_cache(maxsize=4096)
def _gathered(unit: Unit, layout: Layout, itemsize: int, rank: int) -> tuple[Move, ...]:
    """The collectives that gather the parameters of one unit."""
    parts = _gathered_as_one(unit.tensors, layout)
    return tuple(move for part in parts for move in fused(moves(t, Role.STATE, Role.USE, layout, itemsize, rank) for t in part))


@lru_cache(maxsize=4096)
def _reduced(unit: Unit, layout: Layout, itemsize: int, rank: int) -> tuple[Move, ...]:
    """The collectives that reduce the gradients of one unit."""
    parts = _gathered_as_one(unit.tensors, layout)
    return tuple(move for part in parts for move in fused(_reduction(t, Role.STATE, layout, itemsize, rank) for t in part if t.trained))


def _gathered_as_one(tensors: Iterable[TensorSpec], layout: Layout) -> list[list[TensorSpec]]:
    """The tensors of a unit; apart from the others those that live on the expert view."""
    parts: dict[bool, list[TensorSpec]] = {}
    for tensor in tensors:
        parts.setdefault(on_expert_view(tensor, layout), []).append(tensor)
    return list(parts.values())


def _gathers(unit: Unit, policy: Policy) -> tuple[int, int]:
    """How often a unit's parameters are gathered in forward and in backward. The root is never resharded in between, and a block that no gradient
    reaches has no backward."""
    if policy.keep_gathered:
        return 1, 0
    return policy.grad_accum, policy.grad_accum if policy.reshard and unit.reached and not unit.is_root else 0


def _reductions(policy: Policy) -> dict[str, int]:
    """How often gradients are reduced in a step, by kind of collective."""
    return {
        "reduce_scatter": 1 if policy.reduce == "once" else policy.grad_accum,
        "all_reduce": policy.grad_accum if policy.reduce == "each" else 1,
    }


@lru_cache(maxsize=4096)
def _reduction(tensor: TensorSpec, target: Role, layout: Layout, itemsize: int, rank: int) -> tuple[Move, ...]:
    """How the gradient of a tensor is reduced over the data axes; partial sums over tensor ranks wait for the end of the step."""
    held, waits = split(tensor, Role.COMPUTED, layout), tensor_partial(tensor, layout)
    computed = replace(held, partial=tuple(axis for axis in held.partial if axis not in waits))
    return crossing(computed, split(tensor, target, layout), itemsize, rank=rank)


def buckets(model: ModelSpec, layout: Layout, itemsize: int, rank: int = 0) -> list[list[TensorSpec]]:
    """The buckets in which DDP reduces gradients, from the second step on: in the order gradients become ready.

    A bucket closes when it has reached its limit.
    Source: torch.distributed `compute_bucket_assignment_by_size`, called by the reducer when it rebuilds its buckets.
    """
    found: list[list[TensorSpec]] = [[]]
    size = 0
    num_bytes = {t.name: itemsize * math.prod(split(t, Role.USE, layout).local_shape(rank)) for unit in model.kinds for t in unit.tensors}
    for tensor in reversed([t for t in model.parameters if t.trained]):  # in forward order, the embedding first even when it is also the head
        found[-1].append(tensor)
        size += num_bytes[model.first_alike[tensor.name].name]
        if size >= DDP_BUCKET_BYTES:
            found.append([])
            size = 0
    return [bucket for bucket in found if bucket]
