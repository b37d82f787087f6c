"""Random initial weights: the same on any mesh, drawn by parts, with the distribution that transformers gives."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from pentamesh.layout.mesh import Layout, Mesh
from pentamesh.layout.split import split
from pentamesh.model.dims import Dim, TensorSpec
from pentamesh.model.families import describe
from pentamesh.model.roles import Role
from pentamesh.run import initial as drawing
from pentamesh.run.initial import initial

# Larger than a tile both ways, and divided by none of the meshes.
MATRIX = TensorSpec("model.layers.0.self_attn.o_proj.weight", (Dim("hidden", 301), Dim("heads", 2560, 64)), kind="matmul")
EXPERTS = TensorSpec("model.layers.0.mlp.experts.down_proj", (Dim("experts", 4), Dim("hidden", 150), Dim("ffn", 1100)), kind="matmul")
MESHES = [
    Layout(Mesh()),
    Layout(Mesh(dp_shard=4), shard="parameters"),
    Layout(Mesh(dp_shard=7), shard="parameters"),
    Layout(Mesh(tp=4), shard="none"),
    Layout(Mesh(dp_shard=3, tp=2), shard="parameters"),
    Layout(Mesh(dp_shard=4, ep=2), shard="parameters"),
]


def put_together(tensor: TensorSpec, layout: Layout, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    whole = torch.full(tensor.shape, torch.nan, dtype=dtype)
    held = split(tensor, Role.WEIGHT, layout)
    for rank in layout.ranks():
        local = initial(tensor, held, rank, seed=seed, std=0.02, dtype=dtype)
        for box in held.boxes(rank):
            there = tuple(slice(low, low + n) for low, n in zip(box.offset, box.size, strict=True))
            here = tuple(slice(low, low + n) for low, n in zip(box.local_offset, box.size, strict=True))
            whole[there] = local[here]
    return whole


@pytest.mark.parametrize("tensor", [MATRIX, EXPERTS], ids=["matrix", "experts"])
@pytest.mark.parametrize("layout", MESHES[1:], ids=lambda layout: str(layout.mesh))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_mesh_does_not_change_the_values(tensor: TensorSpec, layout: Layout, dtype: torch.dtype) -> None:
    assert torch.equal(put_together(tensor, layout, dtype), put_together(tensor, MESHES[0], dtype))


def test_a_rank_draws_only_tiles_that_it_holds_a_part_of(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, ...]] = []
    real = drawing._tile

    def watched(tensor: TensorSpec, tile: drawing.Tile, seed: int, std: float, dtype: torch.dtype) -> torch.Tensor:
        drawn.append(tile[0])
        return real(tensor, tile, seed, std, dtype)

    monkeypatch.setattr(drawing, "_tile", watched)
    for layout, expected in ((Layout(Mesh(dp_shard=4), shard="parameters"), 3 * 1), (Layout(Mesh(tp=5)), 1 * 3)):
        drawn.clear()
        initial(MATRIX, split(MATRIX, Role.WEIGHT, layout), 0, seed=1, dtype=torch.float32)
        assert len(drawn) == len(set(drawn)) == expected


def test_names_seeds_and_tiles_draw_different_values() -> None:
    first = put_together(MATRIX, MESHES[0])
    other = TensorSpec("model.layers.1.self_attn.o_proj.weight", MATRIX.dims, kind="matmul")
    for same_shape in (put_together(MATRIX, MESHES[0], seed=2), put_together(other, MESHES[0])):
        assert not bool((first == same_shape).float().mean() > 0.01)
    assert not torch.equal(first[:128, :1024], first[128:256, :1024])
    assert not torch.equal(first[:128, :1024], first[:128, 1024:2048])


def test_the_distribution_is_normal_with_the_given_width() -> None:
    values = put_together(MATRIX, MESHES[0], torch.float64) / 0.02
    # 770,560 values: the mean of a standard normal is 0 to 0.0011 (1 sigma), its variance 1 to 0.0016, its fourth moment 3 to 0.011.
    assert abs(float(values.mean())) < 0.006
    assert abs(float(values.var()) - 1) < 0.008
    assert abs(float((values**4).mean()) - 3) < 0.056


def test_what_is_constant_in_transformers_is_constant_here() -> None:
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=4,
        initializer_range=0.3,
        attention_bias=True,
        mlp_bias=True,
        architectures=["LlamaForCausalLM"],
    )
    built = LlamaForCausalLM(config)
    model = describe(config.to_dict(), "toy")
    assert model is not None
    for tensor in model.parameters:
        theirs = built.get_parameter(tensor.name).detach()
        ours = initial(tensor, split(tensor, Role.WEIGHT, Layout()), 0, seed=0, std=0.3, dtype=torch.float32)
        if tensor.kind in ("scale", "bias"):
            assert torch.equal(ours, theirs), tensor
        else:
            assert 0.25 < float(ours.std()) < 0.35, tensor
            assert 0.25 < float(theirs.std()) < 0.35, tensor


def test_what_gpt2_adds_to_the_stream_starts_narrower_the_deeper_it_is() -> None:
    config = GPT2Config(vocab_size=101, n_embd=64, n_layer=8, n_head=4, n_positions=32, initializer_range=0.3, bos_token_id=None, eos_token_id=None)
    built, model = GPT2LMHeadModel(config), describe(config.to_dict(), "toy")
    assert model is not None
    for tensor in model.parameters:
        theirs = built.get_parameter(tensor.name).detach()
        ours = initial(tensor, split(tensor, Role.WEIGHT, Layout()), 0, seed=0, std=0.3, dtype=torch.float32)
        if tensor.kind in ("scale", "bias"):
            assert torch.equal(ours, theirs), tensor
        else:
            assert float(ours.std()) == pytest.approx(float(theirs.std()), rel=0.1), tensor
