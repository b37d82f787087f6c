"""A rank reads its own boxes of a model folder and nothing else; a folder that is not whole says so, with all that is wrong."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pentamesh.checkpoint import weights as reading
from pentamesh.checkpoint.weights import INDEX, SINGLE, Weights
from pentamesh.errors import InputError
from pentamesh.layout.mesh import Layout, Mesh
from pentamesh.layout.split import split
from pentamesh.model.roles import Role
from tests.checkpoint.folders import spec, toy, watched

LAYOUTS = [
    Layout(Mesh()),
    Layout(Mesh(dp_shard=4), shard="parameters"),
    Layout(Mesh(dp_replicate=2, dp_shard=3), shard="parameters"),
    Layout(Mesh(tp=2, dp_shard=2), shard="parameters"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout.mesh))
@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
def test_the_parts_of_all_ranks_are_the_whole(tmp_path: Path, layout: Layout, max_shard_size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a box is read at once or a row or two at a time."""
    monkeypatch.setattr(reading, "_READ_NUMEL", reading._READ_NUMEL if max_shard_size == "5GB" else 70)
    built = toy(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / INDEX).exists() == (max_shard_size != "5GB")
    weights, model = Weights.open(tmp_path), spec(tmp_path)
    weights.check(model)
    values = built.state_dict()
    for tensor in model.parameters:
        held = split(tensor, Role.WEIGHT, layout)
        whole = torch.full(tensor.shape, torch.nan)
        for rank in layout.ranks():
            local = weights.read(tensor, held, rank, torch.float32)
            assert local.shape == held.local_shape(rank)
            for box in held.boxes(rank):
                there = tuple(slice(low, low + n) for low, n in zip(box.offset, box.size, strict=True))
                here = tuple(slice(low, low + n) for low, n in zip(box.local_offset, box.size, strict=True))
                whole[there] = local[here]
        assert torch.equal(whole, values[tensor.name]), tensor.name


def test_only_the_boxes_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy(tmp_path)
    weights, model = Weights.open(tmp_path), spec(tmp_path)
    read = watched(monkeypatch).read
    layout = Layout(Mesh(dp_shard=4), shard="parameters")
    for tensor in model.parameters:
        weights.read(tensor, split(tensor, Role.WEIGHT, layout), 1, torch.float32)
    shares = [split(tensor, Role.WEIGHT, layout).boxes(1) for tensor in model.parameters]
    assert sum(read) == sum(box.numel for boxes in shares for box in boxes) < model.num_parameters / 3.5


def test_values_are_cast(tmp_path: Path) -> None:
    built = toy(tmp_path, dtype=torch.bfloat16)
    weights, model = Weights.open(tmp_path), spec(tmp_path)
    assert weights.dtype == "BF16"
    norm = model.parameters[-2]
    held = split(norm, Role.WEIGHT, Layout())
    local = weights.read(norm, held, 0, torch.float32)
    assert local.dtype == torch.float32
    assert torch.equal(local, built.state_dict()[norm.name].float())


def test_a_tied_head_may_be_absent_or_equal_but_not_different(tmp_path: Path) -> None:
    toy(tmp_path, tied=True)
    model = spec(tmp_path)
    assert "lm_head.weight" not in Weights.open(tmp_path).tensors
    Weights.open(tmp_path).check(model)
    tensors = load_file(tmp_path / SINGLE)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / SINGLE)
    Weights.open(tmp_path).check(model)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, tmp_path / SINGLE)
    with pytest.raises(InputError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight, and their values differ"):
        Weights.open(tmp_path).check(model)


def test_everything_that_differs_from_the_model_is_listed(tmp_path: Path) -> None:
    toy(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    tensors["model.final_norm.weight"] = tensors.pop("model.norm.weight")
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(40, 25)
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.zeros(3)  # files of old have it; it is computed
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(InputError) as error:
        Weights.open(tmp_path).check(spec(tmp_path))
    assert len(error.value.problems) == 3
    said = str(error.value)
    assert "model.norm.weight [hidden] is missing" in said
    assert "the folder has model.final_norm.weight" in said
    assert "model.final_norm.weight is not part of toy (llama)" in said
    assert "model.layers.0.mlp.up_proj.weight [ffn, hidden] should be [40, 24] and is [40, 25]" in said


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_name_tensor_and_file(tmp_path: Path, bad: float) -> None:
    toy(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    tensors["model.layers.1.self_attn.k_proj.weight"][5, 3] = bad
    save_file(tensors, tmp_path / SINGLE)
    model = spec(tmp_path)
    tensor = next(t for t in model.parameters if t.name == "model.layers.1.self_attn.k_proj.weight")
    layout = Layout(Mesh(dp_shard=4), shard="parameters")
    held = split(tensor, Role.WEIGHT, layout)
    Weights.open(tmp_path).read(tensor, held, 0, torch.float32)  # rows 0 to 2 are fine
    with pytest.raises(InputError, match=r"k_proj\.weight holds 1 of 72 values that are NaN or infinite(.|\n)*model\.safetensors \(rank 1\)"):
        Weights.open(tmp_path).read(tensor, held, 1, torch.float32)


# Folders that cannot be used.


def first_shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[0]


def truncated(folder: Path) -> None:
    os.truncate(first_shard(folder), 2000)


def header_cut(folder: Path) -> None:
    os.truncate(first_shard(folder), 5)


def header_lies(folder: Path) -> None:
    content = first_shard(folder).read_bytes()
    first_shard(folder).write_bytes((2**40).to_bytes(8, "little") + content[8:])


def trailing(folder: Path) -> None:
    first_shard(folder).write_bytes(first_shard(folder).read_bytes() + b"more")


def missing(folder: Path) -> None:
    first_shard(folder).unlink()


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def index_lies(folder: Path) -> None:
    edit_index(folder, lambda places: places.__setitem__("model.extra.weight", first_shard(folder).name))


def index_leaves(folder: Path) -> None:
    (folder.parent / "x.safetensors").write_bytes(first_shard(folder).read_bytes())
    edit_index(folder, lambda places: places.__setitem__("model.norm.weight", "../x.safetensors"))


def index_absolute(folder: Path) -> None:
    edit_index(folder, lambda places: places.__setitem__("model.norm.weight", str(first_shard(folder).resolve())))


def linked(folder: Path) -> None:
    shard = first_shard(folder)
    shard.rename(folder.parent / "elsewhere")
    shard.symlink_to(folder.parent / "elsewhere")


def index_broken(folder: Path) -> None:
    (folder / INDEX).write_text("{")


def index_of_pickles(folder: Path) -> None:
    (folder / INDEX).unlink()
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))


def nothing(folder: Path) -> None:
    (folder / INDEX).unlink()


def edit_header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = first_shard(folder).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    first_shard(folder).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def header_of_lists(folder: Path) -> None:
    first_shard(folder).write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000)


