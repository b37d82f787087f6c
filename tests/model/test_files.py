"""The map between tensors in memory and in files: its pieces are the whole, once, and are those that transformers' own conversion makes."""

from __future__ import annotations

import re
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

from pentamesh.model.dims import Dim, TensorSpec
from pentamesh.model.families import describe
from pentamesh.model.files import Region, fused, overlap, pieces
from pentamesh.model.read import read_model
from pentamesh.model.spec import ModelSpec
from tests.proof.toys import TOYS

SPARSE = ("mixtral", "qwen3-moe", "gpt-oss", "deepseek-v2", "deepseek-v3")


def spec(toy: str) -> ModelSpec:
    found = describe(TOYS[toy], toy)
    assert found is not None
    return found


def slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(low, low + length) for low, length in zip(*region, strict=True))


@pytest.mark.parametrize("toy", TOYS)
def test_the_pieces_of_a_tensor_are_the_whole_once(toy: str) -> None:
    model, names = spec(toy), set[str]()
    for tensor in (*model.tensors, *model.buffers):
        met = torch.zeros(tensor.shape, dtype=torch.int)
        for piece in pieces(tensor):
            met[slices(piece.region)] += 1
            assert prod(piece.shape) == prod(piece.region.size)
            assert piece.name not in names
            names.add(piece.name)
        assert bool((met == 1).all()), tensor.name


def test_a_tensor_that_files_have_as_it_is() -> None:
    (piece,) = pieces(TensorSpec("norm.weight", (Dim("hidden", 5),)))
    assert (piece.name, piece.region, piece.shape) == ("norm.weight", Region((0,), (5,)), (5,))
    (piece,) = pieces(TensorSpec("gate_up.weight", (Dim("ffn", 8, 1, (6, 2)), Dim("hidden", 5)), file_names=("other",)))
    assert (piece.name, piece.shape) == ("other", (8, 5))


def test_one_tensor_an_expert_and_part() -> None:
    tensor = TensorSpec("both", (Dim("experts", 2), Dim("ffn", 5, 1, (3, 2)), Dim("hidden", 4)), file_names=("e.{}.a", "e.{}.b"))
    assert [(piece.name, *piece.region, piece.shape) for piece in pieces(tensor)] == [
        ("e.0.a", (0, 0, 0), (1, 3, 4), (3, 4)),
        ("e.1.a", (1, 0, 0), (1, 3, 4), (3, 4)),
        ("e.0.b", (0, 3, 0), (1, 2, 4), (2, 4)),
        ("e.1.b", (1, 3, 0), (1, 2, 4), (2, 4)),
    ]
    assert fused(tensor) == (Region((0, 0, 0), (2, 3, 4)), Region((0, 3, 0), (2, 2, 4)))


RUNS = st.tuples(st.integers(0, 6), st.integers(0, 6))


@given(st.lists(st.tuples(RUNS, RUNS), min_size=1, max_size=3))
def test_what_two_regions_have_in_common(dims: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
    one, other = (Region(*map(tuple, zip(*(pair[which] for pair in dims), strict=True))) for which in (0, 1))
    marks = torch.zeros((12,) * len(dims), dtype=torch.int)
    for region in (one, other):
        marks[slices(region)] += 1
    found, expected = overlap(one, other), (marks == 2).nonzero()
    assert (found is None) == (len(expected) == 0)
    if found is not None:
        assert tuple(expected.min(0).values.tolist()) == found.offset
        assert len(expected) == prod(found.size)


@pytest.mark.parametrize("toy", SPARSE)
def test_names_are_those_of_transformers_own_conversion(toy: str) -> None:
    """Of each tensor the names in files, the dim along which experts are stacked and the one along which gate and up are joined."""
    model = spec(toy)
    mapping = get_checkpoint_conversion_mapping(model.family) or []
    assert bool(mapping) == (toy != "gpt-oss")
    for tensor in (*model.tensors, *model.buffers):
        assert (tensor.file_names or (tensor.name,)) == by_transformers(tensor, mapping), tensor.name


def by_transformers(tensor: TensorSpec, mapping: list[WeightRenaming | WeightConverter]) -> tuple[str, ...]:
    """What files call a tensor, by the conversions that loading makes; checks on the way that their operations are those of our map."""
    names = (tensor.name,)
    for made in mapping:
        if not isinstance(made, WeightConverter):
            continue
        (target,) = made._original_target_patterns
        if not tensor.name.endswith(target):
            continue
        names = tuple(tensor.name.removesuffix(target) + source.replace("*", "{}") for source in made._original_source_patterns)
        merged, *joined = made.operations
        assert isinstance(merged, MergeModulelist)
        assert (merged.dim, tensor.dims[0].name) == (0, "experts")
        assert [len(dim.parts) for dim in tensor.dims] == ([0, 2, 0] if joined else [0, 0, 0])
        assert all(isinstance(operation, Concatenate) and operation.dim == 1 for operation in joined)
    for made in mapping:
        if isinstance(made, WeightRenaming):
            (source,), (target,) = made._original_source_patterns, made._original_target_patterns
            names = tuple(re.sub(re.escape(target), source, name) for name in names)
    return names


def test_layers_for_multi_token_prediction_are_said_and_not_built() -> None:
    model = read_model("deepseek-v3")
    assert model.unbuilt == ("model.layers.61.",)
    assert model.notes[0] == "layers for multi-token prediction in its files (model.layers.61.) are not built"
    assert not any(name.startswith(model.unbuilt) for tensor in model.tensors for name in (tensor.name, *tensor.file_names))
