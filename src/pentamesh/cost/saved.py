"""Saved: one tensor that waits for backward, by named dims, so that `split` says what a rank holds of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from pentamesh.job.precision import ITEMSIZE
from pentamesh.layout.mesh import DATA_AXES, Layout, Mesh
from pentamesh.layout.split import split
from pentamesh.model.dims import Dim, TensorSpec
from pentamesh.model.roles import Role
from pentamesh.model.spec import ModelSpec

__all__ = ["FLOAT32", "INT64", "Amount", "Saved", "Shapes", "amount", "held", "local_bytes", "local_tokens"]

FLOAT32 = ITEMSIZE["float32"]
INT64 = 8


@dataclass(frozen=True)
class Saved:
    """One tensor that waits for backward: its dims over the whole mesh, where it lives, and bytes per element. `routed` says that a router decides
    how much of it there is; then it is as much as a balanced one leaves."""

    name: str
    dims: tuple[Dim, ...]
    role: Role
    itemsize: int
    routed: bool = False


@dataclass(frozen=True)
class Shapes:
    """Dims of one micro-batch over the whole mesh."""

    model: ModelSpec
    layout: Layout
    micro_batch: int
    seq_len: int

    def __call__(self, *last: Dim) -> tuple[Dim, ...]:
        return (Dim("batch", self.micro_batch * self.layout.mesh.degree(*DATA_AXES)), Dim("seq", self.seq_len), *last)

    @property
    def exchanges(self) -> bool:
        """Whether attention works on heads of whole rows."""
        return self.layout.mesh.cp > 1 and self.layout.context == "ulysses"

    @property
    def hidden(self) -> Dim:
        return Dim("hidden", self.model.hidden)

    @property
    def q(self) -> Dim:
        return self._heads("heads", self.model.num_heads, self.model.head_dim)

    @property
    def k(self) -> Dim:
        return self._heads("kv_heads", self.model.num_kv_heads, self.model.head_dim)

    @property
    def v(self) -> Dim:
        return self._heads("kv_heads", self.model.num_kv_heads, self.model.given_dim)

    @property
    def kv(self) -> Dim:
        """Keys and values together."""
        return self._heads("kv_heads", self.model.num_kv_heads, self.model.head_dim + self.model.given_dim)

    @property
    def out(self) -> Dim:
        """What heads give: as many elements each as their values have."""
        return self._heads("heads", self.model.num_heads, self.model.given_dim)

    @staticmethod
    def _heads(name: str, count: int, each: int) -> Dim:
        return Dim(name, count * each, each)


@dataclass(frozen=True, slots=True)
class Amount:
    """Bytes that are there whatever a router does, and those of rows that come to experts as under a balanced one."""

    fixed: int = 0
    routed: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.fixed + other.fixed, self.routed + other.routed)

    def __mul__(self, times: float) -> Amount:
        return Amount(round(self.fixed * times), round(self.routed * times))

    def at(self, imbalance: float) -> float:
        """All of it where so many times as many rows come."""
        return self.fixed + self.routed * imbalance


def amount(saved: Iterable[Saved], layout: Layout) -> Amount:
    """What the fullest rank holds of all of `saved`."""
    listed = tuple(saved)
    return Amount(*(local_bytes((s for s in listed if s.routed is routed), layout) for routed in (False, True)))


@lru_cache(maxsize=4096)
def held(listed: Callable[..., tuple[Saved, ...]], model: ModelSpec, layout: Layout, *asked: object, **named: object) -> Amount:
    """What the fullest rank holds of what a function such as `activations.block` lists. Layouts and policies ask for the same again and again: of the
    data axes only whether they part experts matters, since a micro-batch is a data rank's own."""
    return _held(listed, model, _of_tokens(layout), *asked, **named)


@lru_cache(maxsize=4096)
def _held(listed: Callable[..., tuple[Saved, ...]], model: ModelSpec, layout: Layout, *asked: object, **named: object) -> Amount:
    return amount(listed(model, layout, *asked, **named), layout)


@lru_cache(maxsize=1024)
def _of_tokens(layout: Layout) -> Layout:
    """A layout in which activations are held as in this one."""
    parted = 2 if layout.mesh.ep > 1 else 1
    return replace(layout, mesh=Mesh(dp_shard=parted, cp=layout.mesh.cp, tp=layout.mesh.tp, ep=parted), shard="none")


def local_bytes(saved: Iterable[Saved], layout: Layout) -> int:
    """Bytes that the fullest rank holds of all of `saved`, of what is routed as under a balanced router."""
    return sum(split(TensorSpec(s.name, s.dims), s.role, layout).max_local_numel * s.itemsize for s in saved)


def local_tokens(layout: Layout, micro_batch: int, seq_len: int) -> int:
    """Tokens of a micro-batch that one rank computes: context ranks share a sequence."""
    return micro_batch * -(-seq_len // layout.mesh.cp)
