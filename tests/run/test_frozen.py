"""Jobs that freeze: planned, run as planned, resumed bit for bit, exported whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pentamesh.checkpoint.manifest import Manifest
from pentamesh.errors import InputError
from pentamesh.plan.plan import Plan
from pentamesh.run.options import Options
from tests.run import toy
from tests.run.test_loop import contents, trained

FREEZE = ["model.embed_tokens.*", "model.layers.0.*", "*norm*"]


@pytest.mark.parametrize(("shard", "precision"), [("parameters", "bf16"), ("none", "fp32"), ("optimizer", "bf16-pure")])
def test_a_run_with_frozen_parameters(tmp_path: Path, shard: str, precision: str) -> None:
    changes = {"layout__shard": shard, "precision": precision, "training__freeze": FREEZE, "training__steps": 4}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        toy.model_folder(tmp_path / name / "model", dtype="bfloat16", tie_word_embeddings=False)
    folder = trained(toy.job(tmp_path / "a", **changes))
    plan, receipt = Plan.read(folder.plan), json.loads(folder.receipt.read_text())
    before = load_file(tmp_path / "a" / "model" / "model.safetensors")
    after = load_file(folder.export / "model.safetensors")
    still = {name for name in before if "norm" in name or name.startswith(("model.embed_tokens", "model.layers.0"))}
    assert {name for name in before if torch.equal(before[name], after[name])} == still
    assert plan.model["trained_parameters"] == sum(t.numel() for name, t in before.items() if name not in still)
    assert any("parameters are trained" in reason for reason in plan.reasons)
    assert receipt["ledger_equal"] is True
    assert receipt["parts"]["states_bytes"]["ratio"] == pytest.approx(1, abs=0.01)
    kept = Manifest.read(folder.checkpoints / "step-00000004").tensors
    assert {name.removeprefix("optimizer.").removesuffix(".exp_avg") for name in kept if name.endswith(".exp_avg")} == before.keys() - still

    job = toy.job(tmp_path / "b", **changes)
    trained(job, Options(stop_at=2))
    with pytest.raises(InputError, match="what is frozen is not what it was"):
        trained(toy.job(tmp_path / "b", **changes | {"training__freeze": ["*norm*"]}), Options(resume=True))
    spelled_otherwise = changes | {"training__freeze": [*reversed(FREEZE), FREEZE[0]]}
    halves = trained(toy.job(tmp_path / "b", **spelled_otherwise), Options(resume=True))
    assert contents(folder.checkpoints / "step-00000004") == contents(halves.checkpoints / "step-00000004")
