"""What it takes that context ranks meet each other's keys: buffers beside what is kept for backward, and the traffic of filling them."""

from __future__ import annotations

from pentamesh.cost.saved import FLOAT32, Saved, Shapes, local_bytes
from pentamesh.job.precision import ITEMSIZE
from pentamesh.layout.mesh import Layout
from pentamesh.model.dims import Dim
from pentamesh.model.roles import Role
from pentamesh.model.spec import ModelSpec

__all__ = ["copying_bytes", "meeting"]


def meeting(model: ModelSpec, layout: Layout, micro_batch: int, seq_len: int, compute: str, *, backward: bool) -> tuple[Saved, ...]:
    """What the attention of one layer holds of a micro-batch for the sake of the other context ranks; nothing where there are none."""
    if layout.mesh.cp == 1 or not model.is_described:
        return ()
    shapes, size = Shapes(model, layout, micro_batch, seq_len), ITEMSIZE[compute]
    batch, seq = shapes()
    keys = (batch, Dim("kv_seq", seq.size), shapes.kv)
    how = {"ring": _passing, "all_gather": _gathering, "ulysses": _exchanging}[layout.context]
    return how(shapes(shapes.q), keys, shapes(shapes.out), size, max(FLOAT32, size), backward)


# Dims of an activation over the whole mesh.
Dims = tuple[Dim, ...]


def _passing(queries: Dims, keys: Dims, out: Dims, size: int, wide: int, backward: bool) -> tuple[Saved, ...]:
    """Two blocks of keys and values, that at hand and that arriving, and the output over all blocks, summed in float32. Backward sums the gradients
    of queries and of the rank's own keys and values instead, beside those of the block at hand, and has those of a block that leave and that arrive.

    Source: Ring Attention (arXiv 2310.01889) section 3.
    """
    there = tuple(Saved(f"keys and values {where}", keys, Role.USE, size) for where in ("at hand", "arriving"))
    if not backward:
        return (*there, Saved("output of all blocks", out, Role.USE, wide))
    whose = (Saved(f"gradients of {which}", keys, Role.USE, wide) for which in ("own keys and values", "those at hand"))
    return (
        *there,
        Saved("gradient of queries", queries, Role.USE, wide),
        *whose,
        *(Saved(f"gradients {where}", keys, Role.USE, size) for where in ("leaving", "arriving")),
    )


def _gathering(_queries: Dims, keys: Dims, _out: Dims, size: int, wide: int, backward: bool) -> tuple[Saved, ...]:
    """All keys and values; backward gathers them again, and their gradient is whole, in float32 and as it is sent.

    Source: Llama 3 (arXiv 2407.21783) section 3.3.2.
    """
    whole = Saved("all keys and values", keys, Role.ATTEND, size)
    gradients = (Saved("their gradients", keys, Role.ATTEND, wide), Saved("their gradients as sent", keys, Role.ATTEND, size))
    return (whole, *(gradients if backward else ()))


def _exchanging(queries: Dims, keys: Dims, out: Dims, size: int, _wide: int, backward: bool) -> tuple[Saved, ...]:
    """What is exchanged, once more on the other side: queries, keys and values; backward their gradients on both sides, and the output's.

    Source: DeepSpeed Ulysses (arXiv 2309.14509) section 3.
    """
    what = (Saved("queries", queries, Role.USE, size), Saved("keys and values", keys, Role.USE, size))
    sides = [f"{side} the exchange" for side in ("before", "after")] if backward else ["before the exchange"]
    found = tuple(Saved(f"{saved.name} {side}", saved.dims, saved.role, size) for side in sides for saved in what)
    return (*found, *((Saved("gradient of the output", out, Role.USE, size),) if backward else ()))


def copying_bytes(model: ModelSpec, layout: Layout, micro_batch: int, seq_len: int, compute: str) -> float:
    """What a context rank reads and writes of its memory for that in one layer, forward and backward: counted, operand by operand.

    A ring adds the output for each block of keys to a sum in float32, and backward the gradients of queries, keys and values. Of gathered keys the
    gradient is whole, in float32, and cast. Ulysses orders what it sends by ranks and what comes by tokens: queries, keys, values and the output.
    """
    if layout.mesh.cp == 1:
        return 0.0
    size, cp, shapes = ITEMSIZE[compute], layout.mesh.cp, Shapes(model, layout, micro_batch, seq_len)
    queries, pairs, out = (local_bytes((Saved("elements", shapes(dim), Role.USE, 1),), layout) for dim in (shapes.q, shapes.kv, shapes.out))
    return {
        "ring": cp * (2 * FLOAT32 + size) * (queries + out + pairs),
        "all_gather": cp * (2 * FLOAT32 + size) * pairs,
        "ulysses": 2 * 4 * size * (queries + out + pairs),
    }[layout.context]
