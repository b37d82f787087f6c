"""Hugging Face in is Hugging Face out: bit for bit, loadable with nothing missing, and never half there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from pentamesh.checkpoint import export as exporting
from pentamesh.checkpoint.export import RECORD, export
from pentamesh.checkpoint.save import save
from pentamesh.checkpoint.weights import INDEX, SINGLE, Weights
from pentamesh.errors import InputError, RunFailed
from pentamesh.layout.mesh import Layout, Mesh
from pentamesh.layout.split import split
from pentamesh.model.roles import Role
from pentamesh.run.worlds import run_world
from tests.checkpoint.folders import spec, toy

COMPANIONS = {
    "generation_config.json": '{"temperature": 0.6}',
    "tokenizer.json": '{"made": "up"}',
    "tokenizer_config.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "special_tokens_map.json": "{}",
    "LICENSE.txt": "a licence",
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
}


def source_folder(folder: Path, *, tied: bool, dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    built = toy(folder, tied=tied, dtype=dtype)
    (folder / "additional_chat_templates").mkdir()
    for name, text in COMPANIONS.items():
        (folder / name).write_text(text)
    (folder / "modeling_toy.py").write_text("raise SystemExit('code of the folder was run')")
    (folder / "training_args.bin").write_bytes(b"a pickle")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("{", '{\n  "a_key_of_theirs":   1,', 1))  # spelled as no writer of ours would
    return built


def train_and_save(source: Path, checkpoints: Path, change: float) -> None:
    """What a run does: read as float32 masters, change, save; under full shard where there are several ranks."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    model, weights = spec(source), Weights.open(source)
    layout = Layout(Mesh(dp_shard=size), shard="parameters")
    tensors: dict[str, torch.Tensor] = {}
    for tensor in model.parameters:
        if size == 1:
            whole = weights.read(tensor, split(tensor, Role.WEIGHT, Layout()), 0, torch.float32)
            tensors[f"model.{tensor.name}"] = whole + change
        else:
            placed = distribute_tensor(torch.zeros(tensor.shape), init_device_mesh("cpu", (size,)), [Shard(0)])
            placed.to_local().copy_(weights.read(tensor, split(tensor, Role.WEIGHT, layout), rank, torch.float32) + change)
            tensors[f"model.{tensor.name}"] = placed
        tensors[f"optimizer.{tensor.name}.exp_avg"] = torch.zeros(tensor.shape)
    tensors[f"rng.{rank}"] = torch.get_rng_state()
    save(checkpoints, 7, tensors, {"plan": "0123456789ab"})


def reloaded(folder: Path) -> tuple[LlamaForCausalLM, dict[str, Any]]:
    """The model that transformers makes of a folder, and what it found missing, unexpected or of another shape."""
    answer: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    return answer


def logits(model: LlamaForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(12).reshape(1, 12) * 8).logits


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_untouched_weights_come_out_as_they_went_in(tmp_path: Path, tied: bool, num_ranks: int) -> None:
    source, target = tmp_path / "source", tmp_path / "out"
    built = source_folder(source, tied=tied)
    if num_ranks == 1:
        train_and_save(source, tmp_path, 0.0)
    else:
        run_world(train_and_save, num_ranks, source, tmp_path, 0.0)
    assert export(tmp_path / "step-00000007", spec(source), source, target) == target

    before, after = load_file(source / SINGLE), load_file(target / SINGLE)
    assert before.keys() == after.keys()
    assert ("lm_head.weight" in after) == (not tied)
    for name in before:
        assert after[name].dtype == torch.bfloat16
        assert torch.equal(before[name].view(torch.int16), after[name].view(torch.int16)), name
    for name in ("config.json", *COMPANIONS):
        assert (target / name).read_bytes() == (source / name).read_bytes(), name
    assert not (target / "modeling_toy.py").exists()
    assert not (target / "training_args.bin").exists()

    loaded, info = reloaded(target)
    assert {key: found for key, found in info.items() if found} == {}
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(logits(loaded), logits(built))
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied


