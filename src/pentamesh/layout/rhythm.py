"""`rhythm`: every collective of one optimizer step of one rank - how often each crossing happens, times what it moves.

The ledger that a run records (`pentamesh.run.ledger`) has the same rows, and tests hold the two equal. What is predicted is a steady step:
from the second on, when buckets have been rebuilt and optimizer state exists.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from pentamesh.job.precision import ITEMSIZE, Precision
from pentamesh.layout.mesh import DATA_AXES, EXPERT_AXES, SHARD_AXES, TOKEN_AXES, Layout
from pentamesh.layout.moves import Move, crossing, mirror, moves
from pentamesh.layout.policy import DDP_BUCKET_BYTES, Policy
from pentamesh.layout.reach import Reached, ends, reach
from pentamesh.layout.rules import on_expert_view, tensor_partial
from pentamesh.layout.split import split
from pentamesh.layout.stages import on_stage
from pentamesh.model.dims import Dim, TensorSpec
from pentamesh.model.roles import Role
from pentamesh.model.spec import ModelSpec, Unit

__all__ = [
    "Crossing",
    "LedgerRow",
    "activations",
    "buckets",
    "evened",
    "ledger",
    "load_axes",
    "norm_axes",
    "parameters",
    "partial_sums",
    "rhythm",
    "routed",
    "row_axes",
    "sums",
]


# Of a number of rows or tokens, int64.
COUNT_BYTES = 8


@dataclass(frozen=True, order=True)
class LedgerRow:
    """`count` equal collectives in one phase (`forward` | `backward` | `step`) of a step. `bytes` is the buffer of one, as in `Move`."""

    phase: str
    kind: str
    axes: tuple[str, ...]
    num_ranks: int
    bytes: int
    count: int

    @property
    def wire_bytes(self) -> float:
        """Bytes that one rank sends for all `count` of them."""
        return self.count * Move(self.kind, self.axes, self.num_ranks, self.bytes).wire_bytes

    def __str__(self) -> str:
        return f"{self.phase:8} {self.kind:14} {'*'.join(self.axes):24} {self.num_ranks:5} ranks {self.bytes:15,} B  x {self.count}"


@dataclass(frozen=True)
class Crossing:
    """One collective and how often it happens, before equal ones are counted together."""

    phase: str
    move: Move
    count: int


def ledger(crossings: Iterable[Crossing]) -> list[LedgerRow]:
    """Equal collectives counted together, in a fixed order."""
    counts: Counter[tuple[str, str, tuple[str, ...], int, int]] = Counter()
    for c in crossings:
        if c.count and c.move.num_ranks > 1:
            counts[c.phase, c.move.kind, c.move.axes, c.move.num_ranks, c.move.bytes] += c.count
    return sorted(LedgerRow(*key, count) for key, count in counts.items())


def rhythm(
    model: ModelSpec,
    layout: Layout,
    policy: Policy,
    precision: Precision,
    seq: int | Sequence[int],
    rank: int = 0,
    came: Sequence[Sequence[int]] | None = None,
    samples: Sequence[int] | None = None,
) -> Iterator[Crossing]:
    """Every collective of a steady step of one rank, of the first pipeline stage, which has most to say.

    Shapes: `seq` is the length of a sequence before context ranks share it, or of those of each micro-batch in turn. `came` are the rows that came to
    this rank's experts, by micro-batch and sparse layer; where it is not given, routers send as many to all. `samples` are how many the rows of each
    micro-batch hold; where it is not given, one each. Units: bytes per rank.
    """
    yield from parameters(on_stage(model, layout.mesh.pp, 0), layout, policy, precision, rank)
    yield from activations(model, layout, policy, precision, seq)
    if policy.dispatch == "all_to_all":  # what other kernels move is in no ledger
        yield from routed(model, layout, policy, precision, seq, came)
    yield from evened(model, layout, policy, samples)
    yield from sums(model, layout, precision)


# Parameters: gathered to be used, reduced when their gradient is done.


def parameters(model: ModelSpec, layout: Layout, policy: Policy, precision: Precision, rank: int = 0) -> Iterator[Crossing]:
    """Of `rhythm`, what gathers the parameters of a stage and reduces their gradients over the data axes."""
    compute, reduce, weight = ITEMSIZE[precision.compute], ITEMSIZE[precision.reduce], ITEMSIZE[precision.weight]
    counts = _reductions(policy)
    if not layout.cuts_state:
        alike = Counter(tuple(model.first_alike[t.name] for t in bucket) for bucket in buckets(model, layout, weight, rank))
        for bucket, count in alike.items():
            reduced = _fused(_reduction(t, Role.GRADIENT, layout, weight, rank) for t in bucket)
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
    return tuple(move for part in parts for move in _fused(moves(t, Role.STATE, Role.USE, layout, itemsize, rank) for t in part))


@lru_cache(maxsize=4096)
def _reduced(unit: Unit, layout: Layout, itemsize: int, rank: int) -> tuple[Move, ...]:
    """The collectives that reduce the gradients of one unit."""
    parts = _gathered_as_one(unit.tensors, layout)
    return tuple(move for part in parts for move in _fused(_reduction(t, Role.STATE, layout, itemsize, rank) for t in part if t.trained))


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


def _fused(crossed: Iterable[tuple[Move, ...]]) -> tuple[Move, ...]:
    """Several tensors in one buffer: their moves of the same kind and group are one, of their bytes together."""
    together: Counter[tuple[str, tuple[str, ...], int]] = Counter()
    for move in (move for moved in crossed for move in moved):
        together[move.kind, move.axes, move.num_ranks] += move.bytes
    return tuple(Move(*key, num_bytes) for key, num_bytes in together.items())


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


# Activations: tensor, context, pipeline and expert parallel.


def activations(model: ModelSpec, layout: Layout, policy: Policy, precision: Precision, seq: int | Sequence[int]) -> Iterator[Crossing]:
    """Of `rhythm`, what moves parts of micro-batches."""
    for length, times in ({seq: policy.grad_accum} if isinstance(seq, int) else Counter(seq)).items():
        yield from _of_length(model, layout, policy, precision, length, times)


def _of_length(model: ModelSpec, layout: Layout, policy: Policy, precision: Precision, seq: int, times: int) -> Iterator[Crossing]:
    """What `times` micro-batches of one length move."""
    mesh, itemsize = layout.mesh, ITEMSIZE[precision.compute]
    again = times if policy.recompute != "none" else 0
    stream = activation("residual", model, layout, policy.micro_batch, seq, ("hidden",))
    # Sublayers of a kind that gradients reach alike move the same: one of them is asked, and counted as often as it occurs.
    passed = [(s.kind, reached) for s, reached in zip(model.sublayers, reach(model), strict=True) if s.layer % mesh.pp == 0]
    for (kind, reached), count in Counter(item for item in passed if item[0] != "experts").items():
        # Computing a block again ends with the last tensor that its backward needs: the input of its last projection, which it leaves only to a norm.
        leaves_again = kind == "attention" or model.norms_what_it_adds
        repeated = count * again if reached.again else 0
        yield from _boundary(stream, layout, itemsize, count * times, reached, repeated, repeated if leaves_again else 0)
        if kind == "attention":
            yield from _context(model, layout, policy, itemsize, seq, count * times, reached)
    if mesh.pp == 1:
        # The embedding leaves onto the stream and the head enters from it, as a block does; they are never computed again.
        yield from _boundary(stream, layout, itemsize, times, ends(model), 0, 0)
        yield from _loss(model, layout, policy, max(itemsize, ITEMSIZE["float32"]), seq, times)
    if mesh.pp > 1:
        message = split(stream, Role.CARRY, layout).max_local_numel * itemsize
        yield Crossing("forward", Move("send", ("pp",), mesh.pp, message), times)
        yield Crossing("backward", Move("send", ("pp",), mesh.pp, message), times)


def _boundary(stream: TensorSpec, layout: Layout, itemsize: int, times: int, reached: Reached, again: int, leaving_again: int) -> Iterator[Crossing]:
    """Entering a block from the residual stream and leaving it: one crossing each, whatever number of projections lies between."""
    tp = ("tp",) if layout.mesh.tp > 1 else ()
    carry, use = split(stream, Role.CARRY, layout), split(stream, Role.USE, layout)
    leaves = crossing(use, carry, itemsize, tp)
    yield from _both_ways(crossing(carry, use, itemsize), times, again, reached.enters)
    yield from _both_ways(leaves, times, leaving_again, reached.leaves)
    if tp and not layout.sequence_parallel and reached.enters:
        # The entry is a copy forward; backward, every tensor rank holds a part of the gradient of the same stream.
        yield from _backward(leaves, times)


def _loss(model: ModelSpec, layout: Layout, policy: Policy, itemsize: int, seq: int, times: int) -> Iterator[Crossing]:
    """Of a vocabulary that is cut: each token's largest logit, then the sum of its exponentials and the logit of its label."""
    if layout.mesh.tp > 1:
        tokens = split(activation("losses", model, layout, policy.micro_batch, seq, ()), Role.USE, layout).max_local_numel
        for numbers in (1, 2):
            yield Crossing("forward", Move("all_reduce", ("tp",), layout.mesh.tp, numbers * tokens * itemsize), times)


