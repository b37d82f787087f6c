"""`python -m benchmarks.saving`: how long a checkpoint holds up a run, beside a save that is waited for, and what the steps of the flush cost more.

Two processes train a model of 110 M parameters in full shard; its state is 1.3 GB, half of it on each. Every kind of save is made several times in
turn, and medians are told of the slower rank: `waited` brings everything to disk before the next step, `beside` copies and goes on, and torch's own
`dcp.async_save` of the same tensors, which verifies nothing and keeps pickles, stands beside it. A flush shares processors with the steps: what they
take longer than undisturbed ones is told too. Both are about this machine's disk and memory as they are right now.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.checkpoint_memory import FULL_2, SMALL, spec, trainee_of
from benchmarks.speed import CASES, micros
from pentamesh.checkpoint.held import Held
from pentamesh.checkpoint.keep import Retention
from pentamesh.checkpoint.saver import Saver
from pentamesh.run.initial import drawing
from pentamesh.run.state import tensors
from pentamesh.run.step import Trainee, take_step
from pentamesh.run.world import join
from pentamesh.run.worlds import run_world

MOST_SHARE, KEPT = 0.15, Retention(1)


def one_step(trainee: Trainee) -> float:
    """Seconds of one step of training."""
    started = time.monotonic()
    take_step(trainee, micros(CASES[0], trainee.world.share, 0), 1.0)
    return time.monotonic() - started


def waited(trainee: Trainee, saver: Saver, step: int) -> dict[str, float]:
    """A save that is waited for."""
    saver.begin(step, tensors(trainee, shared=True), {})
    saver.settle(proved=True)
    return {"blocked_s": saver.saved[-1].total_s}


def beside(trainee: Trainee, saver: Saver, step: int, plain_s: float) -> dict[str, float]:
    """A save while steps go on, and what these take longer than `plain_s` each until it is published."""
    saver.begin(step, tensors(trainee, shared=True), {})
    num_saved, taken = len(saver.saved), []
    while not _agreed(len(saver.saved) > num_saved):
        taken.append(one_step(trainee))
    saver.settle(proved=True)
    saved = saver.saved[-1]
    return {"blocked_s": saved.blocked_s, "flush_s": saved.total_s, "steps": len(taken), "extra_s": sum(taken) - plain_s * len(taken)}


def torchs(trainee: Trainee, folder: Path, step: int, group: dist.ProcessGroup) -> dict[str, float]:
    """torch's asynchronous save of what this rank holds."""
    state = {f"{trainee.world.rank}.{name}": t.part(t.boxes[0]) if isinstance(t, Held) else t for name, t in tensors(trainee).items()}
    dist.barrier()
    started = time.monotonic()
    future: Any = dcp.async_save(state, checkpoint_id=str(folder / f"torch-{step}"), process_group=group)
    blocked_s = time.monotonic() - started
    future.result()
    return {"blocked_s": blocked_s, "flush_s": time.monotonic() - started}


def _agreed(done: bool) -> bool:
    """Whether every rank is done: all take the same number of steps."""
    found = torch.tensor(int(done))
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return bool(found)


def measured(folder: Path, rounds: int) -> dict[str, Any]:
    """Every kind of save in turn, `rounds` times after one that is not counted: it makes the buffers."""
    trainee = trainee_of(spec(SMALL), FULL_2, join(FULL_2, "cpu"), drawing(0))
    savers = {name: Saver(folder / name, KEPT, asynchronous=name == "beside", say=lambda _: None) for name in ("waited", "beside")}
    group: Any = dist.new_group(backend="gloo")
    plain_s = statistics.median([one_step(trainee) for _ in range(6)][2:])
    found: dict[str, list[dict[str, float]]] = {"waited": [], "beside": [], "torch's async_save": []}
    for step in range(1, rounds + 2):
        found["waited"].append(waited(trainee, savers["waited"], step))
        found["beside"].append(beside(trainee, savers["beside"], step, plain_s))
        found["torch's async_save"].append(torchs(trainee, folder, step, group))
    medians = {name: {key: statistics.median(row[key] for row in rows[1:]) for key in rows[0]} for name, rows in found.items()}
    saved_bytes = sum(t.part(box).nbytes for t in tensors(trainee, shared=True).values() if isinstance(t, Held) for box in t.boxes)
    return {"plain_step_s": plain_s, "saved_bytes": saved_bytes, "kinds": medians}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where about 8 GB are written and removed again (the system's folder for such things)")
    parser.add_argument("--json", type=Path, help="write the medians to this file")
    given = parser.parse_args()
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    with tempfile.TemporaryDirectory(prefix="pentamesh-saving-", dir=given.folder) as folder:
        ranks = run_world(measured, 2, Path(folder), given.rounds, timeout_s=1800)
    slower = max(ranks, key=lambda rank: rank["kinds"]["beside"]["blocked_s"])
    kinds, whole_s = slower["kinds"], slower["kinds"]["waited"]["blocked_s"]
    print(f"{slower['saved_bytes'] / 1e6:,.0f} MB saved by each of 2 ranks; a step takes {slower['plain_step_s']:.2f} s undisturbed")
    for name, row in kinds.items():
        flush = f", on disk after {row['flush_s']:.2f} s" if "flush_s" in row else ""
        extra = f", {row['steps']:.0f} steps meanwhile took {row['extra_s']:+.2f} s in all beside undisturbed ones" if "steps" in row else ""
        print(f"{name:20} holds up the run for {row['blocked_s']:.3f} s, {row['blocked_s'] / whole_s:.1%} of a save that is waited for{flush}{extra}")
    share = kinds["beside"]["blocked_s"] / whole_s
    print(f"{share:.1%} of a save that is waited for; {MOST_SHARE:.0%} is allowed")
    if given.json:
        given.json.write_text(json.dumps({"schema": "pentamesh.benchmark_saving", "version": 1, **slower}, indent=2) + "\n")
    return int(share > MOST_SHARE)


if __name__ == "__main__":
    raise SystemExit(main())
