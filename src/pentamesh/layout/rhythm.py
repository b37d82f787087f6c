"""`rhythm`: every collective of one optimizer step of one rank - how often each crossing happens, times what it moves.

The ledger that a run records (`pentamesh.run.ledger`) has the same rows, and tests hold the two equal. What is predicted is a steady step:
from the second on, when buckets have been rebuilt and optimizer state exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from pentamesh.job.precision import ITEMSIZE, Precision
from pentamesh.layout.crossings import COUNT_BYTES, Crossing, activation, fused
from pentamesh.layout.gathers import parameters
from pentamesh.layout.mesh import EXPERT_AXES, SHARD_AXES, TOKEN_AXES, Layout
from pentamesh.layout.moves import Move, crossing, mirror, moves
from pentamesh.layout.policy import Policy
from pentamesh.layout.reach import Reached, ends, reach
from pentamesh.layout.routing import evened, load_axes, routed, sparse_layers
from pentamesh.layout.rules import tensor_partial
from pentamesh.layout.split import split
from pentamesh.layout.stages import on_stage
from pentamesh.model.dims import TensorSpec
from pentamesh.model.roles import Role
from pentamesh.model.spec import ModelSpec

__all__ = ["activations", "norm_axes", "partial_sums", "rhythm", "sums"]


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
        gathered = fused(moves(t, Role.USE, Role.ATTEND, layout, itemsize) for t in keys)
        yield from _both_ways(gathered, times, again + back, reached.mixes)
    else:
        entered = fused(moves(t, Role.USE, Role.ATTEND, layout, itemsize) for t in (queries, *keys))
        for crossed in (entered, moves(out, Role.ATTEND, Role.USE, layout, itemsize)):
            yield from _both_ways(crossed, times, again, reached.mixes)


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
        numbers = sparse_layers(model, layout) * model.experts.count + 1
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
