"""The tables behind a plan."""

from __future__ import annotations

import json

import pytest

from pentamesh.job.job import Job
from pentamesh.layout.rules import TABLE
from pentamesh.model.read import read_model
from pentamesh.plan.budget import axes, communication, tensor, wire
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


def test_the_communication_budget() -> None:
    """The published figures (GB, and seconds at 200 Gb/s), each beside what a ring really sends."""
    expected = {
        "llama-3.1-8b": {
            "gradients, once": (16, 0.64),
            "DDP, ring of 16": (30, 1.2),
            "hybrid 2 x 8, half": (8, 0.32),
            "full shard over 2 x 8": (45, 1.8),
        },
        "llama-3.1-70b": {
            "gradients, once": (140, 5.6),
            "DDP, ring of 16": (262.5, 10.5),
            "hybrid 2 x 8": (140, 5.6),
            "full shard over 2 x 8": (393.8, 15.8),
        },
        "llama-3.1-405b": {"DDP, ring of 64": (1595, 63.8), "hybrid 2 x 8, 8 NICs": (101.3, 4.05), "full shard over 2 x 8": (2278, 91.1)},
    }
    for name, rows in expected.items():
        found = {row[0]: row for row in communication(read_model(name)).rows}
        for what, (gigabytes, seconds) in rows.items():
            _, counted, _, _, nic, _, at_200, _ = found[what]
            # The published figures round the parameters down to 8, 70 and 405e9; embedding and head are gathered once, not twice.
            assert (nic or counted) / 1e9 == pytest.approx(gigabytes, rel=0.045), (name, what)
            assert at_200 == pytest.approx(seconds, rel=0.045), (name, what)


def test_a_ring_of_one_node_passes_no_nic() -> None:
    row = next(row for row in communication(read_model("llama-3.1-70b")).rows if row[0] == "DDP, ring of 8")
    assert row[2] / 1e9 == pytest.approx(245, rel=0.01)
    assert row[4] == 0
    assert row[5:] == (None, None, None)


def test_tensor_parallel() -> None:
    one, prefill, both = tensor(read_model("llama-3.1-70b")).rows
    assert one[1] == 2 * 80 * 8192 * 2
    assert prefill[1] / 1e9 == pytest.approx(344, rel=0.01)
    assert both[1] / 1e9 == pytest.approx(21.5, rel=0.01)
    assert both[2] / 1e9 == pytest.approx(37.6, rel=0.01)
    assert both[3:] == pytest.approx((0.104, 0.752, 1.34), rel=0.015)


def test_every_axis_says_what_it_cuts() -> None:
    found = {row[0]: row for row in axes(read_model("llama-3.1-70b")).rows}
    assert {"data, DDP", "data, full shard", "tensor", "pipeline", "context, ring", "context, gathered", "context, Ulysses"} <= found.keys()
    assert found["pipeline"][4] < found["tensor"][4] / 100  # a whisper
    refused = axes(read_model("llama-3.1-70b"), degree=16)
    assert any("context = 16 does not divide kv_heads = 8" in note for note in refused.notes)


def test_what_strategies_send() -> None:
    model = read_model("llama-3.1-70b")
    found = {row[0]: row[1:] for row in wire(model, [8, 16], "bf16-pure").rows}
    payload = 2 * model.num_parameters
    assert found["DDP"][0] == pytest.approx(2 * 7 / 8 * payload, rel=1e-6)
    assert found["ZeRO-1"] == pytest.approx(found["DDP"], rel=1e-6)
    assert found["full shard"][2] == pytest.approx(3 * 15 / 16 * payload, rel=0.02)  # the root is gathered once
    assert found["DDP"][1] == 0
    assert found["full shard"][3] == found["full shard"][2]
