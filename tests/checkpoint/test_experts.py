"""Experts are one tensor a layer in memory and one an expert in files: read by boxes, kept in checkpoints, and back in files bit for bit."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pentamesh.checkpoint import weights as reading
from pentamesh.checkpoint.convert import convert
from pentamesh.checkpoint.export import export
from pentamesh.checkpoint.headers import weight_dtype
from pentamesh.checkpoint.held import held
from pentamesh.checkpoint.save import save
from pentamesh.checkpoint.weights import INDEX, SINGLE, Weights
from pentamesh.errors import InputError
from pentamesh.layout.mesh import Layout, Mesh
from pentamesh.layout.split import split
from pentamesh.model.families import describe
from pentamesh.model.roles import Role
from pentamesh.model.spec import ModelSpec
from pentamesh.run.worlds import run_world
from tests.checkpoint.folders import watched
from tests.proof.toys import TOYS

SPARSE = ("mixtral", "qwen3-moe", "gpt-oss", "deepseek-v2", "deepseek-v3")
LAYOUTS = [
    Layout(Mesh()),
    Layout(Mesh(dp_shard=4), "parameters"),
    Layout(Mesh(dp_shard=4, ep=2), "parameters"),
    Layout(Mesh(dp_shard=4, ep=4), "optimizer"),
    Layout(Mesh(dp_replicate=2, dp_shard=2, ep=2), "parameters"),
    Layout(Mesh(dp_shard=2, tp=2, ep=2), "gradients", sequence_parallel=True),
    Layout(Mesh(dp_shard=2, cp=2, tp=2, ep=8), "parameters", sequence_parallel=True),
]


def spec(toy: str) -> ModelSpec:
    found = describe(TOYS[toy], toy)
    assert found is not None
    return found


def saved(folder: Path, toy: str, dtype: torch.dtype = torch.bfloat16, **more: Any) -> PreTrainedModel:
    """A toy of random weights, buffers and all, saved to `folder` by transformers itself."""
    torch.manual_seed(3)
    built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TOYS[toy]), dtype=dtype)
    with torch.no_grad():
        for tensor in built.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape))
    built.save_pretrained(folder, **more)
    return built


def slices(offset: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(low, low + length) for low, length in zip(offset, size, strict=True))


@pytest.mark.parametrize("toy", SPARSE)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout.mesh))
def test_the_parts_of_all_ranks_are_the_whole(tmp_path: Path, toy: str, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of parameters and buffers, whether a box is read at once or a row or two at a time."""
    monkeypatch.setattr(reading, "_READ_NUMEL", 2**22 if layout.mesh.tp > 1 else 70)
    values = saved(tmp_path, toy, max_shard_size="50KB").state_dict()
    weights, model = Weights.open(tmp_path), spec(toy)
    weights.check(model)
    for tensor in (*model.parameters, *model.buffers):
        cut = split(tensor, Role.STATE, layout)
        met = torch.zeros(tensor.shape, dtype=torch.int)
        for rank in layout.ranks():
            local = weights.read(tensor, cut, rank, torch.float32)
            for box in cut.boxes(rank):
                met[slices(box.offset, box.size)] += 1
                here, there = local[slices(box.local_offset, box.size)], values[tensor.name][slices(box.offset, box.size)]
                assert torch.equal(here, there.float()), tensor.name
        assert bool((met == met.max()).all()), f"{tensor.name} is held unevenly often"
        assert not bool((met == 0).any())


@pytest.mark.parametrize("toy", SPARSE)
def test_no_rank_asks_for_experts_of_others(tmp_path: Path, toy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, toy)
    asked, read = watched(monkeypatch)
    layout, rank = Layout(Mesh(dp_shard=8, ep=8), "parameters"), 5
    weights, model = Weights.open(tmp_path), spec(toy)
    cuts = [split(tensor, Role.STATE, layout) for tensor in model.parameters]
    for tensor, cut in zip(model.parameters, cuts, strict=True):
        weights.read(tensor, cut, rank, torch.float32)
    assert sum(read) == sum(box.numel for cut in cuts for box in cut.boxes(rank))
    experts = {int(found[1]) for name in asked if (found := re.search(r"experts\.(\d+)\.", name))}
    assert experts == (set() if toy == "gpt-oss" else {5})


