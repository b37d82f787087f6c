"""The measured peak of toy runs beside the planned one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.run import toy
from tests.run.test_loop import trained


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


@pytest.mark.parametrize(
    ("shard", "accum", "expert", "seq_len"),
    [("parameters", 1, 2, 32), ("gradients", 2, 2, 32), ("parameters", 1, 2, 1024), ("parameters", 1, 1, 256)],
)
def test_a_model_with_experts_peaks_where_planned(tmp_path: Path, shard: str, accum: int, expert: int, seq_len: int) -> None:
    """Heavy in parameters or in rows, its experts parted or not."""
    sizes: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 768, "num_hidden_layers": 4, "moe_intermediate_size": 256}
    toy.model_folder(tmp_path / "model", model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, **sizes, tie_word_embeddings=False)
    for weights in (tmp_path / "model").glob("*.safetensors"):
        weights.unlink()  # random ones do
    toy.rows(tmp_path / "rows.jsonl", 1200)
    batch = {"seq_len": seq_len, "micro_batch": 1, "global_batch": 2 * accum, "packing": seq_len > 32}
    whole = {"data": {"train": "rows.jsonl", "too_long": "truncate"}, "batch": batch, "precision": "bf16", "training__steps": 3, "method": "pretrain"}
    layout = {"shard": shard, "expert": expert, "activation_checkpointing": "none"}
    folder = trained(toy.job(tmp_path, **whole, layout=layout, training__evaluate_every=None, checkpoint__export=False))
    ratio = json.loads(folder.receipt.read_text())["parts"]["peak_bytes"]["ratio"]
    assert 0.9 < ratio < 1.1