def offsets_below_zero(folder: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        entry = next(entry for name, entry in header.items() if name != "__metadata__")
        entry["data_offsets"] = [offset - 10_000 for offset in entry["data_offsets"]]

    edit_header(folder, change)


def overlapping(folder: Path) -> None:
    """Two tensors of one size in one place: a file that looks whole, and of which one tensor is another's values."""

    def change(header: dict[str, Any]) -> None:
        entries = [entry for name, entry in header.items() if name != "__metadata__"]
        one, other = next((a, b) for a in entries for b in entries if a is not b and a["shape"] == b["shape"])
        other["data_offsets"] = one["data_offsets"]

    edit_header(folder, change)


def index_of(place: Any) -> Callable[[Path], None]:
    def index_of_no_file(folder: Path) -> None:
        edit_index(folder, lambda places: places.__setitem__("model.norm.weight", place))

    return index_of_no_file


HARM: list[tuple[Callable[[Path], None], str]] = [
    (truncated, "model-00001-of-0000"),
    (truncated, "bytes expected, 2,000 found"),
    (header_cut, "not a whole safetensors file"),
    (header_lies, "its header says 1,099,511,627,776 bytes"),
    (trailing, "is too long"),
    (missing, "is missing"),
    (index_lies, "model.extra.weight is not in model-00001-of-0000"),
    (index_leaves, "../x.safetensors leads out of the folder"),
    (index_absolute, "leads out of the folder"),
    (linked, "leads out of the folder"),
    (index_broken, "model.safetensors.index.json is not an index"),
    (index_of_pickles, "the weights are pickles (pytorch_model.bin)"),
    (header_of_lists, "its header cannot be understood"),
    (offsets_below_zero, "offsets that are not whole numbers"),
    (overlapping, "and what is before it ends at"),
    (index_of(5), "model.safetensors.index.json is not an index"),
    (index_of("a\0b"), "is no name of a file"),
    (index_of("a" * 3000), "is no name of a file"),
    (nothing, "there is neither model.safetensors nor model.safetensors.index.json"),
]


@pytest.mark.parametrize(("harm", "said"), HARM, ids=[f"{harm.__name__}{i}" for i, (harm, _) in enumerate(HARM)])
def test_a_folder_that_cannot_be_used_says_why(tmp_path: Path, harm: Callable[[Path], None], said: str) -> None:
    folder = tmp_path / "model"
    toy(folder, max_shard_size="20KB")
    Weights.open(folder)
    harm(folder)
    with pytest.raises(InputError) as error:
        Weights.open(folder)
    assert said in str(error.value)


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    """As floating point they would be read without a word, and train to nothing."""
    built = toy(tmp_path)
    save_file({name: value.view(torch.int32) if "norm" in name else value for name, value in built.state_dict().items()}, tmp_path / SINGLE)
    with pytest.raises(InputError, match=r"model\.norm\.weight \[hidden\] is stored as I32"):
        Weights.open(tmp_path).check(spec(tmp_path))


def test_a_config_of_another_model_is_told_in_few_lines(tmp_path: Path) -> None:
    toy(tmp_path)
    with pytest.raises(InputError) as error:
        Weights.open(tmp_path).check(spec(tmp_path, hidden_size=32, intermediate_size=48, num_hidden_layers=5))
    assert len(error.value.problems) == 21
    assert "more tensors do not fit the config" in error.value.problems[-1].what


def test_all_broken_files_are_named_at_once(tmp_path: Path) -> None:
    toy(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    os.truncate(shards[0], 2000)
    shards[1].unlink()
    with pytest.raises(InputError) as error:
        Weights.open(tmp_path)
    assert [shard.name in str(error.value) for shard in shards[:3]] == [True, True, False]


def test_the_hubs_cache_may_link_to_its_own_store(tmp_path: Path) -> None:
    repository = tmp_path / "models--someone--toy"
    folder, blobs = repository / "snapshots" / "abc", repository / "blobs"
    built = toy(folder)
    blobs.mkdir()
    (folder / SINGLE).rename(blobs / "hash")
    (folder / SINGLE).symlink_to(Path("../../blobs/hash"))
    assert Weights.open(folder).tensors.keys() == built.state_dict().keys()
    (folder / SINGLE).unlink()
    (blobs / "hash").rename(tmp_path / "hash")
    (folder / SINGLE).symlink_to(tmp_path / "hash")
    with pytest.raises(InputError, match="leads out of the folder"):
        Weights.open(folder)
