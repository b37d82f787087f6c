"""Pushing to the hub, by a library that stands in for huggingface_hub's: what is asked of it, what is refused before, what stays when it fails."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from typer.testing import CliRunner

from pentamesh.cli import app
from pentamesh.errors import InputError, RunFailed
from pentamesh.job.read import read_job_text
from pentamesh.job.repository import is_repository
from pentamesh.run.asked import planned, read_asked
from pentamesh.run.folder import RunFolder
from pentamesh.run.launch import keep
from pentamesh.run.loop import Ending
from pentamesh.run.options import Options
from pentamesh.run.worlds import run_world
from tests.run import toy
from tests.run.test_loop import rank

REAL = huggingface_hub.HfApi
TOKEN = "hf_secret_of_this_test"


class Hub:
    """Keeps what was asked of it in a file, which other processes can read; it takes what the library takes."""

    log = Path()
    fails = False

    def __init__(self, **given: Any) -> None:
        inspect.signature(REAL).bind(**given)

    def create_repo(self, repo_id: str, **asked: Any) -> str:
        inspect.signature(REAL.create_repo).bind(self, repo_id, **asked)
        self._note("create_repo", repo_id=repo_id, **asked)
        if Hub.fails:
            raise ConnectionError("the hub is down")
        return f"https://hub/{repo_id}"

    def upload_folder(self, *, folder_path: Path, **asked: Any) -> None:
        inspect.signature(REAL.upload_folder).bind(self, folder_path=folder_path, **asked)
        files = {path.relative_to(folder_path).as_posix() for path in folder_path.rglob("*") if path.is_file()}
        self._note("upload_folder", files=sorted(files - set(asked["ignore_patterns"])), **asked)

    def _note(self, call: str, **asked: Any) -> None:
        with Hub.log.open("a") as file:
            file.write(json.dumps({"call": call} | asked) + "\n")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub that can be reached, and somebody who is logged in there; the file of what was asked."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(Hub, "log", tmp_path / "asked.jsonl")
    monkeypatch.setattr(Hub, "fails", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return tmp_path / "asked.jsonl"


def rank_with_hub(folder: Path, options: Options, log: Path, fails: bool) -> Ending:
    huggingface_hub.HfApi = Hub  # type: ignore[misc, assignment]
    Hub.log, Hub.fails = log, fails
    return rank(folder, options)


def pushed(job: Path, log: Path, *, fails: bool = False) -> RunFolder:
    folder = keep(read_asked(job), Options(), even_so=False)
    run_world(rank_with_hub, 2, folder.path, Options(), log, fails)
    return folder


def test_a_run_is_pushed_with_its_card(tmp_path: Path, hub: Path) -> None:
    toy.model_folder(tmp_path / "model")
    model = {"name": "model", "new_tokens": ["<|think|>"]}
    toy.rows(tmp_path / "more.jsonl", 6, seed=1)
    train = [{"rows": "rows.jsonl"}, {"rows": "more.jsonl", "weight": 0.5}]
    folder = pushed(toy.job(tmp_path, model=model, checkpoint__push_to_hub="org/tiny", training__freeze=["*norm*"], data__train=train), hub)
    create, upload = map(json.loads, hub.read_text().splitlines())
    assert create == {"call": "create_repo", "repo_id": "org/tiny", "private": True, "exist_ok": True}
    assert upload["repo_id"] == "org/tiny"
    assert upload["commit_message"].startswith("Step 6 of plan ")
    companions = ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert upload["files"] == sorted(["README.md", "model.safetensors", *companions])
    # Of an earlier push only files of weights may be in the way of these.
    assert upload["delete_patterns"] == ["model*.safetensors", "model.safetensors.index.json"]
    card = (folder.export / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["pentamesh"]}
    rows = [json.loads(line) for line in folder.held_out.read_text().splitlines()]
    held_out = f"| held-out loss | {rows[0]['held_out_loss']:.4f} (step 0) to {rows[-1]['held_out_loss']:.4f} (step 6) |"
    assert held_out in card
    for line in (
        "| base model | model |",
        "| training rows | rows.jsonl; more.jsonl, weight 0.5 |",
        "| held-out rows | 20.00% of the training rows |",
        "`*norm*`",
        r"`<\|think\|>`",
    ):
        assert line in card
    assert "| layout | full shard, dp_shard 2, on " in card
    assert str(tmp_path) not in card
    texts = [path.read_bytes() for path in folder.path.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in text for text in texts)


def test_a_failed_upload_leaves_the_run_whole(tmp_path: Path, hub: Path) -> None:
    job = toy.job(tmp_path, checkpoint__push_to_hub="org/tiny", checkpoint__private=False)
    with pytest.raises(RunFailed, match="the export could not be pushed to org/tiny: the hub is down") as caught:
        pushed(job, hub, fails=True)
    run = tmp_path / "runs/job"
    assert "--push org/tiny` tries again" in caught.value.problems[0].hint
    assert (run / "export/model.safetensors").is_file()
    assert (run / "receipt.json").is_file()
    hub.unlink()
    result = CliRunner().invoke(app, ["export", str(run), "--push", "org/tiny"])
    assert result.exit_code == 0, result.output
    assert "pushed to https://hub/org/tiny" in result.stderr
    create, upload = map(json.loads, hub.read_text().splitlines())
    assert create["private"] is False
    assert "README.md" in upload["files"]


def test_an_earlier_step_has_the_losses_up_to_it(tmp_path: Path, hub: Path) -> None:
    folder = pushed(toy.job(tmp_path, checkpoint__keep=3), hub)
    assert not hub.exists()
    assert not (folder.export / "README.md").exists()
    result = CliRunner().invoke(app, ["export", str(folder.path), "--step", "4", "--to", str(tmp_path / "four"), "--push", "org/four"])
    assert result.exit_code == 0, result.output
    card = (tmp_path / "four/README.md").read_text()
    assert "(step 3) |" in card
    assert "(step 6)" not in card


def refused(job: Path) -> str:
    with pytest.raises(InputError) as caught:
        planned(read_asked(job))
    (problem,) = caught.value.problems
    assert "checkpoint.push_to_hub" in problem.where
    return problem.what


def test_who_is_not_logged_in_is_told_before_training(tmp_path: Path, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = toy.job(tmp_path, checkpoint__push_to_hub="org/tiny")
    assert planned(read_asked(job)).job.checkpoint.private
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert refused(job) == "the export is to be pushed to the hub, and nobody is logged in there"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert refused(job) == "the export is to be pushed, and HF_HUB_OFFLINE is set"
    assert not hub.exists()


@pytest.mark.parametrize("name", ["org/name", "Org-1/na.me_2", "a/b", "you/x-y-1.5B"])
def test_names_of_repositories(name: str) -> None:
    huggingface_hub.utils.validate_repo_id(name)
    assert is_repository(name)


@pytest.mark.parametrize(
    "name",
    ["name", "org/", "/name", "a/b/c", "org/na me", "org/-x", "org/x.", "org/a--b", "org/a..b", "org/x.git", "o/" + "x" * 96, "ö/x", "org/x\n"],
)
def test_what_is_no_name_of_a_repository(name: str) -> None:
    with pytest.raises(InputError) as caught:
        read_job_text(yaml.safe_dump({"model": "m", "checkpoint": {"push_to_hub": name}}), "job.yaml")
    assert [(p.what, p.where) for p in caught.value.problems] == [
        (f"{name!r} is no name of a repository on the hub", "job.yaml:2 checkpoint.push_to_hub")
    ]


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"push_to_hub": "org/x", "export": False}, "push_to_hub with export = false: what is pushed is the exported folder"),
        ({"private": False}, "private = false and nothing is pushed"),
    ],
)
def test_keys_that_do_not_go_together(keys: dict[str, Any], what: str) -> None:
    with pytest.raises(InputError) as caught:
        read_job_text(yaml.safe_dump({"model": "m", "checkpoint": keys}), "job.yaml")
    assert [p.what for p in caught.value.problems] == [what]
