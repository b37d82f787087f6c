"""Launch lines of the field as they stand, on toy models and the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run import toy

RECIPES = Path(__file__).parents[1] / "recipes"


def launched(arguments: list[str], cwd: Path, timeout_s: float = 280) -> tuple[int, str]:
    """Exit code and talk of a command."""
    environ = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(arguments, cwd=cwd, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False)
    return done.returncode, done.stdout + done.stderr


def torchrun(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *arguments]


def test_line_a(tmp_path: Path) -> None:
    """`torchrun --standalone --nproc-per-node=8 train.py`: DDP."""
    code, talk = launched(torchrun("--standalone", "--nproc-per-node=8", str(RECIPES / "train.py")), tmp_path)
    assert code == 0, talk
    assert "ddp on dp_replicate 8" in talk
    assert json.loads((tmp_path / "runs/train/outcome.json").read_text())["outcome"] == "done"
    assert json.loads((tmp_path / "runs/train/receipt.json").read_text())["ledger_equal"] is True


@pytest.mark.timeout(600)
def test_line_b(tmp_path: Path) -> None:
    """Full shard over eight processes, blocks recomputed and compiled, sixteen micro-batches."""
    folder = toy.model_folder(tmp_path / "model", max_position_embeddings=4096)
    line = (
        "--batch-size 1 --grad-accum 16 --seq-len 4096 --bf16 --fsdp full_shard --fsdp-reshard-after-forward --gradient-checkpointing --torch-compile"
    )
    asked = [*torchrun("--standalone", "--nproc-per-node=8", str(RECIPES / "finetune.py"), "--model", str(folder)), *line.split(), "--steps", "2"]
    code, talk = launched(asked, tmp_path, timeout_s=580)
    assert code == 0, talk
    plan = json.loads((tmp_path / "runs/finetune/plan.json").read_text())
    assert (plan["strategy"], plan["layout"]["dp_shard"], plan["policy"]["grad_accum"]) == ("full_shard", 8, 16)
    assert (plan["policy"]["reshard"], plan["policy"]["recompute"], plan["policy"]["compile"]) == (True, "full", True)
    assert plan["precision"]["name"] == "bf16"
    assert len((tmp_path / "runs/finetune/metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.timeout(600)
def test_line_c(tmp_path: Path) -> None:
    """Hybrid shard over two agents that meet on the loopback: cut in a node, copied between nodes."""
    folder = toy.model_folder(tmp_path / "model", max_position_embeddings=4096)
    flags = (
        "--batch-size 1 --grad-accum 32 --seq-len 4096 --bf16 --fsdp hybrid_shard --gradient-checkpointing --torch-compile --activation-cpu-offload"
    )
    agent = torchrun("--nnodes=2", "--nproc-per-node=4", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:29517")
    asked = [*agent, str(RECIPES / "finetune.py"), "--model", str(folder), *flags.split(), "--steps", "2"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    other = subprocess.Popen(asked, cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        code, talk = launched(asked, tmp_path, timeout_s=580)
        assert code == 0, talk
        assert other.wait(60) == 0
    finally:
        other.kill()
    plan = json.loads((tmp_path / "runs/finetune/plan.json").read_text())
    assert (plan["strategy"], plan["layout"]["dp_replicate"], plan["layout"]["dp_shard"]) == ("hybrid_shard", 2, 4)
    assert plan["policy"]["offload"] is True
    assert json.loads((tmp_path / "runs/finetune/receipt.json").read_text())["ledger_equal"] is True


def test_a_batch_under_srun_is_that_of_all_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"STEP_ID": 0, "NTASKS": 4, "NNODES": 2, "PROCID": 0, "LOCALID": 0, "JOB_NODELIST": "n[1-2]", "JOB_ID": 7}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    flags = ["--model", str(RECIPES / "sample/model"), "--grad-accum", "3", "--fsdp", "hybrid_shard", "--hardware", "2x2xRTX-4090@100gbps", "--plan"]
    code, talk = launched([sys.executable, str(RECIPES / "finetune.py"), *flags], tmp_path)
    assert code == 0, talk
    flags[flags.index("2x2xRTX-4090@100gbps")] = "2x4xRTX-4090@100gbps"
    code, talk = launched([sys.executable, str(RECIPES / "finetune.py"), *flags], tmp_path)
    assert "global_batch = 12 is not a multiple of micro_batch x data ranks = 1 x 8" in talk


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "there is no model to train"),
        (["--model", "m", "--bf16", "--fp32"], "--fp32 and --bf16 name two precisions"),
        (["--model", "m", "--fsdp-reshard-after-forward"], "nothing is gathered under DDP"),
        (["--model", "m", "--fsdp", "hybrid_shard"], "hybrid_shard copies the model between nodes, and there is one"),
        (["--model", "m", "--grad-accum", "0"], "0 micro-batches are no step"),
        (["--model", "m", "--seq-len", "many"], "--seq-len"),
        (["--model", "m", "--batch-size", "-1"], "--batch-size"),
        (["--model", "m", "--lr", "fast"], "--lr"),
        (["--model", "m", "--grad-acum", "2"], "unrecognized arguments: --grad-acum"),
        (["--model", "m", "--set", "training.stepz=3"], "steps"),
        (["--model", "m", "--batch-size", "\N{SUPERSCRIPT TWO}"], "--batch-size"),
        (["--model", "m", "--stop-at", "0"], "there is no step 0"),
        (["--model", "m", "--hardware", ""], "--hardware is empty"),
        (["--model", "m", "--hardware", "2xCPU", "--data", "nowhere/rows.jsonl"], "no file nowhere/rows.jsonl"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags_that_cannot_be_meant(tmp_path: Path, flags: list[str], said: str) -> None:
    code, talk = launched([sys.executable, str(RECIPES / "finetune.py"), *flags], tmp_path)
    assert code == 2, talk
    assert said in talk
    assert "Traceback" not in talk
    assert list(tmp_path.iterdir()) == []
