"""The tables behind a plan."""

from __future__ import annotations

import json

import pytest

from pentamesh.job.job import Job
from pentamesh.layout.rules import TABLE
from pentamesh.model.read import read_model
from pentamesh.plan.explain import keys, strategies, table


def test_every_dim_of_the_table_is_told() -> None:
    assert [row[0] for row in table().rows] == list(TABLE)


def test_strategies_are_those_of_zero() -> None:
    found = strategies(read_model("llama-3.1-70b"), [8, 16])
    rows = {row[0]: row[2:] for row in found.rows}
    assert [row[2] for row in found.rows] == ["16P", "4P + 12P/N", "2P + 14P/N", "16P/N"]
    assert rows["full shard"][2] / 1e9 == pytest.approx(70.6, rel=0.01)
    assert strategies(read_model("llama-3.1-70b"), [8], "bf16-pure").rows[0][2] == "8P"
    assert json.loads(json.dumps(found.to_json()))["rows"][0]["8 GPUs"] == rows["DDP"][1]


def test_every_key_is_documented() -> None:
    found = {row[0]: row for row in keys().rows}
    assert {"model.name", "precision", "layout.shard", "batch.seq_len", "optimizer.lr"} <= found.keys()
    assert all(row[1] and row[3] for row in found.values())
    assert found["model.name"][2] == "required"
    assert found["precision"][1] == "fp32 | bf16 | bf16-pure"
    assert {key.split(".")[0] for key in found} == set(Job.model_fields)
