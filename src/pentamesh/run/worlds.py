"""Worlds of gloo processes on this machine, started fresh for each case from a warm fork server.

Importing transformers costs seconds a process, so a server imports it once and forks; nothing runs a torch operator before the fork. A world
that hangs or dies ends with its case, and the rank that did not answer is named.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from pentamesh.errors import PentameshError, RunFailed

__all__ = ["PRELOAD", "run_world"]

PRELOAD = ["torch", "torch.distributed", "transformers", "transformers.models.llama.modeling_llama", "pentamesh.run.verify"]


def run_world(function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 120) -> list[Any]:
    """What `function(*args)` returned on each of `num_ranks` processes that see torchrun's environment.

    Raises the first PentameshError that a rank raised, and RunFailed when a rank died, failed otherwise or did not answer within `timeout_s`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="pentamesh-world-") as folder:
        pipes, processes = [], []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(theirs, rank, num_ranks, folder, dict(os.environ), function, args), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, processes, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection], processes: list[Any], timeout_s: float) -> list[Any]:
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(answers) < len(pipes):
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
        ready = wait(open_pipes, max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(pipes)) if rank not in answers]
            raise RunFailed(f"rank {', '.join(map(str, missing))} of {len(pipes)} did not answer within {timeout_s:g} s")
        for pipe in ready:
            rank = pipes.index(pipe)  # pyright: ignore[reportArgumentType]
            answers[rank] = _answer(rank, pipes[rank], processes[rank])
    return [answers[rank] for rank in range(len(pipes))]


def _answer(rank: int, pipe: Connection, process: Any) -> Any:
    try:
        outcome, value = pipe.recv()
    except EOFError:
        process.join(5)
        raise RunFailed(f"rank {rank} died with exit code {process.exitcode}") from None
    if outcome == "returned":
        return value
    if outcome == "refused":
        raise value
    raise RunFailed(f"rank {rank} failed:\n{value}")


def _rank_main(
    pipe: Connection, rank: int, num_ranks: int, folder: str, environment: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(environment)  # of who asks now: the server may be older
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    try:
        pipe.send(("returned", function(*args)))
    except PentameshError as error:
        pipe.send(("refused", error))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)
