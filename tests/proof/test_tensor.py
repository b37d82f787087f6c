"""Tensor and sequence parallel beside every data strategy: the numbers of one process, the predicted collectives, the boxes of `split`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pentamesh.layout.mesh import Mesh, Shard
from pentamesh.run.verify import errors, fake_outcome, outcome
from pentamesh.run.worlds import run_world
from tests.proof.toys import MANY_HEADS, TOYS, ZERO, agree, alone, check_ledgers, check_rounding, reduced, trial_on

MESHES: dict[str, tuple[Mesh, Shard, dict[str, Any]]] = {
    "tp2": (Mesh(tp=2), "none", {}),
    "tp2 alone, sharded": (Mesh(tp=2), "parameters", {}),
    "tp4": (Mesh(tp=4), "none", {}),
    "tp4 alone, sharded": (Mesh(tp=4), "parameters", {}),
    "ddp2 x tp2": (Mesh(dp_replicate=2, tp=2), "none", {}),
    "zero1 2 x tp2": (Mesh(dp_shard=2, tp=2), "optimizer", ZERO["zero1"]),
    "zero2 2 x tp2": (Mesh(dp_shard=2, tp=2), "gradients", ZERO["zero2"]),
    "full shard 2 x tp2": (Mesh(dp_shard=2, tp=2), "parameters", {"reduce": "each"}),
    "hybrid 2 x 2 x tp2": (Mesh(dp_replicate=2, dp_shard=2, tp=2), "parameters", {"reduce": "node"}),
}
EVERYWHERE = ("tp2", "ddp2 x tp2", "full shard 2 x tp2")


FAMILIES = ("llama", "llama-untied", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "glm4")
CASES = [(toy, name, sequence, {}) for toy in FAMILIES for name in (MESHES if toy == "llama" else EVERYWHERE) for sequence in (False, True)]
CASES += [(toy, "hybrid 2 x 2 x tp2", True, {}) for toy in FAMILIES if toy != "llama"]
CASES += [("gpt2", name, False, {}) for name in EVERYWHERE]
# Two key heads for four ranks, and one for two: each serves the queries of its ranks, and has a part of its gradient from each.
CASES += [(toy, name, sequence, {}) for toy in ("qwen3", "qwen2", "glm4") for name in ("tp4", "tp4 alone, sharded") for sequence in (False, True)]
CASES += [("one key head", name, True, {}) for name in EVERYWHERE]
CASES += [
    (toy, name, sequence, {"recompute": recompute})
    for toy in ("llama", "gemma2")
    for name in EVERYWHERE
    for sequence, recompute in ((False, "full"), (True, "selective"))
]


def kept(case: tuple[str, str, bool, dict[str, Any]]) -> bool:
    """Every mesh and strategy for one family; for each of the others one process grid without sequence parallel, and one with shards and with it."""
    toy, name, sequence, policy = case
    if toy == "llama":
        return not policy or name == "full shard 2 x tp2"
    if name.startswith("hybrid") or policy:
        return (toy, name) == ("gemma3", "hybrid 2 x 2 x tp2") or (toy == "gemma2" and name == "full shard 2 x tp2")
    if "tp4" in name:
        return toy == "qwen3"
    return (name, sequence) in (("tp2", False), ("full shard 2 x tp2", True)) or (toy in ("gpt2", "one key head") and name == "full shard 2 x tp2")


@pytest.mark.parametrize("case", reduced(CASES, kept), ids=lambda c: f"{c[0]}, {c[1]}{', sequence' * c[2]}{', recomputed' * bool(c[3])}")
def test_on_gloo(case: tuple[str, str, bool, dict[str, Any]], record_proof) -> None:
    toy, name, sequence, policy = case
    mesh, shard, own = MESHES[name]
    wanted = trial_on(TOYS[toy], mesh, shard, sequence, **own, **policy)
    outcomes = run_world(outcome, mesh.num_ranks, wanted)
    agree(outcomes)
    worst = errors(outcomes[0], alone(wanted))
    assert max(worst.values()) < 1e-10, worst
    compared = check_ledgers(wanted, range(mesh.num_ranks), outcomes)
    record_proof("tensor parallel equal to one process, float64", runs=1, collectives=compared, worst_relative_error=max(worst.values()))


@pytest.mark.parametrize("name", [*EVERYWHERE, "hybrid 2 x 2 x tp2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_precisions(precision: str, name: str) -> None:
    """Biases are added once, cast or not.

    Of keys there is no bias here: its gradient all but vanishes, and what is left of it in float32 is rounding.
    """
    mesh, shard, policy = MESHES[name]
    check_rounding(replace(trial_on(TOYS["llama"] | {"mlp_bias": True}, mesh, shard, True, **policy), precision=precision))


LARGE = [
    (Mesh(dp_shard=4, tp=4), "parameters", True, range(16)),
    (Mesh(dp_shard=4, tp=2), "optimizer", False, range(8)),
    (Mesh(dp_replicate=2, dp_shard=4, tp=8), "parameters", True, (0, 9, 37, 63)),
    (Mesh(dp_shard=3, tp=2), "parameters", False, range(6)),
]


@pytest.mark.parametrize("case", LARGE, ids=lambda c: f"{c[0]}, {c[1]}")
@pytest.mark.parametrize("toy", reduced(["llama", "qwen2", "qwen3", "gemma3", "phi3", "glm4"], lambda toy: toy in ("llama", "gemma3")))
def test_on_fake_groups(toy: str, case: tuple[Mesh, Shard, bool, Sequence[int]], record_proof) -> None:
    """Every rank for one family; for the others the first, one in the middle and the last, whose parts of an uneven cut are the smallest."""
    mesh, shard, sequence, ranks = case
    ranks = ranks if toy == "llama" else (0, mesh.num_ranks // 2, mesh.num_ranks - 1)
    wanted = replace(trial_on(TOYS[toy] | MANY_HEADS, mesh, shard, sequence, **ZERO["zero1"] if shard == "optimizer" else {}), num_steps=2)
    outcomes = [run_world(fake_outcome, 1, wanted, rank)[0] for rank in ranks]
    compared = check_ledgers(wanted, ranks, outcomes)
    tensors = sum(found.num_tensors_checked for found in outcomes)
    record_proof("split and moves of sharding x tensor on fake groups", tensors=tensors, ranks=len(ranks), layouts=1, collectives=compared)


def test_all_reduces_at_borders_only() -> None:
    """Five backward all-reduces over tensor ranks on a two-layer Llama, where one for each projection would make eleven."""
    wanted = trial_on(TOYS["llama"] | {"num_hidden_layers": 2}, Mesh(tp=2), "none", False, grad_accum=1)
    found = run_world(outcome, 2, replace(wanted, global_batch=2))[0]
    assert sum(row.count for row in found.ledger if row.axes == ("tp",) and row.phase == "backward") == 5
