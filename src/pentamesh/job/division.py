"""How a batch and a sequence divide among ranks: what is left over, and the sizes near it that leave nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

__all__ = ["CONTEXT_WAYS", "ContextWay", "Uneven", "choice", "divisors", "sequence_pieces", "uneven_batch", "uneven_sequence"]

# How attention meets the keys that other context ranks hold: they pass by one block after the other, are all gathered, or (Ulysses) heads are
# exchanged for tokens.
ContextWay = Literal["ring", "all_gather", "ulysses"]
CONTEXT_WAYS: tuple[ContextWay, ...] = get_args(ContextWay)


def divisors(number: int) -> str:
    """The divisors of `number` as a choice, largest first: `8, 4, 2 or 1`."""
    return choice(n for n in range(number, 0, -1) if number % n == 0)


def choice(numbers: Iterable[int]) -> str:
    """Numbers, of which there is one at least, as a choice."""
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last


class Uneven(NamedTuple):
    """What does not divide, with its numbers, and the sizes that would."""

    what: str
    hint: str


def uneven_batch(global_batch: int, micro_batch: int, data_ranks: int) -> Uneven | None:
    """Whether `global_batch` sequences are no whole number of micro-batches on every one of `data_ranks`."""
    ranks = f" x data ranks = {micro_batch} x {data_ranks}" if data_ranks > 1 else ""
    return _uneven("global_batch", global_batch, micro_batch * data_ranks, f"micro_batch{ranks}")


def uneven_sequence(seq_len: int, context: int, tensor: int, way: ContextWay) -> Uneven | None:
    """Whether a sequence is no whole number of pieces over `context` ranks, and over `tensor` ranks that cut the stream (1 where none do)."""
    factors = _pieces(context, tensor, way)
    named = " x ".join(name for name, count in factors.items() if count > 1)
    return _uneven("seq_len", seq_len, math.prod(factors.values()), named)


def sequence_pieces(context: int, tensor: int, way: ContextWay) -> int:
    """Pieces that a sequence is cut into, of equal length."""
    return math.prod(_pieces(context, tensor, way).values())


def _pieces(context: int, tensor: int, way: ContextWay) -> dict[str, int]:
    """By what; where a context rank attends with its own queries it has an early and a late piece of them, so that all have as many keys to see."""
    return {"2": 2 if way != "ulysses" and context > 1 else 1, "context": context, "tensor": tensor}


def _uneven(key: str, size: int, unit: int, named: str) -> Uneven | None:
    if size % unit == 0:
        return None
    below = size // unit * unit
    works = " or ".join(str(near) for near in (below, below + unit) if near)
    return Uneven(f"{key} = {size} is not a multiple of {named} = {unit}", f"use {key} = {works}")
