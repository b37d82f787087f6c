"""Crossings: collectives that happen in a step and how often, counted together to the rows of a ledger; and the activations that cross."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from pentamesh.layout.mesh import DATA_AXES, Layout
from pentamesh.layout.moves import Move
from pentamesh.model.dims import Dim, TensorSpec
from pentamesh.model.spec import ModelSpec

__all__ = ["COUNT_BYTES", "Crossing", "LedgerRow", "activation", "fused", "ledger"]

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


def fused(crossed: Iterable[tuple[Move, ...]]) -> tuple[Move, ...]:
    """Several tensors in one buffer: their moves of the same kind and group are one, of their bytes together."""
    together: Counter[tuple[str, tuple[str, ...], int]] = Counter()
    for move in (move for moved in crossed for move in moved):
        together[move.kind, move.axes, move.num_ranks] += move.bytes
    return tuple(Move(*key, num_bytes) for key, num_bytes in together.items())


def activation(name: str, model: ModelSpec, layout: Layout, batch: int, seq: int, last: tuple[str, ...], sequence: str = "seq") -> TensorSpec:
    """A named activation of one micro-batch over the whole mesh: [batch x data ranks, sequence, last]. Of heads there are queries and what attention
    gives (`given`), of key heads keys and `values`."""
    given = model.given_dim
    sizes = {
        "hidden": Dim("hidden", model.hidden),
        "heads": Dim("heads", model.num_heads * model.head_dim, model.head_dim),
        "given": Dim("heads", model.num_heads * given, given),
        "kv_heads": Dim("kv_heads", model.num_kv_heads * model.head_dim, model.head_dim),
        "values": Dim("kv_heads", model.num_kv_heads * given, given),
    }
    whole_batch = batch * layout.mesh.degree(*DATA_AXES)
    return TensorSpec(name, (Dim("batch", whole_batch), Dim(sequence, seq), *(sizes[dim] for dim in last)))
