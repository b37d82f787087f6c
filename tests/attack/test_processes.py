"""Signals, kills and two runs at once: the exit code says what happened, one line tells it, and no process is left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from pentamesh.errors import InputError
from pentamesh.run.asked import read_asked
from pentamesh.run.launch import keep
from pentamesh.run.options import Options
from tests.run import toy
from tests.run.test_launch import outcome, ranks_below, started, wait_for_step

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks through /proc")


def endless(folder: Path) -> Path:
    return toy.job(folder, training__steps=100_000, training__evaluate_every=None, checkpoint__every=5)


def gone(pids: list[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.1)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_and_says_so(tmp_path: Path, number: signal.Signals, code: int) -> None:
    job = endless(tmp_path)
    process = started("pentamesh", "train", "job.yaml", cwd=tmp_path)
    wait_for_step(tmp_path, 12)
    ranks = ranks_below(process.pid)
    with pytest.raises(InputError, match=rf"a run is at work in .*: process {process.pid} on "):
        keep(read_asked(job), Options(resume=True), even_so=False)
    process.send_signal(number)
    _, talk = process.communicate(timeout=30)
    assert process.returncode == code, talk
    assert f"ended by {number.name}; --resume goes on from step-" in talk
    assert "Traceback" not in talk
    assert len(ranks) == 2
    assert gone(list(ranks.values()), within_s=1)
    assert (outcome(tmp_path)["outcome"], outcome(tmp_path)["exit_code"]) == ("interrupted", code)


def test_an_interrupt_while_ranks_still_import(tmp_path: Path) -> None:
    """The first seconds of a run, when most mistakes are noticed."""
    toy.job(tmp_path)
    process = started("pentamesh", "train", "job.yaml", cwd=tmp_path)
    deadline = time.monotonic() + 60
    while len(ranks := ranks_below(process.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, talk = process.communicate(timeout=30)
    assert process.returncode == 130, talk
    assert "ended by SIGINT; no checkpoint was saved yet" in talk
    assert "Traceback" not in talk
    assert gone(list(ranks.values()), within_s=1)


def test_ranks_end_with_a_killed_launcher(tmp_path: Path) -> None:
    endless(tmp_path)
    process = started("pentamesh", "train", "job.yaml", cwd=tmp_path)
    wait_for_step(tmp_path, 2)
    ranks = ranks_below(process.pid)
    process.kill()
    process.communicate(timeout=30)
    assert len(ranks) == 2
    assert gone(list(ranks.values()), within_s=10)


def test_a_rank_that_someone_ended_is_named(tmp_path: Path) -> None:
    endless(tmp_path)
    process = started("pentamesh", "train", "job.yaml", cwd=tmp_path)
    wait_for_step(tmp_path, 2)
    os.kill(ranks_below(process.pid)[0], signal.SIGTERM)
    _, talk = process.communicate(timeout=30)
    assert process.returncode == 5
    assert "rank 0 was killed by SIGTERM; the other ranks were ended" in talk
