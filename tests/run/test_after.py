"""What is said of the export of a finished run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pentamesh.job.hardware import read_hardware
from pentamesh.job.job import Job
from pentamesh.job.precision import PRECISIONS
from pentamesh.model.read import read_model
from pentamesh.plan.search import plan as planned
from pentamesh.run.after import exported


@pytest.mark.parametrize(("precision", "dtype", "told"), [("fp32", "bfloat16", True), ("bf16", "bfloat16", False), ("fp32", "float32", False)])
def test_a_narrower_export_is_told(precision: str, dtype: str, told: bool) -> None:
    model = read_model("smollm2-135m")
    model = replace(model, config=model.config | {"dtype": dtype})
    job = Job.model_validate({"model": {"name": "smollm2-135m"}, "precision": precision, "hardware": "2xCPU"})
    found = replace(planned(job, model, read_hardware("2xCPU")), precision=PRECISIONS[precision])
    said = exported(Path("runs/toy/export"), found, model)
    assert said.startswith("exported to runs/toy/export")
    assert ("--dtype float32" in said) is told
