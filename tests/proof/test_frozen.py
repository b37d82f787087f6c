"""Frozen parameters: the numbers of one process on any layout, the predicted collectives where gradients end, and weights that stay as they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pentamesh.layout.mesh import Layout, Mesh, Shard
from pentamesh.layout.policy import Policy
from pentamesh.layout.split import split
from pentamesh.model.roles import Role
from pentamesh.run.initial import drawing
from pentamesh.run.ledger import differences
from pentamesh.run.verify import Outcome, Trial, errors, outcome, predicted_ledger
from pentamesh.run.worlds import run_world
from tests.proof.toys import TOYS, ZERO, agree, alone, reduced

LAYOUTS: dict[str, tuple[Mesh, Shard, bool, dict[str, Any]]] = {
    "ddp 2": (Mesh(dp_replicate=2), "none", False, {}),
    "zero1 2": (Mesh(dp_shard=2), "optimizer", False, ZERO["zero1"]),
    "zero2 2": (Mesh(dp_shard=2), "gradients", False, ZERO["zero2"]),
    "full shard 2": (Mesh(dp_shard=2), "parameters", False, {}),
    "full shard 2, not resharded, reduced each time": (Mesh(dp_shard=2), "parameters", False, {"reshard": False, "reduce": "each"}),
    "full shard 2, recomputed": (Mesh(dp_shard=2), "parameters", False, {"recompute": "full"}),
    "tp2": (Mesh(tp=2), "none", False, {}),
    "tp2, sequence": (Mesh(tp=2), "none", True, {}),
    "tp2, recomputed": (Mesh(tp=2), "none", False, {"recompute": "selective"}),
    "tp2, sequence, recomputed": (Mesh(tp=2), "none", True, {"recompute": "full"}),
}
FROZEN: dict[str, tuple[str, ...]] = {
    "the embedding": ("*embed_tokens*",),
    "the first block": ("model.layers.0.*",),
    "a block between": ("model.layers.1.*",),
    "norms": ("*norm*",),
    "all but the last block": ("*embed_tokens*", "model.layers.[01].*", "model.norm.*", "lm_head.*"),
    "all but the head": ("model.*",),
    "attention below, and more": ("*embed_tokens*", "model.layers.0.*", "model.layers.1.*norm*", "model.layers.1.self_attn.*"),
    "up to one projection": ("*embed_tokens*", "model.layers.0.*", "model.layers.1.[!m]*", "model.layers.1.mlp.[gu]*"),
    "all but biases": ("*.weight",),
}
EVERYWHERE = ("all but the last block", "attention below, and more")
SOME = ("ddp 2", "zero2 2", "full shard 2", "tp2", "tp2, sequence, recomputed")
CASES = [("llama-untied", frozen, layout) for frozen in FROZEN for layout in (LAYOUTS if frozen in EVERYWHERE else SOME)]
# Tied, an embedding is frozen with its head; norms stand on both sides.
CASES += [(toy, "the embedding", layout) for toy in ("llama", "gemma2") for layout in ("ddp 2", "full shard 2", "tp2, sequence")]
CASES += [("gemma2", "up to one projection", layout) for layout in ("full shard 2", "tp2, sequence, recomputed")]


def frozen_trial(toy: str, frozen: str, layout: str, **changes: Any) -> Trial:
    mesh, shard, sequence, policy = LAYOUTS[layout]
    ranks = mesh.dp_replicate * mesh.dp_shard
    laid_out = Layout(mesh, shard, sequence_parallel=sequence)
    return Trial(TOYS[toy], laid_out, replace(Policy(2, 2), **policy), global_batch=4 * ranks, freeze=FROZEN[frozen], **changes)


def kept(case: tuple[str, str, str]) -> bool:
    """One choice on every layout; the others over shards, and over tensor ranks with all that may be asked of them."""
    toy, frozen, layout = case
    return toy != "llama-untied" or frozen == EVERYWHERE[-1] or layout in ("full shard 2", "tp2, sequence, recomputed")


@pytest.mark.parametrize("case", reduced(CASES, kept), ids=lambda case: ", ".join(case))
def test_equal_to_one_process(case: tuple[str, str, str], record_proof) -> None:
    wanted = frozen_trial(*case)
    outcomes = run_world(outcome, 2, wanted)
    agree(outcomes)
    one = alone(wanted)
    trained = {t.name for t in wanted.model.parameters if t.trained}
    assert all(set(gradients) == trained for found in (outcomes[0], one) for gradients in found.gradients)
    worst = errors(outcomes[0], one)
    assert max(worst.values()) < 1e-10, worst
    compared = 0
    for rank, found in enumerate(outcomes):
        predicted = predicted_ledger(wanted, found, rank)
        assert not found.split_errors
        assert not differences(predicted, found.ledger)
        compared += sum(row.count for row in predicted)
    record_proof("frozen, equal to one process, float64", runs=1, collectives=compared, worst_relative_error=max(worst.values()))


def initial_values(wanted: Trial) -> dict[str, np.ndarray]:
    values = {t.name: np.empty(t.shape) for t in wanted.model.parameters}
    for tensor in wanted.model.parameters:
        drawing(wanted.seed)(tensor, split(tensor, Role.STATE, Layout()), 0, torch.from_numpy(values[tensor.name]))
    return values


@pytest.mark.parametrize("layout", ["ddp 2", "full shard 2", "tp2, sequence"])
def test_what_is_frozen_stays_and_the_rest_does_not(layout: str) -> None:
    wanted = frozen_trial("llama-untied", "attention below, and more", layout)
    before: dict[str, np.ndarray] = run_world(initial_values, 1, wanted)[0]
    found: Outcome = run_world(outcome, 2, wanted)[0]
    for tensor in wanted.model.parameters:
        assert np.array_equal(before[tensor.name], found.parameters[tensor.name]) is not tensor.trained, tensor


def test_a_backward_that_goes_too_far_is_seen() -> None:
    """The proof can fail: the ledger of a run whose lower blocks are frozen is not that of one which trains them, nor of one that frees less."""
    wanted = frozen_trial("llama-untied", "all but the last block", "full shard 2")
    found = run_world(outcome, 2, wanted)[0]
    for claimed in ((), FROZEN["the first block"], ("model.layers.[01].*",)):
        assert differences(predicted_ledger(replace(wanted, freeze=claimed), found), found.ledger)
