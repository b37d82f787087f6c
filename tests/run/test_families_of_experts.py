"""Families of experts from folder to folder: read, trained, resumed, exported, and evaluated as transformers loads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from pentamesh.job.precision import PRECISIONS
from pentamesh.plan.plan import Plan
from pentamesh.run.evaluate import evaluate
from pentamesh.run.options import Options
from tests.proof.toys import TOYS
from tests.run import toy
from tests.run.test_loop import metrics, trained

LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"layout__tensor": 2, "layout__sequence_parallel": True, "hardware": "4xCPU"},
    "expert": {"layout__expert": 2, "hardware": "4xCPU"},
}
# Sizes are those of the toy folder and its tokenizer.
_OF_FOLDER = ("vocab_size", "max_position_embeddings", "model_type")
# Of families whose heads have no keys of their own the folder would name too few.
_KEYS = {"deepseek-v2": {"num_key_value_heads": 4}}


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "gpt-oss", "deepseek-v2", "deepseek-v3"])
def test_a_run_of_experts(family: str, tmp_path: Path) -> None:
    """Losses of full shard, planned collectives, a resumed run that continues, and an export with the source's names and the run's held-out loss."""
    config: dict[str, Any] = {key: value for key, value in TOYS[family].items() if key not in _OF_FOLDER} | _KEYS.get(family, {})
    found: list[list[float]] = []
    for name, changes in LAYOUTS.items():
        source = toy.model_folder(tmp_path / name / "model", model_type=TOYS[family]["model_type"], **config)
        job = toy.job(tmp_path / name, **changes)
        if changes:
            trained(job, Options(stop_at=3))
        folder = trained(job, Options(resume=bool(changes)))
        assert json.loads(folder.receipt.read_text())["ledger_equal"] is True
        before, after = load_file(source / "model.safetensors"), load_file(folder.export / "model.safetensors")
        assert {n: (t.shape, t.dtype) for n, t in before.items()} == {n: (t.shape, t.dtype) for n, t in after.items()}
        held_out = [row["held_out_loss"] for row in metrics(folder) if "held_out_loss" in row]
        assert evaluate(Plan.read(folder.plan).job, folder.export, PRECISIONS["fp32"]).loss == pytest.approx(held_out[-1], rel=1e-6)
        found.append([row["loss"] for row in metrics(folder)] + held_out)
    assert found[1] == pytest.approx(found[0], rel=2e-5)
    assert found[2] == pytest.approx(found[0], rel=2e-5)
    assert found[1][-1] < found[1][0]
