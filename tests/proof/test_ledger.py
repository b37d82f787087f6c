"""What a real step moves is what `layout.rhythm` predicts, and what a rank really holds is what `split` says: row for row, box for box."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pentamesh.run.ledger import differences
from pentamesh.run.verify import outcome, predicted_ledger
from pentamesh.run.worlds import run_world
from tests.proof.toys import trial

CASES = [
    ("llama", "ddp", 2, 1, {}),
    ("wide", "ddp", 2, 1, {}),
    ("llama", "ddp", 4, 4, {}),
    ("llama", "ddp", 4, 4, {"reduce": "each"}),
    ("llama-untied", "ddp", 4, 1, {"recompute": "full"}),
    ("qwen2", "ddp", 2, 1, {}),
    ("qwen3", "ddp", 2, 4, {}),
    ("llama", "full_shard", 2, 1, {}),
    ("llama", "full_shard", 4, 4, {}),
    ("llama", "full_shard", 4, 4, {"reduce": "each"}),
    ("llama", "full_shard", 4, 4, {"reshard": False}),
    ("llama", "full_shard", 4, 4, {"reshard": False, "keep_gathered": True}),
    ("llama", "full_shard", 3, 1, {"recompute": "full"}),
    ("qwen3", "full_shard", 3, 1, {"recompute": "selective"}),
    ("llama-untied", "full_shard", 4, 1, {}),
    ("qwen2", "full_shard", 4, 1, {}),
    ("qwen3", "full_shard", 4, 1, {}),
    ("tiny-rows", "full_shard", 4, 1, {}),
    ("llama", "zero1", 4, 1, {}),
    ("llama", "zero1", 4, 4, {}),
    ("qwen2", "zero1", 2, 4, {}),
    ("llama-untied", "zero2", 4, 1, {}),
    ("llama", "zero2", 4, 4, {}),
    ("qwen3", "zero2", 3, 4, {}),
    ("llama", "hybrid_shard", 4, 1, {}),
    ("llama", "hybrid_shard", 4, 4, {}),
    ("qwen2", "hybrid_shard", 4, 4, {"reduce": "node"}),
    ("qwen3", "hybrid_shard", 4, 4, {"reduce": "node", "reshard": False}),
    ("llama", "hybrid_shard", 4, 4, {"reduce": "each"}),
    ("gpt2", "ddp", 2, 1, {}),
    ("gpt2", "full_shard", 4, 4, {}),
    ("gpt2", "full_shard", 3, 1, {"recompute": "selective"}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c[:4])) + "".join(f"-{k}={v}" for k, v in c[4].items()))
def test_ledger_and_splits(case: tuple[str, str, int, int, dict[str, object]], record_proof) -> None:
    toy, strategy, num_ranks, grad_accum, policy = case
    wanted = replace(trial(toy, strategy, num_ranks, grad_accum, **policy), num_steps=4)
    outcomes = run_world(outcome, num_ranks, wanted)
    predicted = []
    for rank, found in enumerate(outcomes):
        assert not found.split_errors
        predicted = predicted_ledger(wanted, found, rank)
        assert predicted, "a layout over several ranks moves something"
        assert not differences(predicted, found.ledger)
    record_proof(
        "split and moves",
        tensors=sum(found.num_tensors_checked for found in outcomes),
        ranks=num_ranks,
        layouts=1,
        collectives=num_ranks * sum(row.count for row in predicted),
    )


def test_a_wrong_rhythm_is_seen() -> None:
    """The proof can fail: the ledger of a run that reduces each time is not that of one that reduces once."""
    ran = trial("llama", "full_shard", 2, 4, reduce="each")
    claimed = trial("llama", "full_shard", 2, 4, reduce="once")
    found = run_world(outcome, 2, ran)[0]
    assert differences(predicted_ledger(claimed, found), found.ledger)
