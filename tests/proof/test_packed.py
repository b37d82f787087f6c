"""Rows that hold several samples give the losses and gradients of the same samples in rows of their own, on any layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pentamesh.layout.mesh import Layout, Mesh, Shard
from pentamesh.layout.policy import Policy
from pentamesh.run.ledger import differences
from pentamesh.run.verify import Trial, errors, outcome, predicted_ledger
from pentamesh.run.worlds import run_world
from tests.proof.toys import TOYS

IN_A_ROW = 3
LAYOUTS: dict[str, tuple[Mesh, Shard, bool, dict[str, Any]]] = {
    "ddp 2": (Mesh(dp_replicate=2), "none", False, {}),
    "full shard 2, recomputed": (Mesh(dp_shard=2), "parameters", False, {"recompute": "selective"}),
    "hybrid 2 x 2": (Mesh(dp_replicate=2, dp_shard=2), "parameters", False, {}),
    "tp2, sequence": (Mesh(tp=2), "none", True, {"recompute": "full"}),
    "full shard 2 x tp2, sequence": (Mesh(dp_shard=2, tp=2), "parameters", True, {}),
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "glm4", "gpt2")


def packed(toy: str, layout: Layout, **policy: Any) -> Trial:
    """Two rows of three samples a micro-batch, two micro-batches, on every data rank; documents outgrow windows and none is as long as another."""
    chosen = replace(Policy(2, 2), **policy)
    return Trial(TOYS[toy], layout, chosen, global_batch=4 * layout.mesh.dp_replicate * layout.mesh.dp_shard, longest=16, in_a_row=IN_A_ROW)


@pytest.mark.parametrize("toy", FAMILIES)
def test_on_one_process(toy: str, record_proof) -> None:
    check(packed(toy, Layout()), record_proof)


ON_SEVERAL = [(toy, name) for toy in ("llama", "gemma3") for name in LAYOUTS]
ON_SEVERAL += [(toy, "full shard 2 x tp2, sequence") for toy in FAMILIES if toy not in ("llama", "gemma3", "gpt2")]


@pytest.mark.parametrize(("toy", "name"), ON_SEVERAL)
def test_on_several(toy: str, name: str, record_proof) -> None:
    mesh, shard, sequence, policy = LAYOUTS[name]
    check(packed(toy, Layout(mesh, shard, sequence_parallel=sequence), **policy), record_proof)


def check(wanted: Trial, record_proof: Any) -> None:
    found = run_world(outcome, wanted.layout.mesh.num_ranks, wanted)
    worst = errors(found[0], run_world(outcome, 1, wanted.alone())[0])
    assert max(worst.values()) < 1e-10, worst
    for rank, one in enumerate(found):
        assert not one.split_errors
        assert not differences(predicted_ledger(wanted, one.lengths, rank), one.ledger)
    record_proof("packed rows equal to rows of their own, float64", runs=1, worst_relative_error=max(worst.values()))
