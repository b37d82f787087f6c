"""Counting kinds of blocks gives the ledger of the whole model, whatever the blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pentamesh.cost.holding import Holding, adapters
from pentamesh.job.precision import PRECISIONS
from pentamesh.layout.crossings import ledger
from pentamesh.layout.mesh import SHARDS, Layout, Mesh, Shard
from pentamesh.layout.policy import Policy
from pentamesh.layout.rhythm import rhythm
from pentamesh.model.read import read_model
from pentamesh.model.spec import ModelSpec, Unit


def _uncounted(model: ModelSpec) -> ModelSpec:
    """The model with every unit as a kind of its own, under another name: what is remembered for a model is remembered for its equals."""
    found = replace(model, name=f"{model.name}, uncounted")
    vars(found)["kinds"] = tuple(Unit(name, tensors, 1) for name, tensors in model.units.items())
    vars(found)["first_alike"] = {t.name: t for t in model.parameters}
    return found


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("name", ["llama-3.2-1b", "deepseek-v3", "qwen3.5-27b", "gemma-4-26B-A4B"])
def test_kinds_counted_give_the_whole_ledger(name: str, shard: Shard) -> None:
    model, policy, precision = read_model(name), Policy(1, 4), PRECISIONS["bf16"]
    for mesh in (Mesh(dp_replicate=8),) if shard == "none" else (Mesh(dp_shard=8), Mesh(dp_replicate=2, dp_shard=4)):
        layout = Layout(mesh, shard)
        for trained in (model, adapters(model)):
            counted, whole = (ledger(rhythm(spec, layout, policy, precision, 4096)) for spec in (trained, _uncounted(trained)))
            assert counted == whole


def test_kinds_counted_over_tensor_ranks() -> None:
    model, policy, precision = read_model("llama-3.2-1b"), Policy(1, 4, "full"), PRECISIONS["bf16"]
    layout = Layout(Mesh(dp_shard=2, tp=4), "optimizer", sequence_parallel=True)
    assert ledger(rhythm(model, layout, policy, precision, 4096)) == ledger(rhythm(_uncounted(model), layout, policy, precision, 4096))


@pytest.mark.parametrize("name", ["llama-3.2-1b", "deepseek-v3", "qwen3.5-27b"])
def test_adapters_of_kinds_are_kinds_of_adapters(name: str) -> None:
    model = read_model(name)
    found = [(unit.tensors, unit.count) for unit in Holding(model, Layout(), "lora").trained_units]
    assert found == [(unit.tensors, unit.count) for unit in adapters(model).kinds]
