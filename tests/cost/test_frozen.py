"""What freezing spares: gradients and moments to the byte, activations and time of blocks without a backward."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pentamesh.cost.activations import kept, local_bytes
from pentamesh.cost.compute import flop_per_token, work
from pentamesh.cost.holding import Holding, resting, states
from pentamesh.cost.memory import memory
from pentamesh.job.hardware import read_hardware
from pentamesh.job.job import Batch
from pentamesh.job.precision import PRECISIONS
from pentamesh.layout.mesh import SHARDS, Layout, Mesh, Shard
from pentamesh.layout.policy import Policy
from pentamesh.layout.split import split
from pentamesh.model.frozen import frozen
from pentamesh.model.read import read_model
from pentamesh.model.roles import Role

WHOLE = read_model("llama-3.1-8b")
LOWER = frozen(WHOLE, ["model.embed_tokens.*", "model.layers.[0-9].*", "model.layers.1[0-5].*"])
SPOTS = frozen(WHOLE, ["*norm*", "model.layers.3.*", "lm_head.*"])
BF16 = PRECISIONS["bf16"]


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("model", [LOWER, SPOTS], ids=["lower", "spots"])
def test_states_are_those_of_the_tensors(model, shard: Shard) -> None:
    layout = Layout(Mesh(dp_replicate=3) if shard == "none" else Mesh(dp_shard=3), shard)

    def numel(role: Role, *, trained: bool = False) -> int:
        return sum(split(t, role, layout).max_local_numel for t in model.parameters if t.trained or not trained)

    trained, all_of_them = numel(Role.STATE, trained=True), numel(Role.STATE)
    found, rests = states(Holding(model, layout), BF16), resting(Holding(model, layout), BF16)
    # A master of its own is kept where the weights in use are of the compute dtype.
    weight, master = (4, 0) if shard in ("none", "parameters") else (2, 4)
    assert found["weights"] == weight * numel(Role.WEIGHT)
    assert found["gradients"] == weight * numel(Role.GRADIENT, trained=True)
    assert found["optimizer"] == 8 * trained + master * all_of_them
    assert rests == {"weights": 4 * all_of_them, "optimizer": 8 * trained}


def test_blocks_without_a_backward_keep_nothing() -> None:
    layout, policy, batch = Layout(Mesh(dp_shard=8), "parameters"), Policy(recompute="full"), Batch(seq_len=32768)
    whole, lower = (
        memory(Holding(model, layout), policy, BF16, batch, usable_bytes=10**11, kind="cuda").parts_bytes["activations"] for model in (WHOLE, LOWER)
    )
    of_a_block = local_bytes(kept(WHOLE, layout, 1, 32768, "bfloat16", "full"), layout)
    assert whole - lower == 16 * of_a_block


def test_time_and_flop() -> None:
    layout, device = Layout(Mesh(dp_shard=8), "parameters"), read_hardware("8xH100").device
    whole, lower, spots = (work(Holding(model, layout), Policy(), BF16, Batch(), device) for model in (WHOLE, LOWER, SPOTS))
    assert whole.forward_s == lower.forward_s > spots.forward_s  # a frozen head adds no gradients up
    assert 0.5 < lower.backward_s / whole.backward_s < 0.6
    assert 0.9 < spots.backward_s / whole.backward_s < 1
    assert lower.optimizer_s < 0.6 * whole.optimizer_s
    # Of one block's matmuls neither the gradients of weights (block 3, the head) nor, of the lower half, those of inputs.
    block, head = sum(t.numel for t in WHOLE.block if t.kind == "matmul"), 128256 * 4096
    attention = 8 * 4096 * 4096
    assert flop_per_token(Holding(WHOLE, layout), 4096) - flop_per_token(Holding(SPOTS, layout), 4096) == pytest.approx(2 * (block + head))
    # The first projections that are trained read a stream without a gradient; the norm before them is trained too, and they go back to it.
    expected = 16 * (4 * block + attention)
    assert flop_per_token(Holding(WHOLE, layout), 4096) - flop_per_token(Holding(LOWER, layout), 4096) == pytest.approx(expected)


def test_only_the_head_trained() -> None:
    """No block has a backward: nothing of any waits."""
    held = Holding(frozen(WHOLE, ["model.*"]), Layout(Mesh(dp_shard=8), "parameters"))
    found = memory(held, replace(Policy(), reshard=False), BF16, Batch(), usable_bytes=10**11, kind="cuda")
    assert found.parts_bytes["activations"] < 4096 * 4096 * 2 * 4
