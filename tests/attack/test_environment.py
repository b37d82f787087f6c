"""The environment as a launcher left it, or a shell that forgot to: wrong numbers are told at once, and nothing waits for ranks that never come."""

from __future__ import annotations

from pathlib import Path

import pytest

from pentamesh.errors import InputError
from pentamesh.job.precision import PRECISIONS
from pentamesh.job.read import read_job
from pentamesh.job.started import environment, started
from pentamesh.run.asked import read_asked
from pentamesh.run.evaluate import evaluate
from pentamesh.run.launch import train
from pentamesh.run.options import Options
from pentamesh.run.world import connect, leave
from pentamesh.translate.finetune import Defaults, read_flags
from tests.run import toy


@pytest.mark.parametrize("text", ["x", "-1", "1.0", "", "9" * 5000, "\N{SUPERSCRIPT TWO}"])
def test_no_number(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", text)
    with pytest.raises(InputError, match=r"WORLD_SIZE = .* is not a whole number"):
        environment("WORLD_SIZE", 1)


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ("0", "WORLD_SIZE = 0 is not at least 1"),
        ("\N{SUPERSCRIPT TWO}", "WORLD_SIZE = .* is not a whole number"),
        ("2 GROUP_WORLD_SIZE=0", "GROUP_WORLD_SIZE = 0 is not at least 1"),
        ("2 GROUP_WORLD_SIZE=4", "4 nodes of 1 processes are not the 2 of WORLD_SIZE"),
        ("4 GROUP_WORLD_SIZE=2 LOCAL_WORLD_SIZE=3", "2 nodes of 3 processes are not the 4 of WORLD_SIZE"),
        ("4 GROUP_WORLD_SIZE=2 LOCAL_WORLD_SIZE=-3", "LOCAL_WORLD_SIZE = '-3' is not a whole number"),
    ],
)
def test_numbers_of_processes_that_cannot_be(monkeypatch: pytest.MonkeyPatch, said: str, what: str) -> None:
    for pair in f"WORLD_SIZE={said}".split():
        monkeypatch.setenv(*pair.split("="))
    with pytest.raises(InputError, match=what):
        started()
    with pytest.raises(InputError, match=what):
        read_flags(["--model", "m"], Defaults({}), "")


def test_a_rank_beyond_the_world_is_refused_before_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "5", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    leave()
    with pytest.raises(InputError, match="this is process 5, counted from 0, of 2"):
        connect(timeout_s=5)


def test_training_under_a_garbled_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(InputError, match="RANK = 'first' is not a whole number"):
        train(lambda: read_asked(tmp_path / "job.yaml"), Options())


def test_evaluation_is_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What torchrun left in the environment does not make it wait for a second one."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    job = read_job(toy.job(tmp_path))[0]
    with pytest.raises(InputError, match="2 processes were started for a layout of 1 ranks"):
        evaluate(job, tmp_path / "model", PRECISIONS["fp32"])
