"""A model folder that is another than the one that was planned is refused with what differs, and nothing is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pentamesh.errors import Drift
from pentamesh.job.hardware import read_hardware
from pentamesh.job.read import read_job_text
from pentamesh.model.read import read_model
from pentamesh.plan.drift import check_model, model_facts
from pentamesh.plan.search import plan
from pentamesh.run.asked import planned, read_asked
from pentamesh.run.launch import keep
from pentamesh.run.options import Options
from pentamesh.run.worlds import run_world
from tests.run import toy
from tests.run.test_loop import rank, trained


def changed(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def rope(theta: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def test_a_plan_is_of_the_model_that_it_was_made_for(tmp_path: Path) -> None:
    made = planned(read_asked(toy.job(tmp_path, hardware="1xCPU"), []))
    made.write(tmp_path / "plan.json")
    assert planned(read_asked(tmp_path / "plan.json", [])).model == made.model
    toy.model_folder(tmp_path / "model", intermediate_size=64)
    with pytest.raises(Drift) as caught:
        keep(read_asked(tmp_path / "plan.json"), Options(), even_so=False)
    said = [problem.what for problem in caught.value.problems]
    assert "ffn is 64, and 56 in the plan" in said
    assert any(what.startswith("num_parameters is ") for what in said)
    assert caught.value.exit_code == 4
    assert not (tmp_path / "runs/job").exists()


@pytest.mark.parametrize("change", [rope(5e5), {"hidden_act": "gelu"}, {"rms_norm_eps": 0.1}, {"sliding_window": 9}])
def test_what_no_size_shows(tmp_path: Path, change: dict[str, Any]) -> None:
    planned(read_asked(toy.job(tmp_path, hardware="1xCPU"), [])).write(tmp_path / "plan.json")
    changed(tmp_path / "model", **change)
    with pytest.raises(Drift, match=f"config.json: {next(iter(change))} is "):
        planned(read_asked(tmp_path / "plan.json", []))


def test_what_is_not_computed_with_may_change(tmp_path: Path) -> None:
    planned(read_asked(toy.job(tmp_path, hardware="1xCPU"), [])).write(tmp_path / "plan.json")
    changed(tmp_path / "model", transformers_version="9.9", eos_token_id=1, use_cache=False)
    assert planned(read_asked(tmp_path / "plan.json", []))


def test_ranks_look_again(tmp_path: Path) -> None:
    """Between planning and running, or on another node, the folder may be another."""
    job = toy.job(tmp_path, hardware="1xCPU")
    folder = keep(read_asked(job), Options(), even_so=False)
    changed(tmp_path / "model", **rope(5e5))
    with pytest.raises(Drift, match=r"rope_parameters is .*500000.* in the plan"):
        run_world(rank, 1, folder.path, Options())
    assert not folder.data.exists()


def test_a_checkpoint_is_of_the_model_that_it_was_trained_as(tmp_path: Path) -> None:
    job = toy.job(tmp_path, hardware="1xCPU", training__steps=4)
    trained(job, Options(stop_at=2))
    changed(tmp_path / "model", **rope(5e5))
    with pytest.raises(Drift, match="the model of the checkpoint"):
        keep(read_asked(job), Options(resume=True), even_so=False)


def test_a_plan_from_the_catalogue_answers_for_sizes(tmp_path: Path) -> None:
    """Other values of a published config.json may differ from those of the model whose sizes it shares."""
    job, _ = read_job_text("model: llama-3.2-1b\nhardware: 8xH100\nbatch: {global_batch: 8}\n")
    assumed = read_model("llama-3.2-1b")
    made = plan(job, assumed, read_hardware("8xH100"))
    (tmp_path / "config.json").write_text(json.dumps(assumed.config | {"max_position_embeddings": 4096}))
    check_model(made.model, model_facts(read_model(str(tmp_path))), "model", "")
    (tmp_path / "config.json").write_text(json.dumps(assumed.config | {"num_hidden_layers": 15}))
    with pytest.raises(Drift, match="num_layers is 15, and 16 in the plan"):
        check_model(made.model, model_facts(read_model(str(tmp_path))), "model", "")