def test_changed_weights_are_the_checkpoints_and_a_wider_dtype_keeps_every_bit(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "out"
    source_folder(source, tied=False)
    train_and_save(source, tmp_path, 0.001)
    export(tmp_path / "step-00000007", spec(source), source, target, dtype="float32")
    before, after = load_file(source / SINGLE), load_file(target / SINGLE)
    for name in before:
        assert torch.equal(after[name], before[name].float() + 0.001), name
    config = json.loads((target / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert config["a_key_of_theirs"] == 1
    assert json.loads((target / RECORD).read_text()) == {
        "schema": "pentamesh.export",
        "version": 1,
        "model": "toy",
        "step": 7,
        "plan": "0123456789ab",
    }
    loaded = AutoModelForCausalLM.from_pretrained(target)
    assert loaded.dtype == torch.float32


def test_each_tensor_keeps_the_dtype_it_had(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "out"
    source_folder(source, tied=False)
    from safetensors.torch import save_file

    mixed = {n: t.float() if "norm" in n else t for n, t in load_file(source / SINGLE).items()}
    save_file(mixed, source / SINGLE, metadata={"format": "pt"})
    train_and_save(source, tmp_path, 0.0)
    export(tmp_path / "step-00000007", spec(source), source, target)
    after = load_file(target / SINGLE)
    assert {n: t.dtype for n, t in after.items()} == {n: t.dtype for n, t in mixed.items()}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_pretraining_has_no_source_weights(tmp_path: Path, tied: bool) -> None:
    source = tmp_path / "source"
    built = source_folder(source, tied=tied, dtype=torch.float32)
    train_and_save(source, tmp_path, 0.0)
    model = spec(source)
    (source / SINGLE).unlink()
    for number, folder in enumerate((None, source)):
        target = tmp_path / f"out{number}"
        export(tmp_path / "step-00000007", model, folder, target)
        assert (target / "tokenizer.json").exists() == (folder is not None)
        loaded, info = reloaded(target)
        assert {key: found for key, found in info.items() if found} == {}
        assert loaded.dtype == torch.float32
        assert torch.equal(logits(loaded), logits(built))


def test_large_models_are_cut_into_files_with_an_index(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "out"
    built = source_folder(source, tied=True)
    train_and_save(source, tmp_path, 0.0)
    model = spec(source)
    export(tmp_path / "step-00000007", model, source, target, max_shard_bytes=6000)
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 6000 + 2000 for file in files)  # header beside
    index = json.loads((target / INDEX).read_text())
    assert index["metadata"] == {"total_parameters": model.num_parameters, "total_size": 2 * model.num_parameters}
    assert {name: file for file in files for name in load_file(file)} == {name: target / file for name, file in index["weight_map"].items()}
    loaded, info = reloaded(target)
    assert {key: found for key, found in info.items() if found} == {}
    assert torch.equal(logits(loaded), logits(built))
    Weights.open(target).check(model)


def test_a_folder_of_others_is_never_overwritten(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "out"
    source_folder(source, tied=True)
    train_and_save(source, tmp_path, 0.0)
    checkpoint, model = tmp_path / "step-00000007", spec(source)
    for wrong in (source, tmp_path / "source" / "tokenizer.json"):
        before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
        with pytest.raises(InputError, match=r"not overwritten|not a folder"):
            export(checkpoint, model, source, wrong)
        assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="is a file or a link"):
        export(checkpoint, model, source, tmp_path / "link")
    target.mkdir()
    export(checkpoint, model, source, target)  # an empty folder is as good as none
    (target / "leftover.txt").write_text("")
    export(checkpoint, model, source, target)  # and an export of ours is replaced whole
    assert not (target / "leftover.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "link", "out", "source", "step-00000007"]


def test_what_fails_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "source", tmp_path / "out"
    source_folder(source, tied=True)
    train_and_save(source, tmp_path, 0.0)
    checkpoint, model = tmp_path / "step-00000007", spec(source)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(exporting, "copy_companions", full)
        with pytest.raises(OSError, match="No space left"):
            export(checkpoint, model, source, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "source", "step-00000007"]
    with pytest.raises(InputError, match=r"float8 is not a dtype of weights(.|\n)*bfloat16"):
        export(checkpoint, model, source, target, dtype="float8")
    (source / "tokenizer.model").symlink_to("/etc/hostname")
    with pytest.raises(InputError, match=r"tokenizer\.model leads out of the folder"):
        export(checkpoint, model, source, target)
    (source / "tokenizer.model").unlink()
    shard = next(checkpoint.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(InputError, match="SHA-256 differs"):
        export(checkpoint, model, source, target)
    assert not target.exists()


def test_another_model_or_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "out"
    source_folder(source, tied=True, dtype=torch.float32)
    train_and_save(source, tmp_path, 0.0)
    with pytest.raises(InputError) as error:
        export(tmp_path / "step-00000007", spec(source, num_hidden_layers=3, vocab_size=102), source, target)
    assert "model.layers.2.mlp.up_proj.weight [ffn, hidden] is not in the checkpoint" in str(error.value)
    assert "model.embed_tokens.weight [vocab, hidden] should be [102, 24] and is [101, 24]" in str(error.value)
    train_and_save(source, tmp_path, 1e5)
    with pytest.raises(RunFailed, match=r"values that are NaN or infinite as torch\.float16"):
        export(tmp_path / "step-00000007", spec(source), source, target, dtype="float16")
    assert not target.exists()


FLAT = """tuple(TensorSpec(f"t.{i}", (Dim("rows", 2**21),), kind="matmul") for i in range(40))"""
STACKED = """(TensorSpec("t", (Dim("experts", 40), Dim("rows", 2**21)), kind="matmul", file_names=("t.{}",)),)"""


@pytest.mark.parametrize("described", [FLAT, STACKED], ids=["many", "one of many"])
def test_memory_is_bounded_by_one_tensor_of_a_file(tmp_path: Path, described: str) -> None:
    """Peak resident memory of a fresh process, beside one that does all but the weights: 40 tensors of 8 MB, never several at once."""
    tensors = {f"model.t.{i}": torch.randn(2**21, generator=torch.Generator().manual_seed(i)) for i in range(40)}
    save(tmp_path, 1, {"model.t": torch.stack(list(tensors.values()))} if described == STACKED else tensors, {})
    script = f"""
import resource, torch
from pathlib import Path
from pentamesh.checkpoint.export import export
from pentamesh.model.dims import Dim, TensorSpec
from pentamesh.model.spec import ModelSpec
tensors = {described}
sizes = dict.fromkeys(("hidden", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn", "vocab", "max_positions"), 1)
model = ModelSpec(name="flat", family="generic", tied=False, tensors=tensors, config={{}}, **sizes)
torch.isfinite(torch.zeros(2**21)).all()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export(Path({str(tmp_path)!r}) / "step-00000001", model, None, Path({str(tmp_path)!r}) / "out")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    grown = int(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout)
    assert 0 <= grown < 4 * 2**23, f"{grown:,} bytes more than before"
    after = load_file(tmp_path / "out" / SINGLE)
    assert all(torch.equal(after[f"t.{i}"], tensors[f"model.t.{i}"]) for i in range(40))


def test_a_chat_template_of_the_job_is_the_only_one_in_the_export(tmp_path: Path) -> None:
    source, target = tmp_path / "hf", tmp_path / "out"
    source_folder(source, tied=True)
    (source / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}", "eos_token": "é"}')
    train_and_save(source, tmp_path, change=0.0)
    export(tmp_path / "step-00000007", spec(source), source, target, chat_template="{{ 'é' }}\n")
    assert (target / "chat_template.jinja").read_text() == "{{ 'é' }}\n"
    assert json.loads((target / "tokenizer_config.json").read_text()) == {"eos_token": "é"}
    assert list(target.glob("additional_chat_templates/*")) == []
