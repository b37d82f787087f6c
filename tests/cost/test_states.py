"""States per GPU: the table that people know (ZeRO's), from `split` and not from P / N."""

from __future__ import annotations

import pytest

from pentamesh.cost.holding import Holding, states
from pentamesh.job.precision import PRECISIONS
from pentamesh.layout.mesh import SHARDS, Layout, Mesh, Shard
from pentamesh.layout.split import split
from pentamesh.layout.stages import stage_layers
from pentamesh.model.read import read_model
from pentamesh.model.roles import STORE, Role

GB = 1e9
# States per GPU in GB: 8B over 8, 70B over 8 and 16, 405B over 64.
CELLS = [("llama-3.1-8b", 8), ("llama-3.1-70b", 8), ("llama-3.1-70b", 16), ("llama-3.1-405b", 64)]
TABLE = {
    "none": (128.5, 1128.9, 1128.9, 6493.7),
    "optimizer": (44.2, 388.0, 335.1, 1699.5),
    "gradients": (30.1, 264.6, 202.8, 900.5),
    "parameters": (16.1, 141.1, 70.6, 101.5),
}


def layout(shard, degree: int) -> Layout:
    return Layout(Mesh(dp_replicate=degree) if shard == "none" else Mesh(dp_shard=degree), shard)


def total(name: str, shard, degree: int, precision: str = "bf16", method: str = "full") -> float:
    return sum(states(Holding(read_model(name), layout(shard, degree), method), PRECISIONS[precision]).values()) / GB


@pytest.mark.parametrize(
    ("name", "degree", "shard", "gigabytes"), [(*cell, shard, row[i]) for shard, row in TABLE.items() for i, cell in enumerate(CELLS)]
)
def test_the_zero_table(name: str, degree: int, shard: str, gigabytes: float) -> None:
    assert total(name, shard, degree) == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize(("name", "degree"), CELLS)
def test_bf16_pure_halves_full_shard(name: str, degree: int) -> None:
    assert total(name, "parameters", degree, "bf16-pure") == pytest.approx(total(name, "parameters", degree) / 2, rel=1e-9)


def test_hybrid_holds_what_one_node_holds() -> None:
    held = Holding(read_model("llama-3.1-70b"), Layout(Mesh(dp_replicate=2, dp_shard=8), "parameters"))
    assert sum(states(held, PRECISIONS["bf16"]).values()) / GB == pytest.approx(141.1, rel=0.01)


def test_adapters_leave_a_frozen_base_of_two_bytes() -> None:
    """Rank 16 on 7 projections of 80 blocks: 207 M trained parameters at 16 bytes; NF4 cuts the blocks' matmuls only."""
    parameters, root = 70_553_706_496, 2 * 128256 * 8192 + 8192
    per_block = 16 * (2 * (8192 + 8192) + 2 * (8192 + 1024) + 3 * (8192 + 28672))
    adapters = 16 * 80 * per_block / 8
    assert total("llama-3.1-70b", "parameters", 8, method="lora") * GB == pytest.approx(2 * parameters / 8 + adapters, rel=1e-3)
    nf4 = 0.516 * (parameters - root) / 8 + 2 * root / 8 + adapters
    assert total("llama-3.1-70b", "parameters", 8, method="qlora") * GB == pytest.approx(nf4, rel=1e-3)


def test_tensor_and_pipeline_cut_what_the_stage_holds() -> None:
    """405B over tensor 8 x pipeline 8: 6.44e9 parameters on the fullest rank, 16 layers and the embedding."""
    held = Holding(read_model("llama-3.1-405b"), Layout(Mesh(pp=8, tp=8), "none"))
    weights = states(held, PRECISIONS["bf16"])["weights"] / 4
    assert weights == pytest.approx(6.44e9, rel=0.04)
    assert stage_layers(126, 8) == (16,) * 6 + (15,) * 2
    stages = [sum(states(held, PRECISIONS["bf16"], stage).values()) for stage in range(8)]
    whole = 16 * sum(t.numel for t in held.model.parameters) / 8
    assert sum(stages) == pytest.approx(whole, rel=1e-4)  # norms are whole on every tensor rank


def test_like_blocks_are_counted_once() -> None:
    model = read_model("llama-3.1-8b")
    root, block = model.kinds
    assert root.is_root
    assert block.count == 32
    assert sum(t.numel for t in root.tensors) + 32 * sum(t.numel for t in block.tensors) == model.num_parameters


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize(
    "mesh", [Mesh(dp_replicate=4), Mesh(dp_replicate=2, dp_shard=3), Mesh(dp_shard=2, tp=4), Mesh(dp_replicate=2, dp_shard=3, cp=2, tp=2)], ids=str
)
def test_a_rank_holds_what_split_says_of_each_tensor(mesh: Mesh, shard: Shard) -> None:
    model, layout = read_model("llama-3.2-1b"), Layout(mesh, shard)
    for role in (*STORE, Role.USE):
        assert Holding(model, layout).stage_numel(role, 0) == sum(split(t, role, layout).max_local_numel for t in model.parameters)
