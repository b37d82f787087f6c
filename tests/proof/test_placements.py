"""The names of placements that `split` gives describe to DTensor the very boxes that it lists, over every product of axes."""

from __future__ import annotations

import re
from math import prod

import pytest
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from pentamesh.layout.mesh import AXES, Layout, all_meshes
from pentamesh.layout.split import Split, split
from pentamesh.model.families import describe
from pentamesh.model.roles import Role
from tests.proof.toys import LLAMA, QWEN3, UNTIED

# tp has to divide heads and kv heads; sizes that nothing divides stay uneven on purpose.
WIDE = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}
MODELS = {"llama": LLAMA | WIDE, "untied": UNTIED | WIDE, "qwen3": QWEN3 | WIDE}


def placements(held: Split) -> list[Placement]:
    """One placement per mesh axis, in mesh order, from the names that `split` gives."""
    found: dict[str, Placement] = {}
    for axes, name in (held.placements() or {}).items():
        dim = int(re.findall(r"\d+", name)[0])
        assert len(axes) == 1, "flattened axes are one mesh dimension of their own"
        found[axes[0]] = _StridedShard(dim, split_factor=int(re.findall(r"\d+", name)[1])) if name.startswith("_Strided") else Shard(dim)
    return [found.get(axis, Replicate()) for axis in AXES]


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_shapes_and_offsets(family: str, num_ranks: int, record_proof) -> None:
    model = describe(MODELS[family], family)
    assert model is not None
    compared = 0
    meshes = [mesh for mesh in all_meshes(num_ranks) if mesh.pp == mesh.cp == 1]
    for mesh in meshes:
        layout = Layout(mesh, "parameters")
        for tensor in {t.name.replace("layers.1", "layers.0"): t for t in model.parameters}.values():
            held = split(tensor, Role.WEIGHT, layout)
            for rank in layout.ranks():
                coords = [mesh.coords(rank)[axis] for axis in AXES]
                shape, offset = _compute_local_shape_and_global_offset(
                    tensor.shape, tuple(mesh.degree(axis) for axis in AXES), lambda axis, coords=coords: coords[axis], placements(held)
                )
                boxes = held.boxes(rank)
                assert tuple(shape) == held.local_shape(rank), (held, rank)
                assert sum(box.numel for box in boxes) == prod(shape)
                if boxes and len(boxes) == 1:
                    assert tuple(offset) == boxes[0].offset, (held, rank)
                compared += 1
    record_proof("placements against DTensor's arithmetic", tensors=compared, meshes=len(meshes))
