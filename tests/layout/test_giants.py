"""Published models of experts on as many ranks as train them: what the ranks hold is the model, every value as often as there are copies."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pentamesh.job.job import Batch
from pentamesh.layout.legal import problems
from pentamesh.layout.mesh import Layout, Mesh
from pentamesh.layout.split import Box, Split, split
from pentamesh.model.dims import TensorSpec
from pentamesh.model.read import read_model
from pentamesh.model.roles import STORE, Role
from pentamesh.model.spec import ModelSpec
from pentamesh.run import trace
from pentamesh.run.tensor import cut

GIANTS = [
    ("qwen3-235b-a22b", Layout(Mesh(dp_shard=16, ep=16), "parameters")),
    ("qwen3-235b-a22b", Layout(Mesh(dp_shard=32, tp=4, ep=16), "parameters", sequence_parallel=True)),
    ("qwen3-235b-a22b", Layout(Mesh(dp_replicate=2, dp_shard=16, tp=2, ep=32), "parameters", sequence_parallel=True)),
    ("deepseek-v3", Layout(Mesh(dp_shard=64, ep=64), "parameters")),
    ("deepseek-v3", Layout(Mesh(dp_shard=32, tp=8, ep=64), "optimizer", sequence_parallel=True)),
    ("kimi-k2", Layout(Mesh(dp_shard=128, ep=64), "parameters")),
]
IDS = [f"{name}, {layout.mesh}" for name, layout in GIANTS]


def distinct(model: ModelSpec) -> Iterator[tuple[TensorSpec, int]]:
    """Every parameter that differs from others in more than its name, and how many are like it."""
    return ((tensor, unit.count) for unit in model.kinds for tensor in unit.tensors)


def times_held(kept: Split) -> np.ndarray:
    """How many ranks hold each value of a tensor, on the grid between all places where boxes begin or end."""
    boxes = [box for rank in kept.layout.ranks() for box in kept.boxes(rank)]
    edges = [sorted({at for box in boxes for at in ends(box, dim)} | {0, size}) for dim, size in enumerate(kept.tensor.shape)]
    held = np.zeros([len(edge) - 1 for edge in edges], int)
    for box in boxes:
        place = ((edge.index(low), edge.index(high)) for edge, (low, high) in ((edge, ends(box, dim)) for dim, edge in enumerate(edges)))
        held[tuple(slice(*run) for run in place)] += 1
    return held


def ends(box: Box, dim: int) -> tuple[int, int]:
    return box.offset[dim], box.offset[dim] + box.size[dim]


@pytest.mark.parametrize(("name", "layout"), GIANTS, ids=IDS)
@pytest.mark.parametrize("role", [Role.WEIGHT, Role.STATE], ids=lambda role: role.value)
def test_what_all_ranks_hold_is_the_model(name: str, layout: Layout, role: Role) -> None:
    model = read_model(name)
    assert role in STORE
    assert not problems(model, layout, Batch(seq_len=4096, global_batch=layout.mesh.num_ranks))
    total = 0
    for tensor, count in distinct(model):
        kept = split(tensor, role, layout)
        held, copies = times_held(kept), kept.copy(0)[1]
        assert (held == copies).all(), f"{kept} is not held {copies} times everywhere"
        local = [np.prod(kept.local_shape(rank), dtype=np.int64) for rank in layout.ranks()]
        assert sum(local) == copies * tensor.numel, tensor.name
        total += count * int(sum(local)) // copies
    assert total == model.num_parameters


@pytest.mark.parametrize(("name", "layout"), GIANTS, ids=IDS)
def test_each_rank_has_its_experts(name: str, layout: Layout) -> None:
    """As many as the degree leaves it, whole in use; stored, each is one of as many parts as ranks of edp hold the same experts."""
    model, mesh = read_model(name), layout.mesh
    assert model.experts is not None
    for tensor in (tensor for tensor, _ in distinct(model) if tensor.dims[0].name == "experts"):
        used, stored = split(tensor, Role.USE, layout), split(tensor, Role.STATE, layout)
        each = model.experts.count // mesh.ep
        for rank in layout.ranks():
            assert used.local_shape(rank) == (each, *tensor.shape[1:])
            assert stored.local_shape(rank) == (each, tensor.shape[1] // mesh.edp, *tensor.shape[2:])


@pytest.mark.parametrize(("name", "layout"), [GIANTS[1], *GIANTS[3:5]], ids=[IDS[1], *IDS[3:5]])
def test_modules_on_the_meta_device_take_these_shapes(name: str, layout: Layout) -> None:
    """Of the first rank, one in the middle and the last: what its modules are given is what `split` says, and all that they have."""
    model = read_model(name)
    for rank in (0, layout.mesh.num_ranks // 2 + 1, layout.mesh.num_ranks - 1):
        world: Any = SimpleNamespace(rank=rank)
        built = trace.on_meta(model.config)
        cut(built, model, layout, world)
        shapes = {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
        assert shapes == {t.name: split(t, Role.USE, layout).local_shape(rank) for t in model.parameters}
