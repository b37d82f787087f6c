"""The peak of torch's allocator on CPU, frees that the profiler misses included; and beside it the planned one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pentamesh.run.peak import _changes, measured_peak
from tests.run import toy
from tests.run.test_loop import trained


def test_the_peak_of_what_comes_and_goes() -> None:
    standing = torch.ones(1000)
    with measured_peak(torch.device("cpu"), [standing, standing.view(10, 100)]) as peak:
        first = standing + 1
        second = first * 2
        del first
        third = second.sum()
        del second, third
    assert 3 * 4000 <= peak.peak_bytes < 3 * 4000 + 200


def test_frees_on_threads_that_nobody_watches() -> None:
    """At address 1 a buffer comes twice and leaves once; at 3 it never leaves."""
    seen = [(0, 1, 100), (1, 2, 10), (2, 1, 100), (3, 3, 7), (4, 1, -100), (5, 2, -10), (6, 9, -50)]
    assert _changes(seen) == [100, 10, 0, 0, -100, -10, -50]


@pytest.mark.parametrize(("shard", "accum"), [("gradients", 4), ("optimizer", 4), ("parameters", 1), ("none", 1)])
def test_a_model_heavy_in_parameters_peaks_where_planned(tmp_path: Path, shard: str, accum: int) -> None:
    """6.4 M parameters, 32 tokens: gradients come as activations go, and the cut ones have the dtype of the weights."""
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "tie_word_embeddings": False}
    toy.model_folder(tmp_path / "model", **sizes)
    batch = {"seq_len": 32, "micro_batch": 1, "global_batch": 2 * accum}
    whole = {"data": {"train": "rows.jsonl", "too_long": "truncate"}, "batch": batch, "precision": "bf16", "training__steps": 3}
    folder = trained(toy.job(tmp_path, **whole, layout={"shard": shard, "activation_checkpointing": "none"}, training__evaluate_every=None))
    ratio = json.loads(folder.receipt.read_text())["parts"]["peak_bytes"]["ratio"]
    assert 0.9 < ratio < 1.1
