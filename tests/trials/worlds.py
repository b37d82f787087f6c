"""Worlds that are killed: the ranks of a real run, each telling its parent when a phase of its checkpoints begins, and on which thread."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from pentamesh.run.worlds import PRELOAD

__all__ = ["ENDED", "FAILED", "Heard", "World", "running"]

# Said once by a rank beside its phases: when its run is over, or when it could not go on.
ENDED, FAILED = "ended", "failed"
# torchrun's agent gives ranks so long between SIGTERM and SIGKILL (pentamesh.run.launch, shutdown_timeout).
GRACE_S = 5.0
# What a rank does with the run folder, resuming or not; its answer goes along with ENDED.
How = Callable[[Path, bool], object]
# A rank, and the phase at whose beginning it stays, and which of its kind, until it is killed there.
Held = tuple[int, str, int]


@dataclass(frozen=True)
class Heard:
    """What a rank said: a phase or how it ended, its thread, and when, on the clock that all processes of a machine share."""

    what: str
    thread: int
    at_s: float
    more: str = ""


@dataclass
class World:
    """The processes of a run, and all that they said so far, by rank."""

    processes: list[Any]
    pipes: list[Connection]
    heard: list[list[Heard]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.heard = [[] for _ in self.pipes]

    def listen(self, timeout_s: float) -> Iterator[tuple[int, Heard]]:
        """What the ranks say from now on, until all are silent for good. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        open_pipes = dict(zip(self.pipes, range(len(self.pipes)), strict=True))
        while open_pipes:
            if not (ready := wait(list(open_pipes), max(0.0, deadline - time.monotonic()))):
                raise TimeoutError(f"ranks {sorted(open_pipes.values())} were still at work after {timeout_s:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    heard = Heard(*pipe.recv())
                except (EOFError, OSError):
                    del open_pipes[pipe]
                    continue
                self.heard[open_pipes[pipe]].append(heard)
                yield open_pipes[pipe], heard

    def kill(self, rank: int) -> float:
        """End a rank at once, unless it has ended by itself, and return when it was sure to be over."""
        self.processes[rank].kill()
        return time.monotonic()

    def end(self, after_s: float = 0.0) -> None:
        """End all ranks that are left, as torchrun's agent does when it sees, `after_s` later, that one is dead."""
        if after_s:
            time.sleep(after_s)
        for process in self.processes:
            process.terminate()
        deadline = time.monotonic() + GRACE_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()


@contextmanager
def running(folder: Path, num_ranks: int, log: Path, *, resume: bool, how: How | None = None, held: Held | None = None) -> Iterator[World]:
    """The ranks of the run in `folder`, whose talk goes to `log`, at work in `how` they do it; they are ended with the block.

    One that is to be `held` says that the phase begins, and then does nothing of it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "pentamesh.run.loop"])
    with tempfile.TemporaryDirectory(prefix="pentamesh-trial-") as meeting:
        processes, pipes = [], []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            stays = held[1:] if held and held[0] == rank else None
            process = context.Process(target=_rank, args=(theirs, rank, num_ranks, meeting, folder, log, resume, how, stays), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        world = World(processes, pipes)
        try:
            yield world
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()


def _rank(
    pipe: Connection, rank: int, num_ranks: int, meeting: str, folder: Path, log: Path, resume: bool, how: How | None, stays: tuple[str, int] | None
) -> None:
    import torch
    import torch.distributed as dist

    from pentamesh.checkpoint.phases import listeners

    said = log.open("a")
    os.dup2(said.fileno(), 1)
    os.dup2(said.fileno(), 2)
    lock, begun = threading.Lock(), Counter[str]()

    def tell(what: str, more: str = "") -> None:
        with lock:
            pipe.send((what, threading.get_ident(), time.monotonic(), more))
            begun[what] += 1
            is_held = (what, begun[what]) == stays
        if is_held:
            threading.Event().wait()

    listeners.append(tell)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1")
    dist.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=num_ranks)
    try:
        tell(ENDED, str((how or train)(folder, resume)))
    except BaseException:
        tell(FAILED, traceback.format_exc())
    finally:
        pipe.close()
        os._exit(0)


def train(folder: Path, resume: bool) -> None:
    """What a rank does where nothing else is asked."""
    from pentamesh.plan.plan import Plan
    from pentamesh.run.folder import RunFolder
    from pentamesh.run.loop import run
    from pentamesh.run.options import Options
    from pentamesh.run.world import join

    plan = Plan.read(RunFolder(folder).plan)
    run(plan, RunFolder(folder), join(plan.layout, "cpu"), Options(resume=resume))
