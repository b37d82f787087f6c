"""Keep: which checkpoint to go on from, which is the best, and which to let go."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pentamesh.checkpoint.disk import discard, retire
from pentamesh.checkpoint.manifest import MANIFEST, verify
from pentamesh.checkpoint.names import best_first, left, point_best, published, step_of
from pentamesh.checkpoint.phases import announce
from pentamesh.checkpoint.together import Group, first, place_in, together
from pentamesh.errors import Problem
from pentamesh.job.job import Checkpoint
from pentamesh.units import visible

__all__ = ["Retention", "agreed", "best", "newest", "prune"]


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the `newest` ones, those of steps that `every` divides, and the best, which is the one of the lowest held-out loss."""

    newest: int
    every: int | None = None
    best: bool = False

    @classmethod
    def of(cls, asked: Checkpoint) -> Retention:
        """What a job asks for."""
        return cls(asked.keep, asked.keep_every, asked.keep_best)

    def most(self, last: int, saved_every: int | None) -> int:
        """The most checkpoints that there are at once in a run that saves so often and at its `last` step, the one being written included."""
        num_saved = 1 + ((last - 1) // saved_every if saved_every else 0)
        for_good = 0
        if self.every:
            for_good = (last % self.every == 0) + ((last - 1) // math.lcm(saved_every, self.every) if saved_every else 0)
        return min(num_saved, self.newest + for_good + self.best + 1)


def newest(folder: Path, *, say: Callable[[str], object] | None = None) -> Path | None:
    """The newest published checkpoint that verifies, or None; why a newer one was passed over goes to `say`, or to stderr.

    It reads whole checkpoints, on this rank alone; `agreed` shares the work.
    """
    return _whole(published(folder), verify, say or sys.stderr.write)


def best(folder: Path, *, say: Callable[[str], object] | None = None) -> Path | None:
    """The published checkpoint with the lowest held-out loss of those that verify, or None where none has one; as `newest` otherwise."""
    return _whole([path for path, _ in best_first(published(folder))], verify, say or sys.stderr.write)


def agreed(folder: Path, *, say: Callable[[str], object] | None = None, group: Group = None) -> Path | None:
    """As `newest`, the same on all ranks: each checksums a share of the files, and the first speaks. Collective: every rank calls it."""
    rank, size = place_in(group)
    names = first("looking for checkpoints", lambda: [path.name for path in published(folder)], group)

    def shared(checkpoint: Path) -> list[Problem]:
        answers = together("verifying a checkpoint", lambda: verify(checkpoint, (rank, size)), group)
        return list(dict.fromkeys(problem for found in answers for problem in found))

    return _whole([folder / name for name in names], shared, (say or sys.stderr.write) if rank == 0 else (lambda _: None))


def _whole(candidates: list[Path], check: Callable[[Path], list[Problem]], say: Callable[[str], object]) -> Path | None:
    for checkpoint in candidates:
        problems = check(checkpoint)
        if not problems:
            return checkpoint
        say(visible("\n".join([f"passing over checkpoint {checkpoint.name}, which cannot be used:", *map(str, problems), ""])))
    return None


def prune(folder: Path, retention: Retention, good: Path | None = None) -> list[Path]:
    """Remove published checkpoints that nothing keeps, and what dead runs left; return those removed. Only the first rank acts.

    `good` is one known to be whole (just saved, or just loaded). It stays, and so do those of later steps: left from a run that was gone back from,
    they do not count among the newest and are written over. Without it what stays is verified, and if none of it holds, the newest whole one
    before stays too; where none is whole, nothing goes.
    """
    assert retention.newest >= 1
    if place_in()[0] != 0:
        return []
    announce("prune")
    found = published(folder)
    known = good if good is not None and good.name in {path.name for path in found} else None
    upto = step_of(known) if known else math.inf
    rest = _unkept([path for path in found if step_of(path) <= upto], retention, known)
    if rest and known is None and all(verify(path) for path in found if path not in rest):
        spared = next((path for path in rest if not verify(path)), None)
        rest = [path for path in rest if path != spared] if spared else []
    for path in reversed(rest):
        retire(path, MANIFEST)
    if rest:
        point_best([path for path in found if path not in rest and step_of(path) <= upto], folder)
    _sweep(folder, step_of(known or found[0]) if found else 0)
    return rest


def _unkept(found: list[Path], retention: Retention, good: Path | None) -> list[Path]:
    """Those of `found`, newest first, that may go. Of two of one step the older one may, and counts for nothing."""
    plain = [path for before, path in zip([None, *found], found, strict=False) if before is None or step_of(before) != step_of(path)]
    kept = {path.name for path in plain[: retention.newest]} | {good.name if good else ""}
    kept |= {path.name for path in plain if retention.every and step_of(path) % retention.every == 0}
    if retention.best:
        kept |= {path.name for path, _ in best_first(plain)[:1]}
    return [path for path in found if path.name not in kept]


def _sweep(folder: Path, step: int) -> None:
    """Remove what was being removed, and what was being written of steps before `step`: a run saves one step at a time."""
    for path, of, kind in left(folder):
        if kind == "removed" or of < step:
            discard(path)
