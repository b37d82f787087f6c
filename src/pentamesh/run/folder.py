"""The run folder: what every run leaves, under fixed names.

job.yaml        the job as it was asked, overrides included
plan.json       the promise
base/           the model that a GGUF file was unpacked to
grown/          the model with its new tokens
data/           prepared samples; of a stream the held-out ones
stream/         the chunks of a stream that are in use, and a line of each that was
metrics.jsonl   one line a step
held_out.jsonl  one line an evaluation, the one before the first step included
checkpoints/    step-00000050/ ...
receipt.json    predicted, measured and their ratio
outcome.json    how it ended, and the exit code
run.lock        locked by the process that writes here
tensorboard/    metrics.jsonl as event files, where asked for
export/         the model as a Hugging Face folder
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from pentamesh.checkpoint.disk import location
from pentamesh.errors import InputError, PentameshError, Problem, RunFailed

__all__ = ["METRICS_SCHEMA", "OUTCOME_SCHEMA", "RunFolder", "write_json"]

METRICS_SCHEMA = {"schema": "pentamesh.metrics", "version": 1}
HELD_OUT_SCHEMA = {"schema": "pentamesh.held_out", "version": 1}
OUTCOME_SCHEMA = {"schema": "pentamesh.outcome", "version": 1}


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run. `kept_in` is where its job keeps checkpoints, if elsewhere; its plan.json says so too, once it is there."""

    path: Path
    kept_in: str | None = None

    @property
    def job(self) -> Path:
        return self.path / "job.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def base(self) -> Path:
        return self.path / "base"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def stream(self) -> Path:
        return self.path / "stream"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The run's own folder of that name, or the one, perhaps a URL, that its job names."""
        elsewhere = self.kept_in or self._planned_folder()
        return location(elsewhere) if elsewhere else self.path / "checkpoints"

    def _planned_folder(self) -> str | None:
        try:
            return json.loads(self.plan.read_text())["job"]["checkpoint"].get("folder")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    @property
    def receipt(self) -> Path:
        return self.path / "receipt.json"

    @property
    def outcome(self) -> Path:
        return self.path / "outcome.json"

    @property
    def export(self) -> Path:
        return self.path / "export"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def held_out(self) -> Path:
        return self.path / "held_out.jsonl"

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Add one step's line."""
        _append(self.metrics, METRICS_SCHEMA | row)

    def append_held_out(self, row: dict[str, Any]) -> None:
        """Add one evaluation's line."""
        _append(self.held_out, HELD_OUT_SCHEMA | row)

    def rewind(self, step: int) -> None:
        """Drop the lines after `step`, and a last one that a crash cut short: a resumed run writes them again. What dead runs were writing goes."""
        for left in self.path.glob("*.*.partial"):
            left.unlink(missing_ok=True)
        for path in (self.metrics, self.held_out):
            if path.exists():
                kept = [line for line in path.read_text(errors="replace").splitlines() if (at := _step_of(line)) is not None and at <= step]
                _replace(path, "".join(line + "\n" for line in kept))

    def record_failure(self, rank: int, error: BaseException) -> None:
        """Write how the run failed, if it can be written. What pentamesh refused on purpose outranks what another rank only felt as a lost peer."""
        on_purpose = isinstance(error, PentameshError)
        if self.outcome.exists() and not on_purpose:
            return
        problems = error.problems if isinstance(error, PentameshError) else (_unexpected(error, rank),)
        code = error.exit_code if isinstance(error, PentameshError) else RunFailed.exit_code
        with suppress(OSError):  # a full disk must not hide what happened from who reads the terminal
            self.record_outcome("failed", code, rank=rank, problems=[asdict(problem) for problem in problems])

    def record_outcome(self, outcome: str, exit_code: int, **facts: Any) -> None:
        """Write outcome.json: `done`, `stopped` (asked to), `interrupted` (by a signal), `failed`, or `drift`, and the exit code.

        A run that drifted was trained to its end, with collectives that its plan does not have.
        """
        write_json(self.outcome, OUTCOME_SCHEMA | {"outcome": outcome, "exit_code": exit_code} | facts)

    def read_outcome(self) -> dict[str, Any] | None:
        """What outcome.json says, or None where there is none that can be read."""
        try:
            found = json.loads(self.outcome.read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and "outcome" in found else None

    def claim(self) -> None:
        """Keep every other run out of the folder until this process ends, however it ends. Raises InputError where another one is at work."""
        lock = (self.path / "run.lock").open("a+")
        if (file := _file(lock)) in _claims:
            lock.close()
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            raise InputError(
                f"a run is at work in {self.path}: {holder}", where="logging.folder", hint="wait for it, or choose another folder"
            ) from None
        except OSError:
            return  # a file system without locks
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {platform.node()}\n")
        lock.flush()
        _claims[file] = lock


# Open for as long as this process lives: the system releases a lock with its file.
_claims: dict[tuple[int, int], TextIO] = {}


def _file(opened: TextIO) -> tuple[int, int]:
    """Which file this is, under whatever name: device and inode."""
    stat = os.fstat(opened.fileno())
    return stat.st_dev, stat.st_ino


def _unexpected(error: BaseException, rank: int) -> Problem:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return Problem(error.strerror, f"{error.filename} (rank {rank})")
    return Problem(f"{type(error).__name__}: {error}", f"rank {rank}")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON at once: the file is whole or absent. What is not finite, JSON has no number for: it becomes null."""
    _replace(path, json.dumps(_finite(content), indent=2, allow_nan=False) + "\n")


def _step_of(line: str) -> int | None:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _append(path: Path, row: dict[str, Any]) -> None:
    """One line in one write, so that neither a reader nor a crash sees half of it. Raises RunFailed where it cannot be written."""
    line = json.dumps(_finite(row), allow_nan=False) + "\n"
    try:
        with path.open("a") as file:
            file.write(line)
    except OSError as error:
        hint = "free some disk; --resume goes on from the newest checkpoint"
        raise RunFailed(f"{path.name} cannot be written: {error.strerror}", where=str(path), hint=hint) from error


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(text)
    os.replace(partial, path)
