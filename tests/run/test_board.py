"""TensorBoard by one key: the numbers of metrics.jsonl, once each, also over a resume; and what is said where it is not installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pentamesh.errors import InputError
from pentamesh.run import board
from pentamesh.run.asked import planned, read_asked
from pentamesh.run.board import Board
from pentamesh.run.options import Options
from tests.run import toy
from tests.run.test_loop import metrics, trained


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard shows: by name and step, without what a resume has purged."""
    reader: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}


def numbers(row: dict[str, Any]) -> dict[str, float]:
    inner = {f"tokens/{name}": value for name, value in row["tokens"].items()}
    return {name: value for name, value in (row | inner).items() if isinstance(value, int | float) and name not in ("step", "version")}


def test_event_files_say_what_metrics_say_over_a_resume(tmp_path: Path) -> None:
    job = toy.job(tmp_path, logging__tensorboard=True, training__steps=4, training__evaluate_every=2, checkpoint__every=1)
    trained(job, Options(stop_at=3))
    folder = trained(job, Options(resume=True))
    found = scalars(folder.tensorboard)
    rows = metrics(folder)
    assert len(rows) == 4
    for row in rows:
        for name, value in numbers(row).items():
            assert found[name][row["step"]] == pytest.approx(value, rel=1e-6), name
    held_out = {line["step"]: line["held_out_loss"] for line in map(json.loads, folder.held_out.read_text().splitlines())}
    assert found["held_out_loss"] == pytest.approx(held_out, rel=1e-6)
    assert {step for steps in found.values() for step in steps} == {0, 1, 2, 3, 4}


def test_steps_beyond_a_checkpoint_are_purged(tmp_path: Path) -> None:
    for start, steps, value in ((-1, range(5), 1.0), (2, (3,), 2.0)):
        one = Board(tmp_path)
        one.start(start)
        for step in steps:
            one.add({"step": step, "loss": value, "skipped": None})
        one.close()
    assert scalars(tmp_path) == {"loss": {0: 1.0, 1: 1.0, 2: 1.0, 3: 2.0}}


def test_without_the_key_nothing_is_written(tmp_path: Path) -> None:
    silent = Board(None)
    silent.start(0)
    silent.add({"step": 1, "loss": 1.0})
    silent.close()
    assert list(tmp_path.iterdir()) == []


def test_an_absent_package_is_told_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "find_spec", lambda name: None)
    job = toy.job(tmp_path, logging__tensorboard=True)
    with pytest.raises(InputError, match=r"the package tensorboard is not installed\n.*job.yaml logging.tensorboard\nhint: pip install tensorboard"):
        planned(read_asked(job, []))
    assert planned(read_asked(job, ["logging.tensorboard=false"]))