def _context(model: ModelSpec, layout: Layout, policy: Policy, itemsize: int, seq: int, times: int, reached: Reached) -> Iterator[Crossing]:
    """What context parallel moves inside one attention: keys and values round the ring or gathered, or all four exchanged over heads.

    Selective recompute keeps what attention gave. Ulysses alone moves again: what was kept is on the other side of its exchanges.
    """
    mesh, kept = layout.mesh, policy.recompute == "none" or (policy.recompute == "selective" and layout.context != "ulysses")
    if mesh.cp == 1:
        return
    again, back = 0 if kept or not reached.again else times, times if reached.mixes else 0
    queries, out = (activation(name, model, layout, policy.micro_batch, seq, (name,)) for name in ("heads", "given"))
    keys = [activation(name, model, layout, policy.micro_batch, seq, (name,), sequence="kv_seq") for name in ("kv_heads", "values")]
    if layout.context == "ring":
        # A hop for every other rank. Backward passes keys and values round once more, and their gradients with them.
        hop = Move("send", ("cp",), mesh.cp, sum(split(t, Role.ATTEND, layout).max_local_numel for t in keys) * itemsize)
        yield Crossing("forward", hop, (mesh.cp - 1) * times)
        yield Crossing("backward", hop, (mesh.cp - 1) * (2 * back + again))
    elif layout.context == "all_gather":
        # What was gathered is not kept for backward, which gathers it itself.
        gathered = _fused(moves(t, Role.USE, Role.ATTEND, layout, itemsize) for t in keys)
        yield from _both_ways(gathered, times, again + back, reached.mixes)
    else:
        entered = _fused(moves(t, Role.USE, Role.ATTEND, layout, itemsize) for t in (queries, *keys))
        for crossed in (entered, moves(out, Role.ATTEND, Role.USE, layout, itemsize)):
            yield from _both_ways(crossed, times, again, reached.mixes)