def keep(source: Path, toy: str, checkpoints: Path, layout: Layout) -> None:
    """What a run does: read what this rank holds as float32, and save it; buffers whole."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    weights, tensors = Weights.open(source), dict[str, torch.Tensor]()
    for tensor in (model := spec(toy)).parameters:
        cut = split(tensor, Role.STATE, layout)
        tensors |= held(f"model.{tensor.name}", weights.read(tensor, cut, rank, torch.float32), cut, rank, shared=True)
    for buffer in model.buffers:
        tensors[f"model.{buffer.name}"] = weights.read(buffer, split(buffer, Role.STATE, layout), rank, torch.float32)
    save(checkpoints, 7, tensors, {"plan": "0123456789ab"})


def same(before: Path, after: Path) -> None:
    """Names, dtypes and bits."""
    one, other = (
        {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()} for folder in (before, after)
    )
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert other[name].dtype == tensor.dtype, name
        assert torch.equal(other[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


def reloaded(folder: Path) -> PreTrainedModel:
    found: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype="auto")
    loaded, info = found
    assert {key: found for key, found in info.items() if found} == {}
    return loaded


@pytest.mark.parametrize("toy", SPARSE)
def test_what_came_in_goes_out(tmp_path: Path, toy: str) -> None:
    """Through a checkpoint of four ranks, as they wrote it and converted to whole tensors; in one file and in several."""
    source, values = tmp_path / "source", saved(tmp_path / "source", toy).state_dict()
    run_world(keep, 4, source, toy, tmp_path, Layout(Mesh(dp_shard=4, ep=2), "parameters"))
    convert(tmp_path / "step-00000007", tmp_path / "whole" / "step-00000007")
    for checkpoint, max_shard_bytes in ((tmp_path / "step-00000007", 5e9), (tmp_path / "whole" / "step-00000007", 30_000)):
        target = tmp_path / f"out-{max_shard_bytes:.0f}"
        export(checkpoint, spec(toy), source, target, max_shard_bytes=max_shard_bytes)
        same(source, target)
        assert (target / INDEX).exists() == (max_shard_bytes < 5e9)
        assert (target / "config.json").read_bytes() == (source / "config.json").read_bytes()
        again = reloaded(target).state_dict()
        assert all(torch.equal(values[name], again[name]) for name in values)


def test_without_a_source_buffers_stay_wide(tmp_path: Path) -> None:
    saved(tmp_path / "source", "deepseek-v3", torch.float32)
    keep(tmp_path / "source", "deepseek-v3", tmp_path, Layout())
    export(tmp_path / "step-00000007", spec("deepseek-v3"), None, tmp_path / "out", dtype="bfloat16")
    found = {name: tensor.dtype for name, tensor in load_file(tmp_path / "out" / SINGLE).items()}
    assert {name for name, dtype in found.items() if dtype == torch.float32} == {t.name for t in spec("deepseek-v3").buffers}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_buffer_that_a_checkpoint_lacks(tmp_path: Path) -> None:
    saved(tmp_path / "source", "deepseek-v3")
    keep(tmp_path / "source", "deepseek-v3", tmp_path, Layout())
    model = spec("deepseek-v3")
    assert model.buffers[0].name == "model.layers.1.mlp.gate.e_score_correction_bias"
    changed = replace(model, buffers=(replace(model.buffers[0], name="other_bias"),))
    with pytest.raises(InputError, match=r"other_bias \[choices\] is not in the checkpoint"):
        export(tmp_path / "step-00000007", changed, None, tmp_path / "out")


def test_what_files_of_experts_may_lack_and_have_too_many(tmp_path: Path) -> None:
    saved(tmp_path, "mixtral")
    tensors = load_file(tmp_path / SINGLE)
    path = "model.layers.1.block_sparse_moe"
    tensors[f"{path}.experts.8.w1.weight"] = tensors.pop(f"{path}.experts.7.w1.weight")
    tensors[f"{path}.experts.2.w3.weight"] = torch.zeros(48, 20)
    tensors[f"{path}.experts.3.w2.weight"] = torch.zeros(48, 20, dtype=torch.int8)
    tensors[f"{path}.experts.4.w2.weight"] = torch.zeros(48, 20, dtype=torch.float8_e4m3fn)
    tensors[f"{path}.gate.bias"] = torch.zeros(8)
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(InputError) as error:
        Weights.open(tmp_path).check(spec("mixtral"))
    whole = "model.layers.1.mlp.experts"
    assert [problem.what for problem in error.value.problems] == [
        f"{path}.experts.7.w1.weight (a part of {whole}.gate_up_proj [experts, ffn, hidden]) is missing",
        f"{path}.experts.8.w1.weight is not part of mixtral (mixtral)",
        f"{path}.gate.bias is not part of mixtral (mixtral)",
        f"{path}.experts.2.w3.weight (a part of {whole}.gate_up_proj [experts, ffn, hidden]) should be [20, 48] and is [48, 20]",
        f"{path}.experts.3.w2.weight (a part of {whole}.down_proj [experts, hidden, ffn]) is stored as I8, which is no dtype of weights",
        f"{path}.experts.4.w2.weight (a part of {whole}.down_proj [experts, hidden, ffn]) is stored as F8_E4M3, which is no dtype of weights",
    ]


def test_layers_that_no_modules_are_built_for_are_left_where_they_are(tmp_path: Path) -> None:
    saved(tmp_path, "deepseek-v3")
    tensors = load_file(tmp_path / SINGLE)
    beyond = {name.replace("layers.2.", "layers.3."): tensor.clone() for name, tensor in tensors.items() if "layers.2." in name}
    save_file(tensors | beyond | {"model.layers.3.eh_proj.weight": torch.zeros(48, 96)}, tmp_path / SINGLE)
    with pytest.raises(InputError, match=r"model\.layers\.3\.eh_proj\.weight is not part of deepseek-v3"):
        Weights.open(tmp_path).check(spec("deepseek-v3"))
    predicting = describe(TOYS["deepseek-v3"] | {"num_nextn_predict_layers": 1}, "deepseek-v3")
    assert predicting is not None
    Weights.open(tmp_path).check(predicting)


def test_values_that_are_not_finite_name_the_files_that_were_read(tmp_path: Path) -> None:
    saved(tmp_path, "qwen3-moe")
    tensors = load_file(tmp_path / SINGLE)
    tensors["model.layers.2.mlp.experts.6.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, tmp_path / SINGLE)
    layout, model = Layout(Mesh(dp_shard=8, ep=8), "parameters"), spec("qwen3-moe")
    tensor = next(t for t in model.parameters if t.name == "model.layers.2.mlp.experts.gate_up_proj")
    weights, cut = Weights.open(tmp_path), split(tensor, Role.STATE, layout)
    weights.read(tensor, cut, 5, torch.float32)
    with pytest.raises(InputError, match=r"gate_up_proj holds 1 of 1920 values that are NaN(.|\n)*model\.safetensors \(rank 6\)"):
        weights.read(tensor, cut, 6, torch.float32)


def test_no_weights_are_written_in_floats_of_8_bits() -> None:
    with pytest.raises(InputError, match="float8_e4m3fn is not a dtype of weights"):
        weight_dtype("float8_e4m3fn")
