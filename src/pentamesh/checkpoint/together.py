"""Together: what one rank cannot do, no rank goes on from; an error on one rank is raised on all, so that none waits for another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from pentamesh.checkpoint.alone import awaited, working
from pentamesh.errors import InputError, PentameshError, Problem, RunFailed

__all__ = ["Group", "first", "place_in", "together"]

T = TypeVar("T")
Group = dist.ProcessGroup | None


def place_in(group: Group = None) -> tuple[int, int]:
    """This rank's position in the group and the group's size; (0, 1) where no process group exists."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def together(doing: str, action: Callable[[], T], group: Group = None) -> list[T]:
    """What `action` returned on every rank, in rank order. Collective: every rank of the group calls it.

    Raises on all ranks when it failed on any: InputError where every failure is one, else RunFailed, with the problems of all ranks.
    """
    rank, size = place_in(group)
    problems: tuple[Problem, ...] = ()
    result, expected = None, True
    try:
        result = action()
    except Exception as error:
        problems, expected = _problems(error, doing, rank, size), isinstance(error, InputError)
    everyone: list[Any] = [(result, problems, expected)]
    if size > 1:
        everyone = [None] * size
        dist.all_gather_object(everyone, (result, problems, expected), group)
    if failed := dict.fromkeys(problem for _, found, _ in everyone for problem in found):
        raise (InputError if all(expected for _, _, expected in everyone) else RunFailed)(*failed)
    return [result for result, _, _ in everyone]


def first(doing: str, action: Callable[[], T], group: Group = None) -> T:
    """What `action` returned on the first rank, which alone runs it, for as long as it takes. Collective, and raises as `together` does."""
    rank, size = place_in(group)
    if size == 1:
        return together(doing, action, group)[0]
    meets = group or dist.distributed_c10d._get_default_group()
    if rank != 0:
        awaited(meets, doing)
        return together(doing, lambda: None, group)[0]  # type: ignore[return-value]

    def alone() -> T:
        with working(meets):
            return action()

    return together(doing, alone, group)[0]


def _problems(error: Exception, doing: str, rank: int, size: int) -> tuple[Problem, ...]:
    if isinstance(error, PentameshError) and error.problems:
        return error.problems
    reason = str(error).strip().splitlines() or [""]
    where = f"rank {rank} of {size}" + (f"  {error.filename}" if isinstance(error, OSError) and error.filename else "")
    return (Problem(f"{doing} failed: {type(error).__name__}: {reason[-1]}", where),)
