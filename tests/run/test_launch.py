"""The real processes: `pentamesh train` and torchrun, a rank killed mid-run, and errors that every rank meets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.run import toy

PYTHON = [sys.executable, "-m"]


def started(*command: str, cwd: Path) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    return subprocess.Popen([*PYTHON, *command], cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ran(*command: str, cwd: Path, timeout_s: float = 120) -> tuple[int, str]:
    process = started(*command, cwd=cwd)
    _, talk = process.communicate(timeout=timeout_s)
    return process.returncode, talk


def outcome(folder: Path) -> dict[str, object]:
    return json.loads((folder / "runs/job/outcome.json").read_text())


def ranks_below(parent: int) -> dict[int, int]:
    """Process ids by rank among the descendants of a process."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            pairs = (pair.partition(b"=") for pair in (entry / "environ").read_bytes().split(b"\0"))
            environment = {name: value for name, _, value in pairs}
            parent_of = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if b"pentamesh.run.worker" in words and parent_of == parent:
            found[int(environment[b"RANK"])] = int(entry.name)
    return found


def wait_for_step(folder: Path, step: int, timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    metrics = folder / "runs/job/metrics.jsonl"
    while time.monotonic() < deadline:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached within {timeout_s} s")


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks through /proc")
def test_a_killed_rank_ends_the_others_and_the_run_goes_on(tmp_path: Path) -> None:
    toy.job(tmp_path, training__steps=2000, training__evaluate_every=None, checkpoint__every=5)
    process = started("pentamesh", "train", "job.yaml", cwd=tmp_path)
    wait_for_step(tmp_path, 12)
    ranks = ranks_below(process.pid)
    assert ranks.keys() == {0, 1}
    killed_at = time.monotonic()
    os.kill(ranks[1], signal.SIGKILL)
    _, talk = process.communicate(timeout=30)
    assert time.monotonic() - killed_at < 10
    assert process.returncode == 5, talk
    assert "rank 1 was killed by SIGKILL" in talk
    assert "--resume" in talk
    assert "Traceback" not in talk
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())
    assert outcome(tmp_path)["exit_code"] == 5

    code, talk = ran("pentamesh", "train", "job.yaml", "--resume", "--stop-at", "20", cwd=tmp_path)
    assert code == 0, talk
    assert "resumed from step-000000" in talk
    assert outcome(tmp_path)["outcome"] == "stopped"


def test_under_torchrun(tmp_path: Path) -> None:
    toy.job(tmp_path, hardware="auto", training__steps=3)
    code, talk = ran("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "pentamesh", "train", "job.yaml", cwd=tmp_path)
    assert code == 0, talk
    assert outcome(tmp_path)["outcome"] == "done"
    assert len((tmp_path / "runs/job/metrics.jsonl").read_text().splitlines()) == 3


def test_a_wrong_number_of_processes(tmp_path: Path) -> None:
    toy.job(tmp_path, hardware="4xCPU")
    code, talk = ran("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "pentamesh", "train", "job.yaml", cwd=tmp_path)
    assert code == 1  # bare torchrun always ends with 1
    assert "2 processes were started for a layout of 4 ranks" in talk
    assert outcome(tmp_path)["exit_code"] == 2


def test_a_fault_in_the_data_is_one_error(tmp_path: Path) -> None:
    toy.job(tmp_path)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"messages": [{"role": "user", "content": null}]}\n')
    code, talk = ran("pentamesh", "train", "job.yaml", cwd=tmp_path)
    assert code == 2
    assert "rows.jsonl:41" in talk
    assert talk.count("error:") == 1
    assert "Traceback" not in talk
    assert outcome(tmp_path)["exit_code"] == 2
    assert not list((tmp_path / "runs/job").glob("data*"))


def test_a_run_is_not_overwritten_unasked(tmp_path: Path) -> None:
    (tmp_path / "runs/job/checkpoints/step-00000005").mkdir(parents=True)
    toy.job(tmp_path)
    code, talk = ran("pentamesh", "train", "job.yaml", cwd=tmp_path)
    assert code == 2
    assert "already holds checkpoints" in talk
    assert "--resume" in talk


def test_a_plan_is_run_as_it_stands(tmp_path: Path) -> None:
    toy.job(tmp_path, training__steps=2, checkpoint__export=False)
    printed = subprocess.run([*PYTHON, "pentamesh", "plan", "job.yaml", "--json"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    (tmp_path / "plan.json").write_text(printed)
    code, talk = ran("pentamesh", "train", "plan.json", "--set", "optimizer.lr=1", cwd=tmp_path)
    assert code == 2
    assert "a plan takes no overrides" in talk
    code, talk = ran("pentamesh", "train", "plan.json", cwd=tmp_path)
    assert code == 0, talk
    kept = json.loads((tmp_path / "runs/plan/plan.json").read_text())
    assert kept["fingerprint"] == json.loads(printed)["fingerprint"]

    altered = json.loads(printed) | {"layout": json.loads(printed)["layout"] | {"dp_shard": 1, "tp": 2}}
    (tmp_path / "altered.json").write_text(json.dumps(altered))
    code, talk = ran("pentamesh", "train", "altered.json", cwd=tmp_path)
    assert code == 2
    assert "was altered since it was made" in talk

    command = [*PYTHON, "pentamesh", "plan", "job.yaml", "--set", "layout.shard=none", "--layout", "pipeline=2", "--json"]
    (tmp_path / "pipeline.json").write_text(subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout)
    code, talk = ran("pentamesh", "train", "pipeline.json", cwd=tmp_path)
    assert code == 2
    assert "planned but not trained yet" in talk
