"""Counting kinds of blocks gives the ledger of the whole model, whatever the blocks."""

from __future__ import annotations

import pytest

from pentamesh.cost.holding import Holding, adapters
from pentamesh.cost.traffic import _model_rows
from pentamesh.job.precision import PRECISIONS
from pentamesh.layout.mesh import Layout, Mesh
from pentamesh.layout.policy import Policy
from pentamesh.layout.rhythm import ledger, rhythm
from pentamesh.model.read import read_model


@pytest.mark.parametrize("shard", ["optimizer", "gradients", "parameters"])
@pytest.mark.parametrize("name", ["llama-3.2-1b", "deepseek-v3", "qwen3.5-27b", "gemma-4-26B-A4B"])
def test_sampled_blocks_give_the_whole_ledger(name: str, shard: str) -> None:
    model, policy, precision = read_model(name), Policy(1, 4), PRECISIONS["bf16"]
    for mesh in (Mesh(dp_shard=8), Mesh(dp_replicate=2, dp_shard=4)):
        layout = Layout(mesh, shard)  # type: ignore[arg-type]
        for trained in (model, adapters(model)):
            sampled = _model_rows(trained, Holding(model, layout), policy, precision, 4096)
            assert sorted(row for row in sampled if row.count) == ledger(rhythm(trained, layout, policy, precision, 4096))
