"""The fullest moment of a step: parts that add up, and levers that move it the right way."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pentamesh.cost import attention
from pentamesh.cost.compute import flop_per_token, work
from pentamesh.cost.copies import copied, copy_bytes
from pentamesh.cost.holding import Holding
from pentamesh.cost.memory import memory, verdict
from pentamesh.cost.needs import Memory, Range, Stage
from pentamesh.job.hardware import read_hardware
from pentamesh.job.job import Batch
from pentamesh.job.precision import PRECISIONS
from pentamesh.layout.mesh import Layout, Mesh
from pentamesh.layout.policy import Policy
from pentamesh.model.families import describe
from pentamesh.model.frozen import frozen
from pentamesh.model.read import read_model
from tests.proof.toys import TOYS

MODEL = read_model("llama-3.1-8b")
DDP, FULL = Layout(Mesh(dp_replicate=8)), Layout(Mesh(dp_shard=8), "parameters")
LEAN = Policy(grad_accum=4, recompute="full", reduce="each")


def peak(layout: Layout = FULL, policy: Policy = LEAN, precision: str = "bf16", batch: Batch | None = None, kind: str = "cuda") -> Memory:
    return memory(Holding(MODEL, layout), policy, PRECISIONS[precision], batch or Batch(), usable_bytes=10**11, kind=kind)


@pytest.mark.parametrize("layout", [DDP, FULL, Layout(Mesh(pp=2, dp_shard=2, tp=2), "parameters")], ids=str)
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_parts_add_up_to_the_expected_peak(layout: Layout, kind: str) -> None:
    found = peak(layout, kind=kind)
    assert sum(found.parts_bytes.values()) == pytest.approx(found.peak_bytes.expected, abs=10)
    assert found.peak_bytes.low < found.peak_bytes.expected < found.peak_bytes.high
    assert len(found.stages) == layout.mesh.pp
    assert max(s.peak_bytes.expected for s in found.stages) == found.peak_bytes.expected


def test_levers() -> None:
    lean = peak().peak_bytes.expected
    assert peak(policy=replace(LEAN, recompute="none")).peak_bytes.expected > lean + 15e9  # 32 blocks of 16 copies of the stream
    assert lean + 8e9 < peak(policy=replace(LEAN, recompute="selective")).peak_bytes.expected < lean + 14e9  # 12 copies of it
    assert peak(policy=replace(LEAN, reshard=False)).peak_bytes.expected > lean + 10e9  # 2 bytes of every parameter
    assert peak(policy=replace(LEAN, reduce="once")).peak_bytes.expected > lean + 25e9  # 4 bytes of every parameter
    assert peak(precision="bf16-pure").peak_bytes.expected < lean - 6e9
    # Reducing the root's gradients is fullest, however short the sequence, until activations are more.
    assert peak(batch=Batch(seq_len=2048)).peak_bytes.expected == lean < peak(batch=Batch(seq_len=32768)).peak_bytes.expected


def test_offloading_moves_block_inputs_to_the_host() -> None:
    device, off = read_hardware("8xRTX-5090").device, replace(LEAN, offload=True)
    inputs = 32 * 4096 * 4096 * 2
    assert peak(policy=off).host_bytes == inputs
    assert peak().host_bytes == peak(policy=off, kind="cpu").host_bytes == 0
    assert peak(policy=off, kind="cpu").peak_bytes == peak(kind="cpu").peak_bytes
    assert peak().parts_bytes["activations"] - peak(policy=off).parts_bytes["activations"] in (0, inputs * 30 // 32)
    there, kept = (work(Holding(MODEL, FULL), p, PRECISIONS["bf16"], Batch(), device) for p in (off, LEAN))
    assert there.forward_s - kept.forward_s == pytest.approx(inputs / 50.4e9, rel=1e-3)  # 0.8 of PCIe5
    assert there.backward_s - kept.backward_s == pytest.approx(inputs / 50.4e9, rel=1e-3)


def test_zero_and_full_shard_are_one_mechanism() -> None:
    """What differs is how long gathered weights stay and when gradients are reduced; cut gradients are as wide as the weights."""
    held_till_backward = Policy(recompute="full", reshard=False)
    peaks = {shard: peak(Layout(Mesh(dp_shard=8), shard), held_till_backward) for shard in ("optimizer", "gradients", "parameters")}
    assert peaks["optimizer"] == replace(peaks["parameters"], states_bytes=peaks["optimizer"].states_bytes, stages=peaks["optimizer"].stages)
    each, once = (peak(Layout(Mesh(dp_shard=8), "gradients"), replace(held_till_backward, grad_accum=4, reduce=r)) for r in ("each", "once"))
    assert each.parts_bytes["gradients"] == pytest.approx(4 * MODEL.num_parameters / 8, rel=0.01)
    assert once.parts_bytes["working"] - each.parts_bytes["working"] == pytest.approx(4 * MODEL.num_parameters, rel=0.01)


def test_gradients_come_as_activations_go() -> None:
    """At accumulation 1 a parameter-heavy backward is fullest at its last block, one heavy in activations at its first."""
    heavy, long = (peak(policy=Policy(recompute="full"), batch=Batch(seq_len=n)).parts_bytes for n in (128, 32768))
    assert heavy["gradients"] > 0.8 * 4 * MODEL.num_parameters / 8
    assert long["gradients"] == 0


def test_ddp_keeps_casts_where_nothing_is_recomputed() -> None:
    kept, again = peak(DDP, replace(LEAN, recompute="none")), peak(DDP)
    assert kept.parts_bytes["working"] == 2 * MODEL.num_parameters
    assert again.parts_bytes["working"] < kept.parts_bytes["working"] / 2


def test_verdict() -> None:
    def with_peak(*peak_bytes: float) -> Memory:
        return Memory(100, Range(*peak_bytes), 50, {})

    assert verdict(replace(with_peak(10, 20, 30), host_bytes=50, host_usable_bytes=40)) == "does_not_fit"
    assert [verdict(with_peak(*p)) for p in ((80, 90, 100), (80, 90, 101), (90, 101, 110))] == ["fits", "at_risk", "does_not_fit"]


def test_recompute_adds_a_forward_of_the_blocks() -> None:
    held, device = Holding(MODEL, FULL), read_hardware("8xH100").device
    plain, partly, again = (work(held, replace(LEAN, recompute=r), PRECISIONS["bf16"], Batch(), device) for r in ("none", "selective", "full"))
    assert again.forward_s == plain.forward_s == partly.forward_s
    assert 0.1 * plain.forward_s < partly.backward_s - plain.backward_s < 0.4 * plain.forward_s
    assert 0.85 * plain.forward_s < again.backward_s - plain.backward_s < plain.forward_s


def test_model_flop() -> None:
    """6 N of the matmuls and 12 L s a d; adapters need two thirds of the first and some more."""
    held = Holding(MODEL, FULL)
    assert flop_per_token(held, 4096) == 6 * (MODEL.num_parameters - 128256 * 4096 - 65 * 4096) + 12 * 32 * 4096 * 4096
    assert 0.66 < flop_per_token(Holding(MODEL, FULL, "lora"), 4096) / flop_per_token(held, 4096) < 0.75


def test_packed_samples_hold_scores_one_at_a_time() -> None:
    """Of one sample of a row's length, where no fused kernel knows it: capped scores, and float32 on a GPU."""

    def held(toy: str, kind: str, compute: str = "float32", *, packed: bool = True) -> int:
        model = describe(TOYS[toy], toy)
        assert model is not None
        return attention.scores(model, Layout(), 4, 64, compute, kind, packed=packed)

    heads, floats = 4, 3 + 1  # weights, their gradient and that of scores, and one of them as matmuls read it
    assert held("llama", "cpu", packed=False) == 0
    assert held("llama", "cpu") == held("llama", "cuda", "bfloat16") == 0
    assert held("gemma2", "cpu") == heads * 64 * 64 * 4 * (floats + 1)
    assert held("llama", "cuda") == heads * 64 * 64 * 4 * floats
    assert held("gemma2", "cuda", "bfloat16") == heads * 64 * 64 * (4 * floats + 2)


