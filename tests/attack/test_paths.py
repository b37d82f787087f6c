"""Names of files as people write them: from home, absent, or longer than any system takes; said before a process is started."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from pentamesh.errors import InputError
from pentamesh.job.hardware import read_hardware
from pentamesh.job.read import read_job_text
from pentamesh.model.read import read_model
from pentamesh.plan.search import plan
from pentamesh.run.asked import located, planned, read_asked
from pentamesh.run.source import model_source
from tests.run import toy


def test_paths_of_a_job_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows are looked for is where they are then read."""
    monkeypatch.setenv("HOME", str(tmp_path))
    job = located(read_job_text("model: m\ndata: {train: ~/rows.jsonl}\nlogging: {folder: ~/runs}\n")[0], Path("/elsewhere"), "job")
    assert (job.data.train, job.logging.folder) == (str(tmp_path / "rows.jsonl"), str(tmp_path / "runs"))


@pytest.mark.parametrize("key", ["data.train", "data.held_out"])
def test_absent_rows_are_told_while_planning(tmp_path: Path, key: str) -> None:
    job = toy.job(tmp_path)
    with pytest.raises(InputError, match=r"no file row\.jsonl") as caught:
        planned(read_asked(job, [f"{key}=row.jsonl"]))
    assert "rows.jsonl" in caught.value.problems[0].hint


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama-3.2-1b", "meta-llama/Llama-3.2-1B"),
        ("meta-llama/Llama-3.3-70B", "meta-llama/Llama-3.3-70B-Instruct"),
        ("someone/else", "someone/else"),
    ],
)
def test_training_looks_for_the_model_that_was_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, published: str) -> None:
    """Under its published name, whatever lies under that name in the folder where the command is given."""
    (tmp_path / "elsewhere" / published).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: asked.append(name) or str(tmp_path))
    job = located(read_job_text(f"model: {name}\n")[0], tmp_path, "job")
    assert model_source(job.model) == tmp_path
    assert asked == [published]


def test_a_model_may_lie_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = toy.model_folder(tmp_path / "model")
    for name in ("~/model", "~/model/config.json"):
        job = toy.job(tmp_path / "jobs", model=name, data__train=str(toy.rows(tmp_path / "rows.jsonl", 40)))
        assert model_source(planned(read_asked(job, [])).job.model) == folder


def test_a_plan_is_the_same_by_every_name_of_its_model(tmp_path: Path) -> None:
    """`train plan.json` resolves the name, and still runs the plan that was made."""
    toy.rows(tmp_path / "rows.jsonl", 4)
    job, _ = read_job_text("model: llama-3.2-1b\ndata: {train: rows.jsonl}\ntraining: {steps: 1}\nhardware: 8xH100\n")
    made = plan(job, read_model(job.model.name), read_hardware("8xH100"), trained_only=True)
    made.write(tmp_path / "plan.json")
    run = planned(read_asked(tmp_path / "plan.json", []))
    assert run.job.model.name == "meta-llama/Llama-3.2-1B"
    assert run.fingerprint == made.fingerprint
