"""`pentamesh train`: plan the job, keep the plan, start one process a device through torchrun's agent, and say how it ended."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from pentamesh.checkpoint.manifest import Manifest, misnamed
from pentamesh.checkpoint.names import published
from pentamesh.errors import DoesNotFit, Drift, InputError, PentameshError, Problem, RunFailed
from pentamesh.plan.plan import Plan
from pentamesh.run.asked import Asked, planned
from pentamesh.run.folder import RunFolder
from pentamesh.run.options import Options
from pentamesh.run.resumed import resumed
from pentamesh.run.slurm import adopt
from pentamesh.run.worker import LAUNCHED, work
from pentamesh.units import format_bytes, format_path

__all__ = ["keep", "train"]


def train(ask: Callable[[], Asked], options: Options, *, even_so: bool = False) -> int:
    """Run what `ask` gives to its end and return the exit code.

    Among the processes that torchrun or srun started this one is a rank, and the first one asks; otherwise it starts them all. Raises
    PentameshError with the cause of a failure.
    """
    adopt()
    if "RANK" in os.environ:
        return work(lambda: keep(ask(), options, even_so), options)
    folder = keep(ask(), options, even_so, here=True)
    return _start_ranks(folder, Plan.read(folder.plan).layout.mesh.num_ranks, options)


def keep(asked: Asked, options: Options, even_so: bool, *, here: bool = False) -> RunFolder:
    """Plan, refuse what does not fit (nor, if it is to start `here`, on this machine), and write the run folder."""
    plan = planned(asked)
    if here:
        _check_machine(plan)
    _say_verdict(plan, even_so)
    folder = RunFolder(Path(str(plan.job.logging.folder)), plan.job.checkpoint.folder)
    if asked.file is not None and asked.file.resolve() in (folder.job.resolve(), folder.plan.resolve()):
        raise InputError(
            f"the run folder {format_path(folder.path)} is where {asked.file.name} lies, which the run would overwrite",
            where="logging.folder",
            hint="name another folder, or leave logging.folder out",
        )
    plan = resumed(folder, plan, resume=options.resume)
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.claim()
        plan.write(folder.plan)
        folder.job.write_text(yaml.safe_dump(plan.job.model_dump(mode="json"), sort_keys=False))
        folder.outcome.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"the run folder cannot be written: {error.strerror}", where=format_path(folder.path), hint="set logging.folder to one that can"
        ) from error
    return folder


# Processes that a core may have to share: layouts are tried on a laptop, a cluster is not.
MAX_PROCESSES_PER_CORE = 8


def _check_machine(plan: Plan) -> None:
    """Raises InputError when this machine has not the devices that the plan would start a process for."""
    import torch

    wanted, cores = plan.layout.mesh.num_ranks, len(os.sched_getaffinity(0))
    if plan.hardware["device"]["kind"] == "cpu":
        if wanted > cores * MAX_PROCESSES_PER_CORE:
            most = cores * MAX_PROCESSES_PER_CORE
            raise InputError(f"{wanted} processes for the {cores} cores of this machine", where="hardware", hint=f"use at most {most}xCPU here")
    elif torch.cuda.device_count() < wanted:
        found = torch.cuda.device_count() or "no"
        hint = "start it with torchrun on the machines that have them, or try the layout here with --set hardware=2xCPU"
        raise InputError(
            f"the plan is for {wanted} x {plan.hardware['device']['name']}, and this machine has {found} CUDA device(s)", where="hardware", hint=hint
        )


_VERDICTS = {
    "fits": "fits",
    "at_risk": "is at risk of running out of memory: running all the same",
    "does_not_fit": "does not fit: running even so",
}


def _say_verdict(plan: Plan, even_so: bool) -> None:
    peak, usable = plan.memory.peak_bytes.expected, plan.memory.usable_bytes
    needs = f"{format_bytes(peak)} of {format_bytes(usable)} usable on each device"
    if plan.verdict == "does_not_fit" and not even_so:
        hints = "; ".join(plan.changes_that_fit) or "see `pentamesh plan`"
        raise DoesNotFit(f"the job does not fit: it needs {needs}", where="hardware", hint=f"{hints}; --even-so runs it regardless")
    text = f"plan {plan.fingerprint}: {plan.strategy} on {plan.layout.mesh}, {plan.precision.name}; needs {needs}, {_VERDICTS[plan.verdict]}"
    print(text, file=sys.stderr)  # noqa: T201


def _start_ranks(folder: RunFolder, num_ranks: int, options: Options) -> int:
    """Start the ranks under torchrun's agent, wait and return the exit code. Raises what went wrong, from the run folder's outcome."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its words are about agents; ours follow
    os.environ[LAUNCHED] = str(os.getpid())
    if num_ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_ranks)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.2,
        shutdown_timeout=5,
    )
    flags = (["--resume"] if options.resume else []) + (["--stop-at", str(options.stop_at)] if options.stop_at else [])
    try:
        elastic_launch(config, sys.executable)("-m", "pentamesh.run.worker", str(folder.path), *flags)
    except ChildFailedError as error:
        raise _cause(folder, error.failures) from None
    except SignalException as error:
        return _interrupted(folder, error.sigval)
    return 0


def _newest_readable(folder: RunFolder) -> Path | None:
    """The checkpoint that a resume would try first: its files are not read here, where somebody waits for the end."""
    for checkpoint in published(folder.checkpoints):
        with suppress(InputError):
            if not list(misnamed(checkpoint, Manifest.read(checkpoint).step)):
                return checkpoint
    return None


def _interrupted(folder: RunFolder, number: signal.Signals) -> int:
    """Say and record that a signal ended the run (Ctrl-C, a scheduler), and return the exit code that shells give it."""
    hint = f"--resume goes on from {found.name}" if (found := _newest_readable(folder)) else "no checkpoint was saved yet"
    print(f"ended by {number.name}; {hint}", file=sys.stderr)  # noqa: T201
    code = 128 + number
    with suppress(OSError):
        folder.record_outcome("interrupted", code, signal=number.name)
    return code


def _cause(folder: RunFolder, failures: dict[int, Any]) -> PentameshError:
    """Why the ranks ended: a rank that was killed comes first, then what a rank wrote, then the bare exit code."""
    # The agent itself ends the others by SIGTERM, after the first to fail.
    first = next(iter(failures))
    killed = {rank: -f.exitcode for rank, f in failures.items() if f.exitcode < 0 and (-f.exitcode != signal.SIGTERM or rank == first)}
    outcome, where = folder.read_outcome(), format_path(folder.path)
    hint = "continue with --resume from the newest checkpoint" if published(folder.checkpoints) else ""
    if killed:
        rank, number = next(iter(killed.items()))
        name = signal.Signals(number).name
        reason = " (out of memory? see the kernel log)" if number == signal.SIGKILL else ""
        found: PentameshError = RunFailed(f"rank {rank} was killed by {name}{reason}; the other ranks were ended", where=where, hint=hint)
        folder.record_failure(rank, found)
        return found
    if outcome is None or "problems" not in outcome:
        return RunFailed(f"rank {min(failures)} ended with exit code {failures[min(failures)].exitcode}", where=where, hint=hint)
    kind = {2: InputError, 3: DoesNotFit, 4: Drift}.get(outcome["exit_code"], RunFailed)
    problems = [Problem(**problem) for problem in outcome["problems"]]
    return kind(*(replace(p, hint=p.hint or hint) if kind is RunFailed else p for p in problems))
