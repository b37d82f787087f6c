"""Budget: what data and tensor parallel say over the wire, beside the figures that people reckon with, and why the two differ.

Bytes come from `moves` and the groups of `cost.network`; the seconds are those of the busiest NIC at its nominal rate, nothing hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pentamesh.cost.network import group, node_wire_bytes
from pentamesh.job.job import Batch
from pentamesh.job.precision import ITEMSIZE, PRECISIONS, Precision
from pentamesh.layout.crossings import LedgerRow, activation, ledger
from pentamesh.layout.legal import problems
from pentamesh.layout.mesh import Layout, Mesh, Shard
from pentamesh.layout.moves import Move
from pentamesh.layout.policy import Policy
from pentamesh.layout.rhythm import rhythm
from pentamesh.layout.split import split
from pentamesh.model.roles import Role
from pentamesh.model.spec import ModelSpec
from pentamesh.plan.explain import Table

__all__ = ["axes", "communication", "tensor", "wire"]

GPUS_PER_NODE = 8
BF16 = ITEMSIZE["bfloat16"]
# One dtype for all that travels: the budget counts bf16 gradients, as the figures that it is compared with do.
TRAVELS = PRECISIONS["bf16-pure"]
ONCE = Policy()


def communication(model: ModelSpec, gbps: Sequence[int] = (100, 200, 400)) -> Table:
    """Bytes of one micro-batch of bf16 gradients (and of gathered parameters) by strategy, per rank, per node and per NIC, and seconds by rate."""
    rates = tuple(f"{rate} Gb/s" for rate in gbps)
    lines = tuple(_lines(model))
    rows = tuple((*line[:-1], *(_seconds(line, rate) for rate in gbps)) for line in lines)
    notes = (
        *(f"{line[0]}: {line[-1]}" for line in lines),
        "gradients reduced in fp32 double every row of gradients, and full shard becomes 4 x 15/16 instead of 3 x 15/16",
        "seconds are those of the busiest NIC at its nominal rate, or of the payload where no wire is counted; overlap hides a part of them",
    )
    columns = ("what", "counted", "sent a rank", "out of a node", "a NIC", *rates)
    return Table(f"What {model.name} says over the wire, per micro-batch, in bf16", columns, rows, notes, frozenset(rates))


# What, its payload as people count it, bytes that a rank sends, that leave a node, that pass the busiest NIC, and why the last differ.
Line = tuple[str, float, float | None, float | None, float | None, str]


def _lines(model: ModelSpec) -> Iterator[Line]:
    counted = model.num_parameters * BF16
    yield ("gradients, once", counted, None, None, None, "the payload, which is not what a ring sends")
    for num_ranks in (8, 16, 64):
        rank, node = _sent(model, Layout(Mesh(dp_replicate=num_ranks)), ("all_reduce",))
        inside = "; one node passes no NIC" if num_ranks <= GPUS_PER_NODE else ""
        yield (f"DDP, ring of {num_ranks}", counted, rank, node, node, f"2 x {num_ranks - 1}/{num_ranks} of the payload{inside}")
    rank, node = _sent(model, Layout(Mesh(dp_replicate=2, dp_shard=GPUS_PER_NODE), "parameters"), ("all_reduce",))
    yield (
        "hybrid 2 x 8, half",
        counted / 2,
        rank / 2,
        node / 2,
        node / 2,
        "the scattering half of the all-reduce between nodes, through one NIC a node",
    )
    yield ("hybrid 2 x 8", counted, rank, node, node, "the whole all-reduce: eight pairs of an eighth each, through one NIC a node")
    yield ("hybrid 2 x 8, 8 NICs", counted, rank, node, node / GPUS_PER_NODE, "the same, each pair through a NIC of its own")
    rank, node = _sent(model, Layout(Mesh(dp_shard=2 * GPUS_PER_NODE), "parameters"), ("all_gather", "reduce_scatter"))
    why = "blocks are gathered twice and scattered once (embedding and head gathered once), 15/16 of each, through one NIC a node"
    yield ("full shard over 2 x 8", 3 * counted, rank, node, node, why)


def _seconds(line: Line, gbps: int) -> float | None:
    through = line[1] if line[4] is None else line[4]
    return through * 8 / (gbps * 1e9) or None


def _sent(model: ModelSpec, layout: Layout, kinds: tuple[str, ...], policy: Policy = ONCE, precision: Precision = TRAVELS) -> tuple[float, float]:
    """Bytes that a rank sends, and that leave a node, in a step of one micro-batch, for the collectives of `kinds` over parameters."""
    rows = [r for r in ledger(rhythm(model, layout, policy, precision, seq=1)) if r.kind in kinds and r.phase != "step"]
    return sum(r.wire_bytes for r in rows), sum(_out_of_node(r, layout) for r in rows)


def _out_of_node(row: LedgerRow, layout: Layout) -> float:
    ranks = group(layout.mesh, row.axes, GPUS_PER_NODE)
    if ranks.num_nodes == 1:
        return 0.0
    # A flat ring runs once through every node; the planner's all-reduce would reduce inside the node first.
    move = Move(row.kind, row.axes, row.num_ranks, row.bytes)
    flat = move.wire_bytes if row.kind == "all_reduce" and ranks.per_node > 1 else node_wire_bytes(move, ranks)
    return row.count * flat


def tensor(model: ModelSpec, degree: int = 8, tokens: int = 4096, gb_per_s: Sequence[float] = (360, 50, 28)) -> Table:
    """What tensor parallel sends for one micro-batch of `tokens` tokens, forward and backward, and seconds at several bus bandwidths."""
    layout = Layout(Mesh(tp=degree))
    rows = [r for r in ledger(rhythm(model, layout, Policy(), TRAVELS, seq=tokens)) if r.axes == ("tp",) and r.phase != "step"]
    payload, wire = sum(r.bytes * r.count for r in rows), sum(r.wire_bytes for r in rows)
    stream = split(activation("residual", model, layout, 1, tokens, ("hidden",)), Role.CARRY, layout)
    token = 2 * model.num_layers * stream.max_local_numel // tokens * BF16
    rates = tuple(f"{rate:g} GB/s" for rate in gb_per_s)

    def row(what: str, size: float, sent: float | None) -> tuple[object, ...]:
        return (what, size, sent, *(sent / (rate * 1e9) if sent else None for rate in gb_per_s))

    found = (
        row("one token, forward", token, None),
        row(f"a prefill of 32 x {tokens:,} tokens", token * 32 * tokens, None),
        row(f"{tokens:,} tokens, both ways", payload, wire),
    )
    notes = (
        f"one token: 2 all-reduces a layer x {model.num_layers} layers x {model.hidden} x {BF16} bytes; backward as much again",
        f"a ring sends 2 x {degree - 1}/{degree} of the payload; with full recompute a half more",
    )
    return Table(
        f"Tensor parallel of {model.name} over {degree}, in bf16", ("what", "payload", "sent a rank", *rates), found, notes, frozenset(rates)
    )


# Layouts of one axis alone, what the axis cuts and where its ranks should lie, in people's words.
_AXES: tuple[tuple[str, dict[str, Any], dict[str, Any], str, str], ...] = (
    ("data, DDP", {"dp_replicate": 1}, {}, "the batch", "anywhere: it speaks once a step"),
    ("data, full shard", {"dp_shard": 1}, {"shard": "parameters"}, "the batch, parameters, gradients, state", "a node, or a fast fabric"),
    ("tensor", {"tp": 1}, {}, "the matrices of a layer", "inside a node"),
    ("tensor, sequence", {"tp": 1}, {"sequence_parallel": True}, "matrices, and the stream between blocks", "inside a node"),
    ("pipeline", {"pp": 1}, {}, "the layers", "between nodes"),
    ("context, ring", {"cp": 1}, {"context": "ring"}, "the tokens of a sequence", "next to tensor"),
    ("context, gathered", {"cp": 1}, {"context": "all_gather"}, "the tokens of a sequence", "next to tensor"),
    ("context, Ulysses", {"cp": 1}, {"context": "ulysses"}, "tokens, and heads inside attention", "next to tensor"),
    ("expert, full shard", {"dp_shard": 1, "ep": 1}, {"shard": "parameters"}, "the experts of a layer; the rest as full shard", "a node, or some"),
)


def axes(model: ModelSpec, degree: int = 8, seq_len: int = 4096) -> Table:
    """Each axis alone at one degree: what it cuts, and how often a rank speaks and what it sends in a step of one micro-batch.

    Axes that the model cannot be cut along are left out, and named in the notes.
    """
    rows, left_out = [], []
    for name, mesh, strategy, cuts, home in _AXES:
        layout = Layout(Mesh(**dict.fromkeys(mesh, degree)), **strategy)
        if wrong := problems(model, layout, Batch(seq_len=seq_len, micro_batch=1, global_batch=degree)):
            left_out.append(f"{name}: {wrong[0].what}")
            continue
        spoken = [r for r in ledger(rhythm(model, layout, Policy(), TRAVELS, seq=seq_len)) if r.phase != "step"]
        count, sent = sum(r.count for r in spoken), sum(r.wire_bytes for r in spoken)
        kinds = ", ".join(dict.fromkeys(r.kind for r in spoken))
        rows.append((name, cuts, str(count), kinds, sent, sent / count, home))
    notes = tuple(f"not for this model - {reason}" for reason in left_out)
    if model.experts:
        notes = ("experts: what goes to them and home is as much as a balanced router sends", *notes)
    title = f"The axes of {model.name} at degree {degree}: one micro-batch of {seq_len:,} tokens, forward and backward, in bf16"
    return Table(title, ("axis", "cuts", "speaks", "by", "sent a rank", "each time", "lives"), tuple(rows), notes)


def wire(model: ModelSpec, degrees: Sequence[int], precision: str = "bf16") -> Table:
    """What each strategy sends in a step of one micro-batch, by number of GPUs: per rank, and through the one NIC of a node of eight.

    Weights travel in the compute dtype and gradients in the reduce dtype of `precision`, so that `bf16` sends gradients in fp32.
    """
    strategies: tuple[tuple[str, Shard, Policy], ...] = (
        ("DDP", "none", Policy()),
        ("ZeRO-1", "optimizer", _ZERO),
        ("ZeRO-2", "gradients", _ZERO),
        ("full shard", "parameters", Policy()),
    )
    rows = []
    for name, shard, policy in strategies:
        cells: list[object] = []
        for degree in degrees:
            layout = Layout(Mesh(dp_replicate=degree) if shard == "none" else Mesh(dp_shard=degree), shard)
            cells += _sent(model, layout, ("all_reduce", "all_gather", "reduce_scatter"), policy, PRECISIONS[precision])
        rows.append((name, *cells))
    columns = ("strategy", *(column for degree in degrees for column in (f"rank of {degree}", f"NIC of {degree}")))
    notes = (
        "an all-reduce is a scatter and a gather: in one dtype DDP and ZeRO-1 send the same; in bf16 DDP sums in fp32 and ZeRO gathers bf16 weights",
        "with accumulation ZeRO-2 and full shard reduce every micro-batch, and full shard gathers every micro-batch; DDP and ZeRO-1 once a step",
        f"nodes of {GPUS_PER_NODE} GPUs with one NIC; groups inside one node pass none",
    )
    return Table(f"What {model.name} sends by strategy, per step of one micro-batch, {precision}", columns, tuple(rows), notes)


# Whole weights are kept over a step: gathered once.
_ZERO = Policy(reshard=False, keep_gathered=True)
