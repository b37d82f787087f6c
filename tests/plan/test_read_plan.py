"""A plan.json as others left it: what is no plan, or another one than was made, is refused with the place, and never run in part."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pentamesh.errors import InputError
from pentamesh.job.hardware import read_hardware
from pentamesh.job.read import read_job_text
from pentamesh.model.read import read_model
from pentamesh.plan.plan import Plan
from pentamesh.plan.search import plan


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    job = read_job_text("model: llama-3.2-1b\nhardware: 2xH100\nbatch: {global_batch: 16}\n")[0]
    return json.loads(json.dumps(plan(job, read_model("llama-3.2-1b"), read_hardware("2xH100")).to_json()))


def refused(path: Path, text: str, **options: Any) -> str:
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        Plan.read(path, **options)
    return str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "null", "5", "{}", "[" * 100_000, '{"schema": "pentamesh.plan"', "\x00"])
def test_what_is_no_plan(tmp_path: Path, text: str) -> None:
    assert "is not a plan" in refused(tmp_path / "plan.json", text)


def test_every_part_is_needed_and_of_its_kind(tmp_path: Path, made: dict[str, Any]) -> None:
    """Each key left out, and each as null, a list, a text and a number: refused, or of that kind anyway. Nothing else is raised."""
    path, num_refused = tmp_path / "plan.json", 0
    for key in made.keys() - {"edp", "schedule"}:
        for change in (None, [], {}, "x", 5):
            path.write_text(json.dumps(made | {key: change}))
            try:
                Plan.read(path)
            except InputError:
                num_refused += 1
        if key not in ("fingerprint", "strategy"):  # both follow from the rest
            assert key in refused(path, json.dumps({name: value for name, value in made.items() if name != key}))
    assert num_refused > 60


def degrees(tree: dict[str, Any]) -> None:
    tree["layout"]["dp_replicate"] *= 250


def rate(tree: dict[str, Any]) -> None:
    tree["job"]["optimizer"]["lr"] = 1.0


def batch(tree: dict[str, Any]) -> None:
    tree["policy"]["micro_batch"] = 3


@pytest.mark.parametrize("change", [degrees, rate, batch])
def test_a_plan_that_was_altered_is_not_run(tmp_path: Path, made: dict[str, Any], change: Callable[[dict[str, Any]], None]) -> None:
    """Its predictions are those of another plan; started as it stands, a degree of 500 starts 500 processes."""
    altered = copy.deepcopy(made)
    change(altered)
    assert "was altered since it was made" in refused(tmp_path / "plan.json", json.dumps(altered), as_made=True)
    Plan.read(tmp_path / "plan.json")  # as a run of another version left it: still read


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("layout.dp_replicate", 1.0, "layout.mesh.dp_replicate: Input should be a valid integer"),
        ("layout.dp_replicate", 0, "a degree is at least 1"),
        ("layout.shard", "bogus", "layout.shard: Input should be 'none'"),
        ("policy.reduce", "never", "policy.reduce: Input should be 'once'"),
        ("precision.compute", "float32", "is no precision that is known"),
        ("verdict", "maybe", "verdict: Input should be 'fits'"),
        ("memory.peak_bytes.expected", "much", "memory.peak_bytes.expected: Input should be a valid number"),
        ("tokens_per_s", float("nan"), "NaN is no number of JSON"),
        ("job.batch.seq_len", -4, "job.batch.seq_len: Input should be greater than or equal to 2"),
        ("version", 2, "is pentamesh.plan version 2, not pentamesh.plan version 1"),
    ],
)
def test_values_that_no_plan_has(tmp_path: Path, made: dict[str, Any], path: str, value: Any, said: str) -> None:
    altered = copy.deepcopy(made)
    *outer, last = path.split(".")
    place = altered
    for key in outer:
        place = place[key]
    place[last] = value
    assert said in refused(tmp_path / "plan.json", json.dumps(altered))
