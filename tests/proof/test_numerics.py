"""Any layout gives the losses and gradients of one process: in float64 to 1e-10 at every step, in float32 to 1e-6 at the first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pentamesh.run.verify import errors, outcome
from pentamesh.run.worlds import run_world
from tests.proof.toys import compared, trial

CASES = [
    (toy, strategy, 4, grad_accum)
    for toy in ("llama", "llama-untied", "qwen2", "qwen3")
    for strategy in ("ddp", "zero1", "zero2", "full_shard", "hybrid_shard")
    for grad_accum in (1, 4)
] + [(toy, strategy, 4, 4) for toy in ("gpt2", "gemma2", "gemma3", "phi3", "glm4") for strategy in ("ddp", "zero2", "full_shard")]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_float64(case: tuple[str, str, int, int], record_proof) -> None:
    errors = compared(trial(*case))
    assert max(errors.values()) < 1e-10, errors
    record_proof("equal to one process, float64", runs=1, worst_relative_error=max(errors.values()))


@pytest.mark.parametrize(
    "policy",
    [
        {"recompute": "full"},
        {"recompute": "selective"},
        {"recompute": "full", "offload": True},
        {"reshard": False, "keep_gathered": True},
        {"reduce": "each"},
    ],
    ids=str,
)
@pytest.mark.parametrize("strategy", ["ddp", "full_shard"])
def test_policies(strategy: str, policy: dict[str, object]) -> None:
    if strategy == "ddp" and "keep_gathered" in policy:
        pytest.skip("DDP gathers nothing")
    errors = compared(trial("llama", strategy, 4, 4, **policy))
    assert max(errors.values()) < 1e-10, errors


def test_reducing_in_the_node_first() -> None:
    errors = compared(trial("llama", "hybrid_shard", 4, 4, reduce="node"))
    assert max(errors.values()) < 1e-10, errors


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "full_shard", "hybrid_shard"])
def test_float32(strategy: str, record_proof) -> None:
    errors = compared(replace(trial("llama", strategy, 4, 4), precision="fp32"))
    assert errors["first_gradient"] < 1e-6, errors
    assert errors["loss"] < 1e-5, errors
    record_proof("equal to one process, float32 first step", runs=1, worst_relative_error=errors["first_gradient"])


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "full_shard", "hybrid_shard"])
def test_bf16_is_the_same_arithmetic_everywhere(strategy: str) -> None:
    """bf16 compute with fp32 masters: the layout adds no rounding of its own beyond the order of fp32 sums."""
    errors = compared(replace(trial("llama", strategy, 4, 4), precision="bf16"))
    assert errors["first_gradient"] < 1e-6, errors


def test_bf16_pure_is_rounded_alike_everywhere(record_proof) -> None:
    """Strategies that sum gradients in the same order are bit for bit the same, weights that were rounded at random among them."""
    found = {s: run_world(outcome, 4, replace(trial("llama", s, 4, 1), precision="bf16-pure"))[0] for s in ("zero1", "zero2", "full_shard")}
    for other in ("zero1", "zero2"):
        assert set(errors(found[other], found["full_shard"]).values()) == {0.0}
    record_proof("bf16-pure, bit for bit as full shard", runs=2)


@pytest.mark.parametrize("strategy", ["ddp", "full_shard", "hybrid_shard"])
def test_bf16_pure_against_one_process(strategy: str) -> None:
    """Sums over ranks and micro-batches are rounded to 8 bits in another order: gradients agree to a few roundings, losses to one."""
    errors = compared(replace(trial("llama", strategy, 4, 4), precision="bf16-pure"))
    assert errors["first_gradient"] < 2**-6, errors
    assert errors["loss"] < 2**-8, errors
