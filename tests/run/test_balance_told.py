"""A run of a model whose config asks for an auxiliary loss: that is added, and told in every line of metrics and in TensorBoard beside the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pentamesh.plan.plan import Plan
from pentamesh.run.folder import RunFolder
from pentamesh.run.progress import Progress
from tests.proof.toys import MIXTRAL
from tests.run import toy
from tests.run.test_board import scalars
from tests.run.test_loop import metrics, trained

CONFIG = {key: value for key, value in MIXTRAL.items() if key not in ("vocab_size", "max_position_embeddings", "num_hidden_layers", "sliding_window")}


def run(folder: Path, config: dict[str, Any], **changes: Any) -> RunFolder:
    toy.model_folder(folder / "model", **CONFIG | config)
    kept = {"checkpoint__export": False, "training__steps": 4, "training__evaluate_every": 2}
    return trained(toy.job(folder, **{"method": "pretrain", **kept, **changes}))


def test_an_auxiliary_loss_is_told(tmp_path: Path) -> None:
    asks = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    folder = run(tmp_path / "a", asks, logging__tensorboard=True)
    plan = Plan.read(folder.plan)
    assert (plan.policy.balance, plan.policy.balance_by) == ("loss", 0.5)
    still = run(tmp_path / "b", asks, experts={"balance": "none"})
    rows, others = metrics(folder), metrics(still)
    assert rows[0]["loss"] == others[0]["loss"], "it is no part of the loss that is shown"
    assert rows[0]["grad_norm"] != others[0]["grad_norm"]
    assert rows[-1]["loss"] != others[-1]["loss"]
    shown = scalars(folder.tensorboard)
    for row in rows:
        told = row["experts"]
        assert told.keys() == {"max_load", "mean_max_load", "idle", "aux_loss"}
        assert told["max_load"] >= told["mean_max_load"] >= 1
        assert told["aux_loss"] > 1.9, "of two experts a token, about two where loads are even"
        for name, value in told.items():
            assert shown[f"experts/{name}"][row["step"]] == pytest.approx(value, rel=1e-6)
        assert f"max load {told['max_load']:.2f}x" in Progress(plan, 4)._line(row)
    assert all("aux_loss" not in row["experts"] for row in others)
    assert others[0]["experts"]["max_load"] == rows[0]["experts"]["max_load"]


def test_a_dense_model_has_none(tmp_path: Path) -> None:
    folder = trained(toy.job(tmp_path, training__steps=2, checkpoint__export=False))
    assert all("experts" not in row for row in metrics(folder))
