"""One rank of a run: `python -m pentamesh.run.worker RUN_FOLDER [--resume] [--stop-at N]`, started by torchrun or by `pentamesh train`.

Whatever happens is written to the run folder's outcome.json, since torchrun itself always ends with 1.
"""

# ruff: noqa: E402 - some of this must come before torch is imported, which takes seconds

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

# torch's profiler, which measures the peak on CPU, announces itself on stderr otherwise; so does its allocator about blocks older than it.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Set by `pentamesh train` to its process id: the launcher prints the outcome once, so ranks keep quiet about theirs.
LAUNCHED = "PENTAMESH_LAUNCHED"
if __name__ == "__main__" and LAUNCHED in os.environ:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher's to tell, also while what follows is imported

import torch

from pentamesh.checkpoint.together import first
from pentamesh.errors import Drift, InputError, PentameshError, RunFailed
from pentamesh.job.started import environment
from pentamesh.plan.plan import Plan
from pentamesh.run.folder import RunFolder
from pentamesh.run.loop import Ending, run
from pentamesh.run.options import Options
from pentamesh.run.world import connect, join, leave

__all__ = ["LAUNCHED", "main", "work"]

# A rank outlives its launcher by no more than this.
LAUNCHER_POLL_S = 0.5


def work(prepare: Callable[[], RunFolder], options: Options) -> int:
    """Run this rank to its end and return its exit code. `prepare` makes the run folder with its plan, on rank 0; others wait for it."""
    folder: RunFolder | None = None
    rank = environment("RANK", 0)
    try:
        connect()
        folder = first("planning", prepare)
        plan = Plan.read(folder.plan)
        # A plan for the CPU runs there, whatever else the machine has.
        world = join(plan.layout, _device_kind(plan))
        ending = run(plan, folder, world, options)
        world.barrier()
        first("recording the outcome", lambda: _record(folder, plan, ending))
        leave()
    except Exception as error:
        _report(folder, rank, error)
        return error.exit_code if isinstance(error, PentameshError) else 5
    return Drift.exit_code if ending.drift else 0


def _record(folder: RunFolder, plan: Plan, ending: Ending) -> None:
    """Write how the run ended: collectives that were not as planned are told once all else is written."""
    if not ending.drift:
        folder.record_outcome(ending.outcome, 0, plan=plan.fingerprint)
        return
    problems = [asdict(problem) for problem in ending.drift]
    folder.record_outcome("drift", Drift.exit_code, kind="collectives", trained=ending.outcome, plan=plan.fingerprint, problems=problems)
    if LAUNCHED not in os.environ:
        print(Drift(*ending.drift), file=sys.stderr, flush=True)  # noqa: T201


def _device_kind(plan: Plan) -> str:
    """`cuda` or `cpu`, as planned. Raises InputError when a plan for GPUs meets a machine without."""
    kind, name = plan.hardware["device"]["kind"], plan.hardware["device"]["name"]
    if kind == "cuda" and not torch.cuda.is_available():
        hint = "run it where they are, or try the layout here with --set hardware=2xCPU"
        raise InputError(f"the plan is for {name}, and this machine has no CUDA device", where="hardware", hint=hint)
    return kind


def _report(folder: RunFolder | None, rank: int, error: Exception) -> None:
    """Record the failure; keep the traceback of what nobody expected in the run folder, out of the user's sight."""
    expected = isinstance(error, PentameshError)
    if folder is not None and folder.path.is_dir():
        if not expected:
            with suppress(OSError):  # a full disk
                (folder.path / f"traceback-rank-{rank}.txt").write_text("".join(traceback.format_exception(error)))
        folder.record_failure(rank, error)
    heard = LAUNCHED in os.environ and folder is not None and folder.read_outcome() is not None
    if not heard and (expected is False or rank == 0):
        text = str(error) if expected else f"error: rank {rank}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        print(text, file=sys.stderr, flush=True)  # noqa: T201


def _follow(launcher: int) -> None:
    """End with the launcher: a rank that outlives it is one that nobody waits for and nobody finds."""
    while os.getppid() == launcher:
        time.sleep(LAUNCHER_POLL_S)
    os._exit(RunFailed.exit_code)


def main() -> int:
    """Entry point of a rank whose run folder exists already."""
    parser = argparse.ArgumentParser(prog="python -m pentamesh.run.worker", description="One rank of a run whose plan is in RUN_FOLDER.")
    if LAUNCHED in os.environ:
        threading.Thread(target=_follow, args=(int(os.environ[LAUNCHED]),), daemon=True).start()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--stop-at", type=int)
    given = parser.parse_args()
    return work(lambda: RunFolder(given.folder), Options(given.resume, given.stop_at))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A rank that failed must not wait for peers while it shuts down.
    os._exit(code)