def test_a_copy_that_is_saved_beside_the_steps_is_one_state_over_all_ranks() -> None:
    model = MODEL
    of = {name: PRECISIONS[name] for name in ("bf16", "bf16-pure")}
    for layout in (Layout(Mesh(dp_replicate=4)), Layout(Mesh(dp_shard=4), "parameters"), Layout(Mesh(dp_shard=2, tp=2), "parameters")):
        assert copy_bytes(Holding(model, layout), of["bf16"]) == math.ceil(model.num_parameters * 12 / 4)
    assert copy_bytes(Holding(model, Layout()), of["bf16-pure"]) == model.num_parameters * 6
    still = frozen(model, ["model.embed_tokens.*"])
    assert copy_bytes(Holding(still, Layout()), of["bf16"]) == 12 * still.num_trained_parameters + 4 * (
        still.num_parameters - still.num_trained_parameters
    )


def test_checkpoints_are_saved_beside_the_steps_where_the_copy_has_room() -> None:
    found = Memory(100, Range(50, 60, 70), 50, {"weights": 60}, (Stage(0, Range(50, 60, 70), 50, {"weights": 60}),))
    assert copied(found, 30, "cpu", "auto").peak_bytes == Range(80, 90, 100)
    assert copied(found, 30, "cpu", "auto").parts_bytes == {"weights": 60, "copy": 30}
    assert copied(found, 31, "cpu", "auto") == found
    assert copied(found, 31, "cpu", True).peak_bytes.high == 101
    assert copied(found, 1, "cpu", False) == found
    on_gpu = replace(found, host_bytes=10, host_usable_bytes=40)
    assert copied(on_gpu, 30, "cuda", "auto") == replace(on_gpu, copy_bytes=30)
    assert copied(on_gpu, 31, "cuda", "auto") == on_gpu
    assert copied(found, 10**15, "cuda", "auto").copy_bytes == 10**15  # nobody said what the host has
