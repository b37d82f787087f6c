"""What people see: every fact in words, within 100 columns, with or without colour."""

from __future__ import annotations

import io

import pytest

from pentamesh.job.hardware import read_hardware
from pentamesh.job.job import Job
from pentamesh.model.read import read_model
from pentamesh.plan.explain import keys, table
from pentamesh.plan.plan import Plan
from pentamesh.plan.search import plan
from pentamesh.report.terminal import WIDTH, show_plan, show_table


def planned(model: str, on: str, **job) -> Plan:
    return plan(Job(**{"model": {"name": model}, "batch": {"global_batch": 128}} | job), read_model(model), read_hardware(on))


def shown(found: Plan) -> str:
    stream = io.StringIO()
    show_plan(found, stream)
    return stream.getvalue()


@pytest.mark.parametrize(
    "found",
    [
        planned("llama-3.1-8b", "8xRTX-5090"),
        planned("llama-3.3-70b", "8xRTX-4090"),
        planned("llama-3.3-70b", "2x8xRTX-Pro-6000@200gbps"),
        planned("smollm2-135m", "2xCPU"),
        planned("qwen2.5-1.5b", "1xH100"),
    ],
    ids=lambda p: f"{p.model['name']} {p.verdict}",
)
def test_a_plan_in_words(found: Plan) -> None:
    text = shown(found)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text.startswith({"fits": "FITS", "at_risk": "AT RISK", "does_not_fit": "DOES NOT FIT"}[found.verdict])
    for word in ("Layout", "Memory of the fullest", "expected peak", "Time", "tokens/s", "MFU", "Also judged"):
        assert word in text, word
    assert ("What would fit" in text) == (found.verdict == "does_not_fit")
    assert ("Communication of one step" in text) == (found.layout.mesh.num_ranks > 1)
    flat = " ".join(text.split())
    for sentence in (*found.reasons, *found.changes_that_fit):
        assert sentence in flat


def test_one_micro_batch_is_one() -> None:
    assert "16 sequences of 4,096 tokens a step, 1 micro-batch of 2 a data rank" in shown(
        planned("smollm2-135m", "8xH100", batch={"micro_batch": 2, "global_batch": 16})
    )


def test_the_bar_shows_what_goes_beyond() -> None:
    text = shown(planned("llama-3.3-70b", "8xRTX-4090"))
    assert "#> " in text
    assert "664%" in text or any(f"{n}%" in text for n in range(500, 900))


@pytest.mark.parametrize("explained", [table(), keys()], ids=lambda t: t.title)
def test_a_table(explained) -> None:
    stream = io.StringIO()
    show_table(explained, stream)
    assert explained.title in stream.getvalue()
    for row in explained.rows:
        assert str(row[0]) in stream.getvalue()
