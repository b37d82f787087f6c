"""The rule of choice, by arithmetic: the cases that people argue about, each with its reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pentamesh.errors import InputError
from pentamesh.job.division import divisors
from pentamesh.job.hardware import read_hardware
from pentamesh.job.job import Job
from pentamesh.model.read import read_model
from pentamesh.plan.plan import Plan
from pentamesh.plan.search import CLOSE, judged, plan

GB = 1e9


def planned(model: str, on: str | dict[str, object], **job) -> Plan:
    whole = Job(**{"model": {"name": model}, "batch": {"global_batch": 128}} | job)
    return plan(whole, read_model(model), read_hardware(on))


def test_8b_full_on_one_96_gb_card() -> None:
    found = planned("llama-3.1-8b", "1xRTX-Pro-6000")
    assert (found.verdict, found.strategy) == ("does_not_fit", "ddp")
    assert found.memory.states_bytes / GB == pytest.approx(128.5, rel=0.01)
    assert "16 bytes a parameter (bf16) is 128 GB" in found.reasons[0]
    assert any("bf16-pure" in change for change in found.changes_that_fit)
    assert any(change.startswith("2 x RTX-PRO-6000") for change in found.changes_that_fit)
    assert not any("batch" in change or "seq_len" in change for change in found.changes_that_fit)


def test_8b_in_bf16_pure_fits_that_card() -> None:
    found = planned("llama-3.1-8b", "1xRTX-Pro-6000", precision="bf16-pure")
    assert found.verdict in ("fits", "at_risk")
    assert found.memory.states_bytes / GB == pytest.approx(64.2, rel=0.01)
    assert found.changes_that_fit == ()


def test_8b_on_a_node_of_5090_is_full_shard() -> None:
    found = planned("llama-3.1-8b", "8xRTX-5090")
    assert found.verdict in ("fits", "at_risk")
    assert found.strategy == "full_shard"
    assert (found.layout.mesh.dp_replicate, found.layout.mesh.dp_shard) == (1, 8)
    assert found.memory.states_bytes / GB == pytest.approx(16.1, rel=0.01)
    assert 8_000 < found.tokens_per_s < 16_000
    assert found.reasons[0] == (
        "16 bytes a parameter (bf16) is 128 GB on every GPU under DDP: 33.7 GB of one RTX-5090 cannot hold it; cut over 8 it is 16.1 GB"
    )


@pytest.mark.parametrize("global_batch", [16, 128])
@pytest.mark.parametrize(
    ("model", "on"),
    [("qwen2.5-1.5b", "8xH100"), ("llama-3.2-1b", "8xH100"), ("qwen2.5-0.5b", "8xH100"), ("smollm2-135m", "8xH100"), ("smollm2-135m", "8xRTX-4090")],
)
def test_small_models_are_replicated(model: str, on: str, global_batch: int) -> None:
    found = planned(model, on, batch={"global_batch": global_batch})
    assert (found.verdict, found.strategy) == ("fits", "ddp")
    assert (found.layout.mesh.dp_replicate, found.layout.mesh.dp_shard) == (8, 1)


def test_70b_full_over_two_nodes_is_never_hybrid() -> None:
    found = planned("llama-3.3-70b", "2x8xRTX-Pro-6000@200gbps")
    assert (found.verdict, found.strategy) == ("fits", "full_shard")
    hybrid = next(a for a in found.alternatives if a.layout["strategy"] == "hybrid_shard")
    assert hybrid.verdict == "does_not_fit"
    assert "141 GB" in hybrid.why_not


def test_70b_lora_over_two_nodes_goes_by_the_numbers() -> None:
    found = planned("llama-3.3-70b", "2x8xRTX-Pro-6000@200gbps", method="lora")
    assert found.verdict == "fits"
    rivals = {a.layout["strategy"]: a for a in found.alternatives if a.verdict == "fits"}
    assert found.strategy == "hybrid_shard"
    assert rivals["full_shard"].step_s > found.time.step_s.expected


def test_70b_on_eight_4090_and_never_a_smaller_batch() -> None:
    found = planned("llama-3.3-70b", "8xRTX-4090")
    assert found.verdict == "does_not_fit"
    assert found.changes_that_fit
    for change in found.changes_that_fit:
        assert "batch" not in change
        assert not change.startswith("seq_len")


@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.1-70b"])
def test_pretraining_says_what_wins_and_by_how_much(model: str) -> None:
    found = planned(model, "8x8xH100@8x400gbps", method="pretrain")
    assert found.verdict == "fits"
    assert {a.layout["strategy"] for a in found.alternatives} >= {"ddp", "zero2", "hybrid_shard"}
    assert 0.25 < found.mfu < 0.55


def test_the_simplest_of_the_fast_wins() -> None:
    job = Job(model={"name": "qwen2.5-1.5b"}, batch={"global_batch": 128})  # type: ignore[arg-type]
    able = [p for p in judged(job, read_model("qwen2.5-1.5b"), read_hardware("8xH100")) if p.verdict == "fits"]
    found = planned("qwen2.5-1.5b", "8xH100")
    assert found.time.step_s.expected <= (1 + CLOSE) * min(p.time.step_s.expected for p in able)


def test_what_the_user_fixes_is_judged() -> None:
    for shard, strategy in (("none", "ddp"), ("optimizer", "zero1"), ("gradients", "zero2"), ("parameters", "full_shard")):
        assert planned("llama-3.2-1b", "8xH100", layout={"shard": shard}).strategy == strategy
    hybrid = planned("llama-3.2-1b", "8xH100", layout={"replicate": 2})
    assert (hybrid.strategy, hybrid.layout.mesh.dp_replicate, hybrid.layout.mesh.dp_shard) == ("hybrid_shard", 2, 4)
    kept = planned("llama-3.1-8b", "8xH100", layout={"shard": "parameters", "reshard_after_forward": False})
    assert not kept.policy.reshard
    recomputed = planned("llama-3.2-1b", "8xH100", layout={"activation_checkpointing": "full"})
    assert recomputed.policy.recompute == "full"


def test_activations_wait_in_host_memory() -> None:
    """What it frees, costs and needs is said; nothing on a CPU, and no more than the host has."""
    asked = {"batch": {"global_batch": 16, "seq_len": 32768}, "layout": {"activation_offload": True, "shard": "parameters"}}
    found = planned("llama-3.1-8b", "8xH100", **asked)
    assert (found.policy.recompute, found.policy.offload) == ("full", True)
    assert any(r.startswith("inputs of blocks wait for backward in host memory: 8.59 GB a GPU, and 1.36 s a step") for r in found.reasons)
    small = planned("llama-3.1-8b", {"gpus": 8, "gpu": "H100", "host_ram": "32 GB"}, **asked)
    assert small.verdict == "does_not_fit"
    on_cpu = planned("smollm2-135m", "2xCPU", batch={"global_batch": 4, "seq_len": 512}, layout={"activation_offload": True})
    assert any("changes nothing on a CPU" in r for r in on_cpu.reasons)
    assert on_cpu.memory.host_bytes == 0


def test_a_stream_in_parts_is_said() -> None:
    asked = {"layout": {"tensor": 2, "sequence_parallel": True, "async_tensor_parallel": True}, "training": {"compile": True}}
    found = planned("llama-3.1-8b", "8xH100", batch={"global_batch": 16, "seq_len": 4096}, **asked)
    assert found.policy.async_tensor
    assert any("in parts beside the matmuls" in r for r in found.reasons)
    on_cpu = planned(
        "smollm2-135m", "2xCPU", batch={"global_batch": 4, "seq_len": 512}, layout=asked["layout"] | {"tensor": 1, "sequence_parallel": False}
    )
    assert any("async_tensor_parallel changes nothing on a CPU" in r for r in on_cpu.reasons)


def test_what_is_recomputed_is_as_little_as_fits() -> None:
    lengths = {8192: "none", 12288: "selective", 32768: "full"}
    for seq_len, wanted in lengths.items():
        found = planned("llama-3.1-8b", "8xH100", batch={"global_batch": 16, "seq_len": seq_len}, layout={"shard": "parameters"})
        assert found.policy.recompute == wanted, seq_len
        others = {a.layout["recompute"] for a in found.alternatives if a.layout["strategy"] == "full_shard"}
        assert others == {"none", "selective", "full"} - {wanted}


def test_parameters_stay_gathered_where_memory_allows() -> None:
    roomy = planned("llama-3.2-1b", "8xH100", layout={"shard": "parameters"})
    assert (roomy.policy.keep_gathered, roomy.policy.reduce) == (True, "once")
    tight = planned("llama-3.1-8b", "8xRTX-5090", layout={"shard": "parameters"})
    assert (tight.policy.reshard, tight.policy.reduce) == (True, "each")


def test_all_five_axes_are_judged_by_arithmetic() -> None:
    """405B over tensor 8 x pipeline 8 on 64 H100: no 80 GB card holds it, the bubble of 2,048 micro-batches is 0.34%, a step some 1,700 s."""
    found = planned(
        "llama-3.1-405b",
        "8x8xH100@8x400gbps",
        method="pretrain",
        batch={"global_batch": 2048, "seq_len": 8192},
        layout={"tensor": 8, "pipeline": 8, "sequence_parallel": True},
    )
    assert (found.verdict, found.strategy) == ("does_not_fit", "multi_axis")
    assert len(found.memory.stages) == 8
    assert found.time.bubble_s / found.time.compute_s == pytest.approx(7 / 2048, rel=0.05)
    assert 1_200 < found.time.step_s.expected < 2_400
    assert {c.axis for c in found.communication} >= {"tp", "pp"}


def test_a_global_batch_that_is_not_whole_says_what_works() -> None:
    with pytest.raises(InputError) as error:
        planned("llama-3.2-1b", "8xH100", batch={"global_batch": 12})
    assert "global_batch = 8 or 16" in str(error.value)
    assert str(error.value).count("error:") == 1


def test_the_same_search_runs_on_cpu() -> None:
    found = planned("smollm2-135m", "2xCPU", batch={"global_batch": 4, "seq_len": 512}, precision="fp32")
    assert found.strategy == "ddp"
    assert found.memory.parts_bytes["framework"] == 0
    assert 50 < found.tokens_per_s < 2_000


def test_a_plan_survives_its_json(tmp_path: Path) -> None:
    found = planned("llama-3.1-8b", "8xRTX-5090")
    found.write(tmp_path / "plan.json")
    again = Plan.read(tmp_path / "plan.json")
    assert again == found
    assert again.fingerprint == found.fingerprint


def test_a_pipeline_in_json() -> None:
    found = planned("llama-3.1-8b", "8xH100", layout={"pipeline": 4, "shard": "optimizer"}).to_json()
    assert [stage["stage"] for stage in found["memory"]["stages"]] == [0, 1, 2, 3]
    assert found["policy"]["schedule"] == "1f1b"
    assert (found["layout"]["pp"], found["layout"]["edp"]) == (4, 2)


def test_the_json_contract() -> None:
    found = json.loads(json.dumps(planned("llama-3.3-70b", "8xRTX-4090").to_json()))
    assert (found["schema"], found["version"]) == ("pentamesh.plan", 1)
    assert found["verdict"] in ("fits", "at_risk", "does_not_fit")
    assert {"dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "edp"} <= found["layout"].keys()
    assert {"schedule", "micro_batch", "grad_accum"} <= found["policy"].keys()
    assert {"name", "weight", "compute", "reduce", "state"} <= found["precision"].keys()
    assert found["memory"].keys() == {
        "usable_bytes",
        "peak_bytes",
        "states_bytes",
        "parts_bytes",
        "stages",
        "host_bytes",
        "host_usable_bytes",
        "copy_bytes",
    }
    assert all(stage.keys() == {"stage", "peak_bytes", "states_bytes", "parts_bytes"} for stage in found["memory"]["stages"])
    assert found["time"].keys() == {"step_s", "compute_s", "exposed_communication_s", "bubble_s"}
    for interval in (found["memory"]["peak_bytes"], found["time"]["step_s"]):
        assert interval.keys() == {"low", "expected", "high"}
        assert interval["low"] <= interval["expected"] <= interval["high"]
    for row in found["communication"]:
        assert row.keys() == {"axis", "kind", "count", "bytes_per_rank", "link", "seconds", "exposed_s"}
        assert isinstance(row["count"], int)
        assert isinstance(row["bytes_per_rank"], int)
    for row in found["alternatives"]:
        assert row.keys() == {"layout", "verdict", "step_s", "why_not"}
        assert row["why_not"]
    assert all(isinstance(found[key], float) for key in ("tokens_per_s", "tokens_per_s_per_gpu", "mfu"))
    assert all(isinstance(text, str) for key in ("reasons", "changes_that_fit") for text in found[key])


@pytest.mark.parametrize(("model", "on"), [("llama-3.2-1b", "1xH100"), ("qwen3-30b-a3b", "8xRTX-5090")])
def test_only_full_shard_reshards(model: str, on: str) -> None:
    """Also where it is the only rank, or nothing fits and changes are tried."""
    for reshard in (True, False):
        found = planned(model, on, batch={"seq_len": 512}, layout={"reshard_after_forward": reshard, "replicate": 1})
        assert (found.layout.shard, found.policy.reshard) == ("parameters", reshard)
    assert planned(model, "2x4xRTX-4090@100gbps", precision="fp32", layout={"reshard_after_forward": True, "replicate": 2})


@pytest.mark.parametrize(("on", "layout", "ranks"), [("3xH100", {}, 3), ("1xH100", {}, 1), ("4xH100", {"replicate": 4}, 1)])
def test_experts_without_room_are_told(on: str, layout: dict[str, int], ranks: int) -> None:
    with pytest.raises(InputError, match=f"expert = 2 does not divide data x context x tensor = {ranks}") as told:
        planned("qwen3-30b-a3b", on, batch={"global_batch": 12}, layout=layout | {"expert": 2})
    assert f"use expert = {divisors(ranks)}:" in str(told.value)


def test_a_step_of_any_number_of_micro_batches() -> None:
    """What is counted is not laid out one by one: 10^15 of them would not fit any memory."""
    assert planned("smollm2-135m", "1xCPU", batch={"global_batch": 10**15}).policy.grad_accum == 10**15
