"""Saver: the saves of a run, one at a time, beside its steps.

    begin     waits for the save before, copies the state to host memory, and returns: a step is held up for the copy alone
    (beside)  a thread brings the copy to disk, verifies and publishes it, in a process group of its own
    proved    a step from the weights that were saved was sound: checkpoints that nothing keeps any more may go
    settle    waits for the save on its way

A save that fails is said, and the next one is tried when it is due: what is published stays, and a disk that was full may be emptied. The third
failure in a row ends the run, and so does that of the last save.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pentamesh.checkpoint.copies import HostCopy
from pentamesh.checkpoint.keep import Retention, prune
from pentamesh.checkpoint.manifest import Manifest
from pentamesh.checkpoint.phases import announce
from pentamesh.checkpoint.save import save
from pentamesh.checkpoint.together import place_in
from pentamesh.errors import PentameshError, Problem, RunFailed, reason
from pentamesh.units import format_bytes, format_seconds

__all__ = ["MAX_FAILED_SAVES", "Saved", "Saver"]

MAX_FAILED_SAVES = 3
# What a run that ends in an error waits for a save on its way, whose peers may be gone.
_LAST_CHANCE_S = 60.0


@dataclass(frozen=True)
class Saved:
    """What one save took: seconds in which the run stood still, and seconds until it was published."""

    step: int
    blocked_s: float
    total_s: float


class Saver:
    """Saves of one run into `folder`. Made, and every method called, by all ranks alike."""

    def __init__(self, folder: Path, retention: Retention, *, asynchronous: bool, say: Callable[[str], object]) -> None:
        self.saved: list[Saved] = []
        self._folder, self._retention, self._asynchronous, self._say = folder, retention, asynchronous, say
        # Collectives of the thread beside those of the steps: never in one group.
        self._group: Any = dist.new_group(backend="gloo") if place_in()[1] > 1 else None
        self._is_first = place_in()[0] == 0
        self._copy = HostCopy()
        self._flight: _Flight | None = None
        self._num_failed = 0

    @property
    def copy_bytes(self) -> int:
        """Host memory that the copy of a state takes from the first save on."""
        return self._copy.num_bytes

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """A run that ends in an error gives the save on its way a little time."""
        flight, self._flight = self._flight, None
        if flight is not None and kind is not None:
            self._decide(flight, proved=False)
            if flight.thread is not None:
                flight.thread.join(_LAST_CHANCE_S)

    def begin(self, step: int, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        """Save the state of `step`. Raises RunFailed when this would have been tried in vain MAX_FAILED_SAVES times."""
        started = time.monotonic()
        self._land(proved=False)
        announce("copy")
        flight = self._flight = _Flight(step, started)
        if not self._asynchronous:
            self._fly(flight, tensors, facts)
            return
        copied = self._copy.of(tensors)
        flight.thread = threading.Thread(target=self._fly, args=(flight, copied, facts), name=f"save-{step}", daemon=True)
        flight.blocked_s = time.monotonic() - started
        flight.thread.start()

    def proved(self) -> None:
        """A step after the newest save was sound."""
        if self._flight is not None:
            self._decide(self._flight, proved=True)

    def settle(self, *, proved: bool) -> None:
        """Wait for the save on its way, the last one. Raises RunFailed where it could not be made.

        Where nothing was saved, a run that had done its work was killed before older checkpoints went: they go now.
        """
        if self._flight is None and proved:
            self._let_go(None)
            return
        failed = self._land(proved=proved)
        if failed is not None:
            raise failed

    def _fly(self, flight: _Flight, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        try:
            flight.path = save(self._folder, flight.step, tensors, facts, group=self._group)
        except Exception as error:
            flight.error = error if isinstance(error, PentameshError) else RunFailed(Problem(f"{type(error).__name__}: {reason(error)}", "saving"))
            if self._is_first:
                self._say(f"the checkpoint of step {flight.step} could not be saved: {flight.error}")
            return
        total_s = time.monotonic() - flight.started
        self.saved.append(Saved(flight.step, flight.blocked_s if self._asynchronous else total_s, total_s))
        if self._is_first:
            self._say(_said(flight.path, self.saved[-1]))
        if self._asynchronous and self._is_first:
            flight.decided.wait()
            if flight.is_proved:
                self._let_go(flight.path)

    def _decide(self, flight: _Flight, *, proved: bool) -> None:
        if not flight.decided.is_set():
            flight.is_proved = proved
            flight.decided.set()
            if not self._asynchronous and proved and flight.path is not None:
                self._let_go(flight.path)

    def _let_go(self, good: Path | None) -> None:
        """Remove what nothing keeps any more. What cannot be removed is said, and tried again after the next save."""
        try:
            prune(self._folder, self._retention, good=good)
        except Exception as error:  # a library of an object store has its own
            self._say(f"older checkpoints could not be removed: {type(error).__name__}: {reason(error)}")

    def _land(self, *, proved: bool) -> PentameshError | None:
        """Wait for the save on its way, and return what it failed of. Raises RunFailed after too many failures in a row."""
        flight, self._flight = self._flight, None
        if flight is None:
            return None
        self._decide(flight, proved=proved)
        if flight.thread is not None:
            flight.thread.join()
        self._num_failed = 0 if flight.error is None else self._num_failed + 1
        if flight.error is not None and self._num_failed == MAX_FAILED_SAVES:
            raise RunFailed(*flight.error.problems, Problem(f"{MAX_FAILED_SAVES} checkpoints in a row could not be saved", str(self._folder)))
        return flight.error


def _said(checkpoint: Path, took: Saved) -> str:
    size = format_bytes(Manifest.read(checkpoint).num_bytes)
    return f"saved {checkpoint.name}: {size} in {format_seconds(took.total_s)}, of which steps waited {format_seconds(took.blocked_s)}"


@dataclass
class _Flight:
    """One save on its way."""

    step: int
    started: float
    thread: threading.Thread | None = None
    decided: threading.Event = field(default_factory=threading.Event)
    is_proved: bool = False
    path: Path | None = None
    error: PentameshError | None = None
    blocked_s: float = 0.0
