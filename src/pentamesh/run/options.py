"""Options: how one start of a run differs from a plain one. They belong to the start, not to the job."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """`resume` goes on from the newest good checkpoint; `stop_at` saves and stops after that step."""

    resume: bool = False
    stop_at: int | None = None
