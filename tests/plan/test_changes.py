"""Changes that fit: each sentence is true when the change is made."""

from __future__ import annotations

import pytest

from pentamesh.job.hardware import read_hardware
from pentamesh.job.job import Job
from pentamesh.model.read import read_model
from pentamesh.plan.changes import _smallest
from pentamesh.plan.plan import Plan
from pentamesh.plan.search import plan


def planned(model: str, on: str, **job) -> Plan:
    return plan(Job(**{"model": {"name": model}, "batch": {"global_batch": 48}} | job), read_model(model), read_hardware(on))


def change(found: Plan, start: str) -> str:
    return next(text for text in found.changes_that_fit if text.startswith(start))


def test_precision_method_and_gpus_hold_what_they_promise() -> None:
    found = planned("llama-3.1-8b", "1xRTX-Pro-6000")
    assert change(found, "precision: bf16-pure")
    assert planned("llama-3.1-8b", "1xRTX-Pro-6000", precision="bf16-pure").verdict != "does_not_fit"
    assert change(found, "method: lora")
    assert planned("llama-3.1-8b", "1xRTX-Pro-6000", method="lora").verdict != "does_not_fit"
    count, _, rest = change(found, "2 x").partition(" x ")
    assert planned("llama-3.1-8b", f"{count}x{rest.split(' ')[0]}").verdict != "does_not_fit"
    bigger = next(text for text in found.changes_that_fit if "usable each" in text)
    assert planned("llama-3.1-8b", bigger.split(" (")[0].replace(" x ", "x")).verdict == "fits"


def test_more_nodes_is_the_smallest_number() -> None:
    found = planned("llama-3.1-70b", "1x8xRTX-Pro-6000")
    assert found.verdict == "does_not_fit"
    nodes = int(change(found, "2 nodes").split(" ")[0])
    assert planned("llama-3.1-70b", f"{nodes}x8xRTX-Pro-6000@200gbps").verdict != "does_not_fit"


def test_a_shorter_sequence_where_states_fit() -> None:
    batch, full = {"global_batch": 48, "seq_len": 65536}, {"shard": "parameters"}
    found = planned("llama-3.1-8b", "8xRTX-5090", batch=batch, layout=full)
    assert found.verdict == "does_not_fit"
    shorter = int(change(found, "seq_len = ").removeprefix("seq_len = ").split(" ")[0])
    assert planned("llama-3.1-8b", "8xRTX-5090", batch=batch | {"seq_len": shorter}, layout=full).verdict != "does_not_fit"
    assert planned("llama-3.1-8b", "8xRTX-5090", batch=batch | {"seq_len": 2 * shorter}, layout=full).verdict == "does_not_fit"


def test_context_parallel_where_data_alone_does_not_do() -> None:
    """Sequences that no card holds the activations of are cut inside the node, if nobody has said how to shard."""
    found = planned("llama-3.1-8b", "8xH100", batch={"global_batch": 8, "seq_len": 131072})
    assert (found.verdict, found.strategy) == ("fits", "multi_axis")
    assert found.layout.mesh.cp > 1


def test_context_parallel_where_the_request_rules_it_out() -> None:
    batch = {"global_batch": 8, "seq_len": 262144}
    found = planned("llama-3.1-8b", "8xH100", batch=batch, layout={"shard": "parameters"})
    assert found.verdict == "does_not_fit"
    degree = int(change(found, "layout.context: ").removeprefix("layout.context: ").split(" ")[0])
    assert planned("llama-3.1-8b", "8xH100", batch=batch, layout={"shard": "parameters", "context": degree}).verdict != "does_not_fit"
    assert planned("llama-3.1-8b", "8xH100", batch=batch, layout={"shard": "parameters", "context": degree // 2}).verdict == "does_not_fit"


def test_what_the_request_rules_out_comes_first() -> None:
    found = planned("llama-3.1-8b", "8xRTX-5090", layout={"shard": "none"})
    assert found.changes_that_fit[0] == "full shard (layout.shard: parameters)"
    found = planned("llama-3.1-8b", "8xRTX-5090", layout={"activation_checkpointing": "none"})
    assert found.changes_that_fit[0].startswith("activation checkpointing")


@pytest.mark.parametrize("answer", [2, 3, 5, 8, 13, 16])
def test_doubling_then_halving_finds_the_smallest(answer: int) -> None:
    assert _smallest(lambda n: n >= answer, 1, 16) == answer


def test_nothing_up_to_the_limit() -> None:
    assert _smallest(lambda n: False, 1, 16) is None