# Experts: rows go to the ranks that have them, and what they give comes home.


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
    lengths = [seq] * policy.grad_accum if isinstance(seq, int) else list(seq)
    layers = [reached for sublayer, reached in zip(model.sublayers, reach(model), strict=True) if sublayer.kind == "experts"]
    calls: Counter[tuple[int, int, Reached]] = Counter()
    for micro, length in enumerate(lengths):
        stream = activation("tokens", model, layout, policy.micro_batch, length, ())
        sent = split(stream, Role.CARRY, layout).max_local_numel * model.experts.per_token
        for layer, reached in enumerate(layers):
            calls[sent, sent if came is None else came[micro][layer], reached] += 1
    for (sent, received, reached), times in calls.items():
        yield from _to_experts(model, layout, policy, precision, sent, received, reached, times)


def _to_experts(
    model: ModelSpec, layout: Layout, policy: Policy, precision: Precision, sent: int, received: int, reached: Reached, times: int
) -> Iterator[Crossing]:
    """One sparse layer: how many rows each rank will get, the rows, each with its weight, and home again what experts made of them. Backward mirrors
    it, as far as there are gradients. A block that is wholly computed again sends all out again, and fetches results only where shared experts
    are computed after them."""
    assert model.experts is not None
    itemsize, wide = ITEMSIZE[precision.compute], max(ITEMSIZE["float32"], ITEMSIZE[precision.compute])

    def crossed(phase: str, rows: int, width: int, count: int = times) -> Crossing:
        return Crossing(phase, Move("all_to_all", ("ep",), layout.mesh.ep, rows * width), count)

    row = model.hidden * itemsize
    there, home = ((model.experts.count, COUNT_BYTES), (sent, row), (sent, wide)), (received, row)
    again = times if policy.recompute == "full" and reached.again else 0
    for rows, width in (*there, home):
        yield crossed("forward", rows, width)
    for rows, width in (*there, *((home,) if model.experts.shared_ffn else ())):
        yield crossed("backward", rows, width, again)
    yield crossed("backward", sent, row, times if reached.leaves else 0)
    yield crossed("backward", received, row, times if reached.enters else 0)
    yield crossed("backward", received, wide, times if reached.mixes else 0)


