"""Context parallel: how ranks that share a row let their queries see each other's keys.

ring        every rank's keys and values are passed round, one neighbour on while they are computed with: no rank has room for more than two parts
all_gather  all have all of them for the time of one attention
ulysses     queries, keys and values are exchanged for a part of the heads over the whole row, and what was seen of them back

Under the first two a rank has an early and a late run of the row, so that all have as many keys to look at; `layout.split` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName

from pentamesh.layout.split import folded_chunk
from pentamesh.run.world import World

__all__ = ["Alone", "Context", "Way", "context_of", "exchanged", "given_back", "way"]

_FUNCTIONAL = torch.ops._c10d_functional
# The runs of a row that some keys stand in, in the order in which they lie in memory.
Runs = tuple[range, ...]
# Of keys and values in some runs, their gradients.
Gradients = Callable[[Runs, torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]


class Context(NamedTuple):
    """How a row is shared, by the name of the process group that shares it."""

    how: str
    group: str
    degree: int
    rank: int


def context_of(world: World) -> Context | None:
    """How this rank's attention meets the others'; None where each row is one rank's. Collective: the group is made on first use."""
    degree = world.layout.mesh.cp
    if degree == 1:
        return None
    return Context(world.layout.context, world.group(("cp",)).group_name, degree, world.layout.mesh.coord(world.rank, ("cp",)))


def runs_of(length: int, rank: int, degree: int) -> Runs:
    """The early and the late run of a row of which each of `degree` ranks has `length` tokens."""
    return tuple(range(start, start + size) for start, size in folded_chunk(length * degree, rank, degree))


def way(how: str, group: str) -> Way:
    """How keys come to queries, by name; alone where there is none."""
    return _WAYS[how](dist.distributed_c10d._resolve_process_group(GroupName(group))) if how else Alone()


@dataclass(frozen=True)
class Alone:
    """A rank that has whole rows."""

    degree = 1

    def runs(self, length: int) -> Runs:
        """Where the `length` tokens of a row that this rank has stand in it."""
        return (range(length),)

    def turns(self, key: torch.Tensor, value: torch.Tensor) -> Iterator[tuple[Runs, torch.Tensor, torch.Tensor]]:
        """Keys and values, as they come, with the runs that they stand in. To be read to the end."""
        yield self.runs(key.shape[2]), key, value

    def home(self, key: torch.Tensor, value: torch.Tensor, gradients: Gradients) -> Sequence[torch.Tensor]:
        """The gradients of this rank's keys and values, of those that each rank has of what comes to it."""
        return gradients(self.runs(key.shape[2]), key, value)


@dataclass(frozen=True)
class _Shared:
    """What ring and all-gather have in common: messages of keys and values, token by token."""

    group: dist.ProcessGroup

    @property
    def degree(self) -> int:
        return self.group.size()

    def runs(self, length: int) -> Runs:
        return runs_of(length, self.group.rank(), self.degree)


class Ring(_Shared):
    """Keys and values go round; gradients follow those they belong to, each rank adding its own."""

    def turns(self, key: torch.Tensor, value: torch.Tensor) -> Iterator[tuple[Runs, torch.Tensor, torch.Tensor]]:
        rank, message = self.group.rank(), _message(key, value)
        spare = torch.empty_like(message)
        for hop in range(self.degree):
            passing = self._pass_on(message, spare) if hop < self.degree - 1 else None
            asked, given = _read(message, key, value)
            yield runs_of(key.shape[2], (rank - hop) % self.degree, self.degree), asked, given
            if passing:  # nobody needs any more what has been sent on: the next one comes there
                message, spare = passing.arrived(), message

    def home(self, key: torch.Tensor, value: torch.Tensor, gradients: Gradients) -> Sequence[torch.Tensor]:
        own: Sequence[torch.Tensor] = ()
        passing: _Passing | None = None
        for runs, asked, given in self.turns(key, value):
            found = gradients(runs, asked, given)
            if not own:
                own = found
                continue
            if passing:
                _add(found, passing.arrived())
            # Their home is one neighbour on when all others have added theirs.
            leaving, passing = _message(*(gradient.to(key.dtype) for gradient in found)), None
            del found
            passing = self._pass_on(leaving, torch.empty_like(leaving))
        if passing:
            _add(own, passing.arrived())
        return own

    def _pass_on(self, message: torch.Tensor, arriving: torch.Tensor) -> _Passing:
        rank = self.group.rank()
        there, here = (dist.get_global_rank(self.group, (rank + step) % self.degree) for step in (1, -1))
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, message, there, self.group), dist.P2POp(dist.irecv, arriving, here, self.group)])
        return _Passing(message, arriving, works)


