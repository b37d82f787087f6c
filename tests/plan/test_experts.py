"""Expert parallel in a plan: degrees that are tried, what is chosen, and what is said of it."""

from __future__ import annotations

import pytest

from pentamesh.cost.needs import Range
from pentamesh.errors import InputError
from pentamesh.job.hardware import read_hardware
from pentamesh.job.job import Job
from pentamesh.model.read import read_model
from pentamesh.plan.budget import axes
from pentamesh.plan.explain import strategies
from pentamesh.plan.plan import Plan
from pentamesh.plan.search import judged, plan

EIGHT = "8xH100"


def asked(model: str = "qwen3-30b-a3b", **sections: object) -> Job:
    return Job.model_validate({"model": {"name": model}, "batch": {"global_batch": 64}} | sections)


def planned(job: Job, on: str = EIGHT, *, trained_only: bool = False) -> Plan:
    return plan(job, read_model(job.model.name), read_hardware(on), trained_only=trained_only)


def said(found: Plan, start: str) -> str:
    return next((reason for reason in found.reasons if reason.startswith(start)), "")


@pytest.mark.parametrize("trained_only", [False, True])
def test_experts_are_parted_where_that_is_faster(trained_only: bool) -> None:
    found = planned(asked(), trained_only=trained_only)
    assert found.verdict == "fits"
    assert found.layout.mesh.ep > 1 == found.layout.mesh.tp
    tried = {found.layout.mesh.ep} | {a.layout["ep"] for a in found.alternatives}
    assert tried >= {1, 2, 4, 8}
    alone = next(a for a in found.alternatives if a.layout["strategy"] == "full_shard")
    assert alone.step_s > 1.08 * found.time.step_s.expected
    assert f"parted over {found.layout.mesh.ep} GPUs" in said(found, "the 128 experts")
    assert "with all on each it takes" in said(found, "the 128 experts")
    assert not said(found, "expert parallel: planned")


@pytest.mark.parametrize(("expert", "shard"), [(8, "auto"), (2, "optimizer"), (1, "auto")])
def test_what_is_asked_is_taken(expert: int, shard: str) -> None:
    found = planned(asked(layout={"expert": expert, "shard": shard}))
    assert found.layout.mesh.ep == expert
    assert shard in ("auto", found.layout.shard)
    assert all(a.layout["ep"] == expert for a in found.alternatives)


def test_degrees_that_a_request_leaves_open() -> None:
    """Copies and a strategy that are named stay; experts are parted among the ranks that share."""
    job, model, machine = asked(layout={"replicate": 2, "shard": "parameters"}), read_model("qwen3-30b-a3b"), read_hardware(EIGHT)
    found = {p.held.layout for p in judged(job, model, machine, ("expert",))}
    assert {(layout.mesh.dp_replicate, layout.shard) for layout in found} == {(2, "parameters")}
    assert {layout.mesh.ep for layout in found} == {1, 2, 4}
    dense = list(judged(asked("llama-3.1-8b"), read_model("llama-3.1-8b"), machine, ("expert",)))
    assert {p.held.layout.mesh.ep for p in dense} == {1}


def test_experts_over_nodes_where_a_node_does_not_do() -> None:
    found = planned(asked("deepseek-v3", batch={"global_batch": 512}, method="pretrain"), "32x8xH100@8x400gbps", trained_only=True)
    assert found.verdict == "fits"
    assert found.layout.mesh.ep > 8
    (sent,) = (c for c in found.communication if c.axis == "ep")
    assert sent.link == "8 x 400 Gb/s a node"
    assert sent.exposed_s == sent.seconds
    # All experts of a block on each rank are 2 x 23 GB in bf16, gathered and for gradients more.
    whole = next(a for a in found.alternatives if a.layout["strategy"] == "full_shard")
    assert whole.verdict == "does_not_fit"


def test_every_axis_at_once() -> None:
    found = planned(asked("qwen3-235b-a22b", batch={"global_batch": 256}, method="pretrain"), "16x8xH100@8x400gbps")
    layouts = [a.layout for a in found.alternatives] + [found.to_json()["layout"]]
    assert any(min(layout["pp"], layout["ep"]) > 1 for layout in layouts)
    assert {layout["ep"] * layout["edp"] for layout in layouts} == {layout["dp_shard"] * layout["cp"] * layout["tp"] for layout in layouts} - {0}


def test_uneven_routers_are_reckoned_with() -> None:
    found = planned(
        asked(layout={"expert": 8, "shard": "parameters", "activation_checkpointing": "full"}, batch={"global_batch": 16, "seq_len": 16384})
    )
    rows = found.memory.parts_bytes["experts"]
    assert rows > 0
    assert "1.2 times the rows of an even share" in said(found, "the fullest GPU")
    assert "5 times as many" in said(found, "the fullest GPU")
    peak = found.memory.peak_bytes
    assert peak.high - peak.expected > rows * (5 / 1.2 - 1)
    assert isinstance(peak, Range)


def test_a_plan_at_risk_for_uneven_routers_alone_says_so() -> None:
    layout = {"expert": 8, "shard": "parameters"}
    found = planned(asked("deepseek-v3", layout=layout, batch={"global_batch": 1024}), "32x8xH100@8x400gbps")
    assert found.verdict == "at_risk"
    assert said(found, "the fullest GPU").endswith("more: only such a router would not fit")


@pytest.mark.parametrize(
    ("model", "layout", "what", "hint"),
    [
        ("llama-3.1-8b", {"expert": 8}, "expert = 8, but .* has no experts", "use expert = 1"),
        ("qwen3-30b-a3b", {"expert": 8, "shard": "none"}, r"expert = 8 (beside copies of all weights|does not divide)", ""),
        (
            "qwen3-30b-a3b",
            {"tensor": 2},
            "tensor = 2 without sequence parallel: all tensor ranks would send the same tokens",
            "sequence_parallel: true",
        ),
    ],
)
def test_what_cannot_be_is_told(model: str, layout: dict[str, object], what: str, hint: str) -> None:
    with pytest.raises(InputError, match=what) as caught:
        planned(asked(model, layout=layout))
    assert hint in str(caught.value)


def test_a_larger_expert_degree_is_among_the_changes() -> None:
    """ZeRO-2 keeps whole weights: of half the experts that is too much."""
    found = planned(asked(layout={"expert": 2, "shard": "gradients"}, batch={"global_batch": 64, "seq_len": 2048}))
    assert found.verdict == "does_not_fit"
    assert any(change.startswith("layout.expert: ") for change in found.changes_that_fit), found.changes_that_fit


def test_tables_tell_of_experts() -> None:
    model = read_model("qwen3-30b-a3b")
    row = next(row for row in axes(model, 8).rows if row[0].startswith("expert"))
    assert "all_to_all" in row[3]
    rows = {row[0]: row for row in strategies(model, [8, 64]).rows}
    assert rows["ZeRO-1, experts"][2] == "4P/E + 12P/N of experts"
    # 4 bytes of the dense part, of an eighth of the experts, and 12 of an eighth of all.
    experts, every = 48 * 128 * 3 * 2048 * 768, model.num_parameters
    assert rows["ZeRO-1, experts"][3] == pytest.approx(4 * (every - experts) + 4 * experts / 8 + 12 * every / 8)
    assert not any("experts" in row[0] for row in strategies(read_model("llama-3.1-8b"), [8]).rows)