def evened(model: ModelSpec, layout: Layout, policy: Policy, samples: Sequence[int] | None = None) -> Iterator[Crossing]:
    """Of `rhythm`, what an auxiliary loss needs to know of each sparse layer and micro-batch: how often each of its samples chose each expert, on all
    ranks that have parts of its rows. It is not asked again where backward computes a block once more."""
    axes = row_axes(layout)
    if model.experts is None or policy.balance != "loss" or not axes:
        return
    for count, times in Counter(samples or [policy.micro_batch] * policy.grad_accum).items():
        move = Move("all_reduce", axes, layout.mesh.degree(*axes), count * model.experts.count * COUNT_BYTES)
        yield Crossing("forward", move, times * _sparse_layers(model, layout))


def row_axes(layout: Layout) -> tuple[str, ...]:
    """The axes along which ranks have parts of the same rows, on the stream as it lies between blocks."""
    return tuple(axis for axis in ("cp", *(("tp",) if layout.sequence_parallel else ())) if layout.mesh.degree(axis) > 1)


def load_axes(layout: Layout) -> tuple[str, ...]:
    """The axes along which routers see different tokens."""
    return (*(axis for axis in DATA_AXES if layout.mesh.degree(axis) > 1), *row_axes(layout))


def _sparse_layers(model: ModelSpec, layout: Layout) -> int:
    return 0 if model.experts is None else sum(layer % layout.mesh.pp == 0 for layer in model.experts.layers)


def activation(name: str, model: ModelSpec, layout: Layout, batch: int, seq: int, last: tuple[str, ...], sequence: str = "seq") -> TensorSpec:
    """A named activation of one micro-batch over the whole mesh: [batch x data ranks, sequence, last]. Of heads there are queries and what attention
    gives (`given`), of key heads keys and `values`."""
    given = model.value_dim or model.head_dim
    sizes = {
        "hidden": Dim("hidden", model.hidden),
        "heads": Dim("heads", model.num_heads * model.head_dim, model.head_dim),
        "given": Dim("heads", model.num_heads * given, given),
        "kv_heads": Dim("kv_heads", model.num_kv_heads * model.head_dim, model.head_dim),
        "values": Dim("kv_heads", model.num_kv_heads * given, given),
    }
    whole_batch = batch * layout.mesh.degree(*DATA_AXES)
    return TensorSpec(name, (Dim("batch", whole_batch), Dim(sequence, seq), *(sizes[dim] for dim in last)))


