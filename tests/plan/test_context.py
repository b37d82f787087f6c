"""Context parallel in a plan: every legal way is judged, the fastest that fits is taken, and the others are told of."""

from __future__ import annotations

import pytest

from pentamesh.errors import InputError
from pentamesh.job.division import CONTEXT_WAYS
from pentamesh.job.hardware import read_hardware
from pentamesh.job.job import Job
from pentamesh.model.read import read_model
from pentamesh.plan.plan import Plan
from pentamesh.plan.search import judged, plan

LONG = {"global_batch": 16, "seq_len": 131072}


def asked(model: str = "llama-3.1-8b", batch: dict[str, int] = LONG, **layout: object) -> Job:
    return Job.model_validate({"model": {"name": model}, "batch": batch, "layout": layout})


def planned(job: Job, on: str = "8xH100") -> Plan:
    return plan(job, read_model(job.model.name), read_hardware(on))


def said(found: Plan) -> str:
    return next(reason for reason in found.reasons if reason.startswith("each sequence is cut"))


def test_the_fastest_way_that_fits() -> None:
    job = asked(context=8, shard="parameters")
    found = planned(job)
    every = list(judged(job, read_model("llama-3.1-8b"), read_hardware("8xH100")))
    assert {p.held.layout.context for p in every} == set(CONTEXT_WAYS)
    rivals = [p for p in every if p.verdict == "fits" and p.policy.recompute == found.policy.recompute]
    assert found.time.step_s == min((p.time.step_s for p in rivals), key=lambda step: step.expected)
    assert said(found).startswith("each sequence is cut over 8 GPUs, with heads exchanged for tokens; with keys passed round a ring it takes ")
    assert said(found).count("a step") == 2


def test_ranks_of_a_cpu_are_processes() -> None:
    assert said(planned(asked(context=2), "2xCPU")).startswith("each sequence is cut over 2 processes, with ")


@pytest.mark.parametrize("way", CONTEXT_WAYS)
def test_what_is_asked_is_taken(way: str) -> None:
    found = planned(asked(context=4, context_attention=way))
    assert (found.layout.mesh.cp, found.layout.context) == (4, way)
    assert ";" not in said(found)


def test_what_cannot_be_is_said() -> None:
    found = planned(asked(context=16, batch={"global_batch": 2, "seq_len": 262144}), "2x8xH100@8x400gbps")
    assert found.layout.context != "ulysses"
    assert "not with heads exchanged for tokens: context = 16 does not divide kv_heads = 8" in said(found)
    # A quarter of an odd number of pieces: no rank could have an early and a late one.
    found = planned(asked(context=4, batch={"global_batch": 8, "seq_len": 4100}))
    assert found.layout.context == "ulysses"
    assert "not with keys passed round a ring: seq_len = 4100 is not a multiple of 2 x context = 8" in said(found)


def test_where_no_way_can_be_all_reasons_are_told() -> None:
    with pytest.raises(InputError) as error:
        planned(asked(context=16, batch={"global_batch": 2, "seq_len": 16 * 257}), "2x8xH100@8x400gbps")
    assert [p.what for p in error.value.problems] == [
        "seq_len = 4112 is not a multiple of 2 x context = 32",
        "context = 16 does not divide kv_heads = 8, over which Ulysses exchanges",
    ]


def test_a_ring_between_nodes() -> None:
    """It hides behind attention where exchanges between nodes are waited for."""
    found = planned(asked(context=16, context_attention="ring", batch={"global_batch": 2, "seq_len": 1048576}), "2x8xH100@8x400gbps")
    (sent,) = (c for c in found.communication if c.kind == "send")
    assert sent.exposed_s == 0 < sent.seconds


def test_long_sequences_are_cut_inside_a_node_where_nothing_is_said() -> None:
    found = planned(asked(batch={"global_batch": 8, "seq_len": 524288}))
    assert (found.verdict, found.layout.mesh.cp, found.layout.shard) == ("fits", 8, "parameters")
    short = planned(asked(batch={"global_batch": 8, "seq_len": 4096}))
    assert short.layout.mesh.cp == 1
    assert all(a.layout["cp"] == 1 for a in short.alternatives)


def test_changes_are_tried_with_the_context_that_the_plan_would_choose() -> None:
    changes = planned(asked(batch={"global_batch": 8, "seq_len": 1048576})).changes_that_fit
    assert "seq_len = 524288" in changes
    assert any(change.startswith("layout.activation_offload: true") for change in changes)
    assert planned(asked(batch={"global_batch": 8, "seq_len": 524288})).verdict == "fits"


def test_fewer_sequences_than_ranks_are_told_to_be_cut() -> None:
    with pytest.raises(InputError, match=r"use global_batch = 8, or cut each sequence over several ranks \(layout.context\)"):
        planned(asked(batch={"global_batch": 1, "seq_len": 524288}))
    with pytest.raises(InputError, match=r"use global_batch = 4, or cut each sequence over more ranks \(layout.context\)"):
        planned(asked(context=2, batch={"global_batch": 1, "seq_len": 524288}))


def test_context_is_not_tried_where_states_fit_no_gpu() -> None:
    """They are cut over data as far."""
    found = planned(asked("llama-3.1-70b", batch={"global_batch": 8, "seq_len": 131072}))
    assert found.verdict == "does_not_fit"
    assert all(a.layout["cp"] == 1 for a in found.alternatives)


def test_a_model_that_cannot_be_cut_along_a_sequence_is_judged_as_ever() -> None:
    job = Job.model_validate({"model": {"name": "gpt2"}, "batch": {"global_batch": 512, "micro_batch": 512, "seq_len": 1024}})
    assert planned(job, "1xRTX-4090").layout.mesh.cp == 1
