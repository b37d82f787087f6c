"""What a user can write or read is documented, and the generated parts of the documentation are those of the code."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import pentamesh.errors
from pentamesh.errors import PentameshError
from pentamesh.job.job import Job
from pentamesh.job.precision import PRECISIONS
from pentamesh.layout.mesh import Layout
from pentamesh.layout.policy import Policy
from pentamesh.plan.plan import Alternative, Communication, Memory, Plan, Range, Stage, Time

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _plan() -> Plan:
    span = Range(1.0, 2.0, 3.0)
    return Plan(
        job=Job.model_validate({"model": {"name": "toy"}, "batch": {"seq_len": 8}}),
        model={"name": "toy"},
        hardware={"name": "2xCPU"},
        layout=Layout(),
        policy=Policy(),
        precision=PRECISIONS["fp32"],
        verdict="fits",
        memory=Memory(8, span, 4, {"weights": 4}, (Stage(0, span, 4, {"weights": 4}),)),
        time=Time(span, 1.0, 0.5),
        communication=(Communication("dp_shard", "all_gather", 2, 16, "loopback", 0.1, 0.0),),
        tokens_per_s=8.0,
        tokens_per_s_per_gpu=4.0,
        mfu=0.4,
        reasons=("it fits one",),
        alternatives=(Alternative({"dp_shard": 2}, "fits", 3.0, "slower"),),
        changes_that_fit=("two GPUs",),
        overrides={"batch.seq_len": "8"},
    )


def test_every_key_of_a_job_says_what_it_means(generate: ModuleType) -> None:
    keys = dict(generate.keys())
    assert {"model", "model.name", "layout.tensor", "checkpoint.keep"} <= set(keys)
    assert [name for name, field in keys.items() if not (field.description or "").strip()] == []


def test_every_key_of_a_job_is_on_its_page(generate: ModuleType) -> None:
    page = (DOCS / "reference" / "job.md").read_text()
    assert [name for name, field in dict(generate.keys()).items() if f"| `{name}` |" not in page or field.description not in page] == []


def test_generated_parts_are_fresh(generate: ModuleType) -> None:
    assert [str(path) for path in generate.stale()] == []
    used = {name for path in DOCS.rglob("*.md") for name in re.findall(r"<!-- generated: ([\w-]+) -->", path.read_text())}
    assert used == set(generate.PARTS)


def test_exit_codes_are_on_their_page() -> None:
    page = (DOCS / "reference" / "exit-codes.md").read_text()
    kinds = [k for k in vars(pentamesh.errors).values() if isinstance(k, type) and issubclass(k, PentameshError) and k is not PentameshError]
    assert [k.__name__ for k in kinds if f"| `{k.exit_code}` | `{k.__name__}` |" not in page] == []


def _names(found: Any) -> Iterator[str]:
    """The keys of a nested object; those of free-form parts (the job, the model, the hardware) are documented elsewhere."""
    for name, value in found.items() if isinstance(found, dict) else ():
        yield name
        if name not in ("job", "model", "hardware", "overrides", "parts_bytes"):
            for inner in value if isinstance(value, list) else [value]:
                yield from _names(inner)


def test_every_key_of_a_plan_is_on_its_page() -> None:
    page = (DOCS / "reference" / "plan.md").read_text()
    names = set(_names(json.loads(json.dumps(_plan().to_json()))))
    assert {"verdict", "bubble_s", "bytes_per_rank", "stage", "why_not", "sequence_parallel"} <= names
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    _plan().write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == _plan()
