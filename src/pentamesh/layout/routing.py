"""Routing: what tells ranks of each other's choices of experts, and brings rows to these and home.

Rows that come to a rank differ from layer to layer and step to step: exact where they are given, else as many as routers send that send all alike.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pentamesh.job.precision import ITEMSIZE, Precision
from pentamesh.layout.crossings import COUNT_BYTES, Crossing, activation
from pentamesh.layout.mesh import DATA_AXES, Layout
from pentamesh.layout.moves import Move
from pentamesh.layout.policy import Policy
from pentamesh.layout.reach import Reached, reach
from pentamesh.layout.split import split
from pentamesh.model.roles import Role
from pentamesh.model.spec import ModelSpec, Sublayer

__all__ = ["evened", "load_axes", "routed", "row_axes", "sparse_layers"]


def routed(
    model: ModelSpec,
    layout: Layout,
    policy: Policy,
    precision: Precision,
    seq: int | Sequence[int],
    came: Sequence[Sequence[int]] | None = None,
) -> Iterator[Crossing]:
    """Of `rhythm`, what moves tokens to their experts and back: by how many rows come to this rank, which differ from layer to layer."""
    if model.experts is None or layout.mesh.ep == 1:
        return
    layers, calls = list(_sparse(model)), Counter[_Call]()
    for (length, arrived), times in _micros(seq, policy, came).items():
        stream = activation("tokens", model, layout, policy.micro_batch, length, ())
        sent = split(stream, Role.CARRY, layout).max_local_numel * model.experts.per_token
        for received, (reached, goes_on) in zip(arrived or [sent] * len(layers), layers, strict=True):
            calls[_Call(sent, received, reached, goes_on)] += times
    for call, times in calls.items():
        yield from _to_experts(model, layout, policy, precision, call, times)


class _Call(NamedTuple):
    """One sparse layer and micro-batch: the rows that a rank sends and those that come to it, where a gradient goes back through its experts, and
    whether shared experts are computed again after them."""

    sent: int
    received: int
    reached: Reached
    goes_on: bool


def _sparse(model: ModelSpec) -> Iterator[tuple[Reached, bool]]:
    """Of each sparse layer, as in a call, where gradients go and whether its shared experts go on."""
    found = list(zip(model.sublayers, reach(model), strict=True))
    for (sublayer, reached), (following, then) in itertools.pairwise([*found, (Sublayer(-1, ""), Reached())]):
        if sublayer.kind == "experts":
            yield reached, following == (sublayer.layer, "mlp") and then.again


def _micros(seq: int | Sequence[int], policy: Policy, came: Sequence[Sequence[int]] | None) -> Counter[tuple[int, tuple[int, ...]]]:
    """The micro-batches of a step, by the length of their rows and what came to each layer's experts, if that is known; and how many are alike."""
    if isinstance(seq, int):
        return Counter({(seq, ()): policy.grad_accum})
    return Counter(zip(seq, map(tuple, came or [()] * len(seq)), strict=True))


def _to_experts(model: ModelSpec, layout: Layout, policy: Policy, precision: Precision, call: _Call, times: int) -> Iterator[Crossing]:
    """How many rows each rank will get, the rows, each with its weight, and home again what experts made of them. Backward mirrors it, as far as
    there are gradients. A block that is wholly computed again sends all out again, and fetches results only where shared experts go on from there."""
    assert model.experts is not None
    itemsize, wide, reached = ITEMSIZE[precision.compute], max(ITEMSIZE["float32"], ITEMSIZE[precision.compute]), call.reached

    def crossed(phase: str, rows: int, width: int, count: int = times) -> Crossing:
        return Crossing(phase, Move("all_to_all", ("ep",), layout.mesh.ep, rows * width), count)

    row = model.hidden * itemsize
    there, home = ((model.experts.count, COUNT_BYTES), (call.sent, row), (call.sent, wide)), (call.received, row)
    again = times if policy.recompute == "full" and reached.again else 0
    for rows, width in (*there, home):
        yield crossed("forward", rows, width)
    for rows, width in (*there, *((home,) if call.goes_on else ())):
        yield crossed("backward", rows, width, again)
    yield crossed("backward", call.sent, row, times if reached.leaves else 0)
    yield crossed("backward", call.received, row, times if reached.enters else 0)
    yield crossed("backward", call.received, wide, times if reached.mixes else 0)


def evened(model: ModelSpec, layout: Layout, policy: Policy, samples: Sequence[int] | None = None) -> Iterator[Crossing]:
    """Of `rhythm`, what an auxiliary loss needs to know of each sparse layer and micro-batch: how often each of its samples chose each expert, on all
    ranks that have parts of its rows. It is not asked again where backward computes a block once more."""
    axes = row_axes(layout)
    if model.experts is None or policy.balance != "loss" or not axes:
        return
    for count, times in Counter(samples or [policy.micro_batch] * policy.grad_accum).items():
        move = Move("all_reduce", axes, layout.mesh.degree(*axes), count * model.experts.count * COUNT_BYTES)
        yield Crossing("forward", move, times * sparse_layers(model, layout))


def row_axes(layout: Layout) -> tuple[str, ...]:
    """The axes along which ranks have parts of the same rows, on the stream as it lies between blocks."""
    return tuple(axis for axis in ("cp", *(("tp",) if layout.sequence_parallel else ())) if layout.mesh.degree(axis) > 1)


def load_axes(layout: Layout) -> tuple[str, ...]:
    """The axes along which routers see different tokens."""
    return (*(axis for axis in DATA_AXES if layout.mesh.degree(axis) > 1), *row_axes(layout))


def sparse_layers(model: ModelSpec, layout: Layout) -> int:
    return 0 if model.experts is None else sum(layer % layout.mesh.pp == 0 for layer in model.experts.layers)