class _Passing(NamedTuple):
    """A message on its way to the next rank while another comes from the one before; kept until both are through."""

    message: torch.Tensor
    arriving: torch.Tensor
    works: list[dist.Work]

    def arrived(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        return self.arriving


class Gathered(_Shared):
    """All keys and values are here at once, in the order of the row."""

    def turns(self, key: torch.Tensor, value: torch.Tensor) -> Iterator[tuple[Runs, torch.Tensor, torch.Tensor]]:
        asked, given = self._all(key, value)
        yield (range(asked.shape[2]),), asked, given

    def home(self, key: torch.Tensor, value: torch.Tensor, gradients: Gradients) -> Sequence[torch.Tensor]:
        ((runs, asked, given),) = self.turns(key, value)
        found = gradients(runs, asked, given)
        parts = key.new_empty((self.degree, key.numel() + value.numel()))
        for rank, part in enumerate(parts):
            for into, whole in zip(_read(part, key, value), found, strict=True):
                into.copy_(self._of(rank, whole, key.shape[2]))
        scattered = _FUNCTIONAL.reduce_scatter_tensor(parts.flatten(), "sum", self.degree, self.group.group_name)
        return _read(_FUNCTIONAL.wait_tensor(scattered), key, value)

    def _all(self, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
        """All keys and values, in the order of the row."""
        gathered = _FUNCTIONAL.all_gather_into_tensor(_message(key, value), self.degree, self.group.group_name)
        parts = _FUNCTIONAL.wait_tensor(gathered).chunk(self.degree)
        return [torch.cat(self._in_order(one), dim=2) for one in zip(*(_read(part, key, value) for part in parts), strict=True)]

    def _in_order(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The early runs of all ranks, then their late ones from the last rank to the first."""
        early, late = zip(*(part.chunk(2, dim=2) for part in parts), strict=True)
        return [*early, *reversed(late)]

    def _of(self, rank: int, whole: torch.Tensor, length: int) -> torch.Tensor:
        return torch.cat([whole[:, :, run.start : run.stop] for run in runs_of(length, rank, self.degree)], dim=2)


Way = Alone | Ring | Gathered
_WAYS: dict[str, Callable[[dist.ProcessGroup], Way]] = {"ring": Ring, "all_gather": Gathered}


def _message(*tensors: torch.Tensor) -> torch.Tensor:
    """Tensors [batch, heads, seq, head_dim], heads of one token beside each other as projections leave them, in one buffer."""
    return torch.cat([t.transpose(1, 2).flatten() for t in tensors])


def _read(message: torch.Tensor, *like: torch.Tensor) -> list[torch.Tensor]:
    parts = message.split([t.numel() for t in like])
    return [part.view(t.transpose(1, 2).shape).transpose(1, 2) for part, t in zip(parts, like, strict=True)]


def _add(found: Sequence[torch.Tensor], message: torch.Tensor) -> None:
    for own, came in zip(found, _read(message, *found), strict=True):
        own.add_(came)


# Ulysses


def exchanged(context: Context, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of queries, keys and values of a part of each row, all their tokens of a part of the heads, in one all-to-all.

    Shapes: [batch, heads, seq / degree, head_dim] each; returned [batch, heads / degree, seq, head_dim].
    """
    return tuple(t.transpose(1, 2) for t in _Exchange.apply(context, *(t.transpose(1, 2) for t in tensors)))


def given_back(context: Context, out: torch.Tensor) -> torch.Tensor:
    """What the queries of a part of the heads have seen, for that of a part of each row.

    Shapes: [batch, seq, heads / degree, head_dim]; returned [batch, seq / degree, heads, head_dim].
    """
    return _GiveBack.apply(context, out)


class _Exchange(torch.autograd.Function):
    """A part of the tokens for a part of the heads, and in backward the reverse."""

    @staticmethod
    def forward(ctx: Any, context: Context, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.context = context
        return tuple(_to_heads(context, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, *_to_tokens(ctx.context, gradients)


class _GiveBack(torch.autograd.Function):
    """A part of the heads for a part of the tokens, and in backward the reverse."""

    @staticmethod
    def forward(ctx: Any, context: Context, out: torch.Tensor) -> torch.Tensor:
        ctx.context = context
        return _to_tokens(context, (out,))[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, _to_heads(ctx.context, (gradient,))[0]


def _to_heads(context: Context, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Shapes: [batch, seq / degree, heads, head_dim] each; returned [batch, seq, heads / degree, head_dim]."""
    parts = [t.unflatten(2, (context.degree, -1)).movedim(2, 0) for t in tensors]
    return [came.movedim(0, 1).flatten(1, 2) for came in _all_to_all(context, parts)]


def _to_tokens(context: Context, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Shapes: [batch, seq, heads / degree, head_dim] each; returned [batch, seq / degree, heads, head_dim]."""
    parts = [t.unflatten(1, (context.degree, -1)).movedim(1, 0) for t in tensors]
    return [came.movedim(0, 2).flatten(2, 3) for came in _all_to_all(context, parts)]


def _all_to_all(context: Context, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each rank's part of each tensor for that rank's, in one buffer: [degree, ...] each."""
    sent = torch.cat([part.flatten(1) for part in parts], dim=1)
    rows = [1] * context.degree
    came = _FUNCTIONAL.wait_tensor(_FUNCTIONAL.all_to_all_single(sent, rows, rows, context.group))
    return [one.view(part.shape) for one, part in zip(came.split([part[0].numel() for part in parts], dim=1), parts, strict=True)]
