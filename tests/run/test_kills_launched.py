"""The real processes, killed in a save: torchrun ends the others, and `pentamesh train --resume` ends as if nothing had happened."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path

import pytest

from pentamesh.checkpoint.keep import newest
from pentamesh.checkpoint.manifest import name_of, verify
from pentamesh.checkpoint.names import published, step_of
from pentamesh.run.folder import RunFolder
from tests.trials import driver
from tests.trials.kills import EVERY, STEPS, contents, losses, toy_job, undisturbed

# Two do here, each of which imports everything: of four, tests/checkpoint/test_kills.py kills more than torchrun would start in the time.
RANKS = 2
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
# The phase, which of its kind in that start, and up to how long after its beginning; saves are due at steps 2, 4, 6 and 8.
TRIALS = [("copy", 2, 0.001), ("flush", 1, 0.05), ("publish", 2, 0.002)]
# A kill that came too late is tried again on the folder as it was, the last time at the very beginning of the phase.
ATTEMPTS = 3


def killed(folder: Path, phase: str, nth: int, rank: int, delay_s: float) -> bool:
    """Start the job in `folder` or go on with it, and kill a rank; whether that died in the phase that was meant, and its save with it."""
    due = newest_step(folder) + EVERY * (nth - 1)
    heard = folder / "heard.txt"
    heard.unlink(missing_ok=True)
    words = [phase, str(nth), str(rank), f"{delay_s:.4f}", str(heard), "job.yaml", "--resume"]
    done = subprocess.run([*TORCHRUN, str(driver.__file__), *words], cwd=folder, text=True, capture_output=True, timeout=240)
    lines = [line.split() for line in heard.read_text().splitlines()]
    meant = next((i for i, line in enumerate(lines) if line[-1] == "meant"), None)
    assert meant is not None, f"{phase} {nth} never began on rank {rank}:\n{done.stderr}"
    has_gone_on = any(line[0] == lines[meant][0] for line in lines[meant + 1 :])
    return done.returncode != 0 and not has_gone_on and newest_step(folder) == due


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint that is published, or 0."""
    return step_of(found[0]) if (found := published(RunFolder(folder / "runs/job").checkpoints)) else 0


def struck(folder: Path, phase: str, nth: int, longest_s: float, seeds: Iterator[int]) -> str:
    """Kill a rank in the phase, at a moment and of a number that the next seed draws, and say which."""
    kept = folder.with_name(f"before {phase}")
    shutil.copytree(folder, kept, symlinks=True)
    for sooner, seed in enumerate(islice(seeds, ATTEMPTS)):
        draw = random.Random(seed)
        rank, delay_s = 0 if phase == "publish" else draw.randrange(RANKS), draw.uniform(0, longest_s) * (1 - sooner / (ATTEMPTS - 1))
        if killed(folder, phase, nth, rank, delay_s):
            return f"seed {seed}: rank {rank} killed {1e3 * delay_s:.1f} ms into {phase} {nth}"
        shutil.rmtree(folder)
        shutil.copytree(kept, folder, symlinks=True)
    raise AssertionError(f"no kill of {ATTEMPTS} fell into {phase}; the next seed is {next(seeds)}")


@pytest.mark.timeout(600)
def test_a_worker_that_is_killed_in_a_save_costs_nothing(tmp_path: Path, record_proof: Callable[..., None]) -> None:
    reference = undisturbed(tmp_path / "undisturbed", RANKS)
    (tmp_path / "killed").mkdir()
    toy_job(tmp_path / "killed", RANKS)
    run, seeds = RunFolder(tmp_path / "killed/runs/job"), count()
    for phase, nth, longest_s in TRIALS:
        said = struck(tmp_path / "killed", phase, nth, longest_s, seeds)
        print(said)
        assert published(run.checkpoints), said
        assert [problem for path in published(run.checkpoints) for problem in verify(path)] == [], said
        assert newest(run.checkpoints) == published(run.checkpoints)[0], said
    before = published(run.checkpoints)[0].name
    done = subprocess.run(
        [sys.executable, "-m", "pentamesh", "train", "job.yaml", "--resume"], cwd=tmp_path / "killed", text=True, capture_output=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"resumed from (\S+):", done.stderr)
    assert found is not None
    assert found[1] == before
    assert contents(run.checkpoints / name_of(STEPS)) == reference.tensors
    assert losses(run) == reference.losses
    assert [path.name for path in run.checkpoints.glob("step-*")] == [name_of(STEPS)]
    record_proof("ranks of torchrun killed in a save, and the run gone on with", kills=len(TRIALS), lost=0)
