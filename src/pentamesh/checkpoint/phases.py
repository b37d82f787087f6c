"""Phases: what a run is doing to its checkpoints right now, told to whoever listens; trials that kill a run at a certain moment do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

__all__ = ["PHASES", "Phase", "announce", "listeners"]

# A step of training; the copy of a state to host memory; its way to disk; the manifest and the name; removing older ones; reading one back.
Phase = Literal["train", "copy", "flush", "publish", "prune", "restore"]
PHASES: tuple[Phase, ...] = get_args(Phase)

# Called with each phase as it begins, on the thread that is in it.
listeners: list[Callable[[Phase], object]] = []


def announce(phase: Phase) -> None:
    """Tell the listeners that a phase begins on this rank."""
    for listener in listeners:
        listener(phase)