def _forward(crossed: Iterable[Move], count: int) -> Iterator[Crossing]:
    return (Crossing("forward", move, count) for move in crossed)


def _backward(crossed: Iterable[Move], count: int) -> Iterator[Crossing]:
    return (Crossing("backward", move, count) for move in crossed)


def _both_ways(crossed: tuple[Move, ...], count: int, again: int, reached: bool = True) -> Iterator[Crossing]:
    """A crossing of an activation: forward, its mirror image where a gradient reaches it, and `again` where backward computes the block once more."""
    yield from _forward(crossed, count)
    yield from _backward(crossed, again)
    if reached and any(move.kind != "all_reduce" for move in crossed):
        # The backward of an all-reduce into a replicated stream is a copy.
        yield from _backward(mirror(crossed), count)


# Bookkeeping: the numbers that all ranks must agree on.


def sums(model: ModelSpec, layout: Layout, precision: Precision) -> Iterator[Crossing]:
    """Of `rhythm`, what is summed once a step."""
    yield from partial_sums(on_stage(model, layout.mesh.pp, 0), layout, precision)
    yield from _bookkeeping(model, layout)


def _bookkeeping(model: ModelSpec, layout: Layout) -> Iterator[Crossing]:
    """The token counts before a step (trained and all, int64), then the loss, the loads of experts, of each layer and expert one, with the auxiliary
    loss, and the squared norm of cut gradients (float64 each)."""
    tokens = tuple(axis for axis in TOKEN_AXES if layout.mesh.degree(axis) > 1)
    if tokens:
        yield Crossing("step", Move("all_reduce", tokens, layout.mesh.degree(*tokens), 2 * COUNT_BYTES), 1)
        yield Crossing("step", Move("all_reduce", tokens, layout.mesh.degree(*tokens), 8), 1)
    if model.experts is not None and (apart := load_axes(layout)):
        numbers = _sparse_layers(model, layout) * model.experts.count + 1
        yield Crossing("step", Move("all_reduce", apart, layout.mesh.degree(*apart), 8 * numbers), 1)
    cut = norm_axes(model, layout)
    if cut:
        yield Crossing("step", Move("all_reduce", cut, layout.mesh.degree(*cut), 8), 1)


def partial_sums(model: ModelSpec, layout: Layout, precision: Precision) -> Iterator[Crossing]:
    """The sum, once a step and in one buffer for each group, of the gradients of which each tensor rank has a part."""
    numels: Counter[tuple[str, ...]] = Counter()
    for unit in model.kinds if layout.mesh.tp > 1 else ():
        for tensor in unit.tensors:
            if tensor.trained and (axes := tensor_partial(tensor, layout)):
                numels[axes] += unit.count * split(tensor, Role.STATE, layout).max_local_numel
    for axes, numel in sorted(numels.items()):
        yield Crossing("step", Move("all_reduce", axes, layout.mesh.degree(*axes), numel * ITEMSIZE[precision.gradient]), 1)


def norm_axes(model: ModelSpec, layout: Layout) -> tuple[str, ...]:
    """The axes that part the gradients when they meet the optimizer, each tensor's or all by stages: over them the squared norm is summed. Those of
    the expert view are the same ranks as those of data, context and tensor together."""
    cut = {axis for unit in model.kinds for t in unit.tensors if t.trained for axis in split(t, Role.STATE, layout).axes}
    if cut & set(EXPERT_AXES):
        cut = (cut - set(EXPERT_AXES)) | {axis for axis in (*SHARD_AXES, "tp") if layout.mesh.degree(axis) > 1}
    cut |= {"pp"} if layout.mesh.pp > 1 else set()
    return tuple(axis for axis in ("pp", *SHARD_AXES, "tp") if axis in cut)
