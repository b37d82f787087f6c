"""What a step needs, as values: memory by part and stage, time with its interval, communication by axis and kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["BEST_FIRST", "Communication", "Memory", "Range", "Stage", "Time", "Verdict"]

Verdict = Literal["fits", "at_risk", "does_not_fit"]
BEST_FIRST: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True)
class Range:
    """A prediction with its interval."""

    low: float
    expected: float
    high: float


@dataclass(frozen=True)
class Stage:
    """Memory of one rank of one pipeline stage, by part, in bytes."""

    stage: int
    peak_bytes: Range
    states_bytes: int
    parts_bytes: dict[str, int]


@dataclass(frozen=True)
class Memory:
    """Memory of the fullest rank; `stages` has every stage's. `host_bytes` wait in host memory, of `host_usable_bytes` where that is known.

    `copy_bytes` are a rank's share of the copy that is saved beside the steps; none where they wait for a save, or none is due among them.
    """

    usable_bytes: int
    peak_bytes: Range
    states_bytes: int
    parts_bytes: dict[str, int]
    stages: tuple[Stage, ...] = ()
    host_bytes: int = 0
    host_usable_bytes: int | None = None
    copy_bytes: int = 0


@dataclass(frozen=True)
class Time:
    """Seconds of one optimizer step."""

    step_s: Range
    compute_s: float
    exposed_communication_s: float
    bubble_s: float = 0.0


@dataclass(frozen=True)
class Communication:
    """One kind of collective over one axis in one step: `bytes_per_rank` is what a rank sends, all of them together."""

    axis: str
    kind: str
    count: int
    bytes_per_rank: int
    link: str
    seconds: float
    exposed_s: float
