"""Init: a job file that is read without a fault and planned, from a model and rows; what cannot become one is an error that says what to do."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pentamesh import cli
from pentamesh.job.job import Job
from pentamesh.job.read import read_job
from pentamesh.run.data.preview import collect
from pentamesh.run.first_job import write_first_job
from pentamesh.run.source import tokenizer_of
from tests.run import toy

TALK = {"dialog": [{"speaker": "customer", "text": "the cat"}, {"speaker": "agent", "text": "sees the dog"}]}
LINE = json.dumps(TALK).encode() + b"\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.model_folder(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a copy of the model and rows that call their fields otherwise."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.copytree(model, "model")
    Path("talks.jsonl").write_bytes(LINE * 3)


def run(*arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["pentamesh", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    said = capsys.readouterr()
    return int(left.value.code or 0), said.out, said.err


def test_the_job_is_planned_and_previewed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    toy.rows(Path("rows.jsonl"), 200)
    code, out, err = run("init", "model", "rows.jsonl", "--on", "2xCPU", monkeypatch=monkeypatch, capsys=capsys)
    assert (code, out) == (0, "job.yaml\n")
    assert [f"next: pentamesh {command} job.yaml" in err for command in ("data preview", "plan", "train")] == [True] * 3
    job, _ = read_job(Path("job.yaml"))
    data = collect(job, tokenizer_of(Path("model")), Path(), max_measured=200)
    assert job.batch.seq_len == 128
    assert job.batch.packing
    assert job.data.held_out == 0.05
    assert data.num_too_long == 0
    code, out, _ = run("plan", "job.yaml", "--json", monkeypatch=monkeypatch, capsys=capsys)
    assert (code, json.loads(out)["verdict"]) == (0, "fits")


def test_proposed_names_are_in_the_job_and_paths_are_from_it() -> None:
    Path("jobs").mkdir()
    write_first_job("model", "talks.jsonl", Path("jobs/first.yaml"), "2xCPU")
    job, _ = read_job(Path("jobs/first.yaml"))
    assert (job.model.name, job.data.train) == ("../model", "../talks.jsonl")
    assert job.data.columns == {"messages": "dialog", "role": "speaker", "content": "text"}
    assert job.data.roles == {"customer": "user", "agent": "assistant"}
    assert (job.data.held_out, job.batch.global_batch, job.batch.seq_len) == (None, 2, 64)
    assert sorted(os.listdir("jobs")) == ["first.yaml"]


def test_comments_are_those_of_the_keys() -> None:
    lines = write_first_job("model", "talks.jsonl", Path("job.yaml"), "2xCPU").text.splitlines()
    assert all("  # " in line for line in lines[1:])
    method = next(line for line in lines if line.startswith("method"))
    assert (Job.model_fields["method"].description or "").startswith(method.partition("  # ")[2])


def test_the_longest_rows_are_left_out_where_few_are_much_longer() -> None:
    long = json.dumps({"text": "the cat " * 20, "output": "x", "instruction": "the dog " * 30})
    rows = [json.dumps({"instruction": f"the cat {n}", "output": "runs"}) for n in range(200)]
    Path("rows.jsonl").write_text("\n".join([long, *rows]) + "\n")
    found = write_first_job("model", "rows.jsonl", Path("job.yaml"), "2xCPU")
    job, _ = read_job(Path("job.yaml"))
    assert (job.batch.seq_len, job.data.too_long) == (64, "drop")
    assert "the longest row has" in found.notes[0]


def test_a_model_without_a_tokenizer_gives_a_guess_and_says_so() -> None:
    for file in Path("model").glob("tokenizer*"):
        file.unlink()
    found = write_first_job("model", "talks.jsonl", Path("job.yaml"), "2xCPU")
    assert "no tokenizer can be read" in found.notes[0]
    assert read_job(Path("job.yaml"))[0].batch.seq_len == 256  # the positions that it has


def write(name: str, data: bytes) -> Callable[[], Any]:
    return lambda: Path(name).write_bytes(data)


def nothing() -> None: ...


# What is done, the arguments, and what is said.
HOSTILE: dict[str, tuple[Callable[[], Any], list[str], str]] = {
    "no such model": (nothing, ["absent", "talks.jsonl"], "the model absent is not on this machine"),
    "no such rows": (nothing, ["model", "absent.jsonl"], "no file 'absent.jsonl'"),
    "neither": (nothing, ["absent", "absent.jsonl"], "no file 'absent.jsonl'"),
    "no name of a model": (nothing, ["", "talks.jsonl"], "the name of the model is empty"),
    "no name of rows": (nothing, ["model", ""], "the name of the data is empty"),
    "no such hardware": (nothing, ["model", "talks.jsonl", "--on", "8xH10"], "did you mean H100"),
    "existing output": (write("job.yaml", b"model: x\n"), ["model", "talks.jsonl"], "job.yaml is there already"),
    "output that is a folder": (lambda: Path("job.yaml").mkdir(), ["model", "talks.jsonl", "--force"], "job.yaml is there already"),
    "output in no folder": (nothing, ["model", "talks.jsonl", "--out", "new/job.yaml"], "there is no folder new"),
    "output of another kind": (nothing, ["model", "talks.jsonl", "--out", "talks.jsonl", "--force"], "does not end like a job file"),
    "empty rows": (write("talks.jsonl", b""), ["model", "talks.jsonl"], "there are no rows to train on"),
    "a torn row": (write("talks.jsonl", LINE + b"{"), ["model", "talks.jsonl"], "`pentamesh data doctor talks.jsonl` says"),
    "mixed schemas": (write("talks.jsonl", LINE * 3 + b'{"text": "x"}\n'), ["model", "talks.jsonl"], "1 of 4 rows are not in order"),
    "columns of numbers": (write("n.csv", b"a,b\n1,2\n"), ["model", "n.csv"], "1 of 1 rows are not in order"),
    "roles that mean nothing": (
        write("talks.jsonl", json.dumps({"messages": [{"role": r, "content": "x"} for r in ("r1", "r2", "r3")]}).encode()),
        ["model", "talks.jsonl"],
        "`messages[0].role` is 'r1'",
    ),
    "a model without a template": (lambda: Path("model/chat_template.jinja").unlink(), ["model", "talks.jsonl"], "the model has no chat template"),
    "a model that is torn": (write("model/config.json", b"{"), ["model", "talks.jsonl"], "config.json"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_one_clear_error(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spoil, arguments, what = HOSTILE[case]
    spoil()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    code, out, err = run("init", *arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert (code, out) == (2, "")
    assert what in err
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != ".cache"} == before
