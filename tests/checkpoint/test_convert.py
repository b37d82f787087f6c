"""A converted checkpoint is the same bits in whole tensors, loaded under any layout, made one tensor at a time."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from pentamesh.checkpoint import convert as converting
from pentamesh.checkpoint.convert import convert
from pentamesh.checkpoint.headers import read_header
from pentamesh.checkpoint.manifest import MANIFEST, Manifest, TensorFacts, file_facts, verify
from pentamesh.checkpoint.save import save
from pentamesh.errors import InputError, RunFailed
from pentamesh.run.worlds import run_world
from tests.checkpoint.test_save_and_load import FACTS, alone, load_rank, num_ranks, save_rank


@pytest.mark.parametrize("saved", ["full 4", "columns 2 x rows 2"])
def test_any_layout_loads_the_same_bits(tmp_path: Path, saved: str) -> None:
    run_world(save_rank, num_ranks(saved), tmp_path, saved, 3)
    checkpoint = tmp_path / "step-00000003"
    converted = convert(checkpoint, tmp_path / "whole", file_bytes=300)
    assert verify(converted) == []
    before, after = Manifest.read(checkpoint), Manifest.read(converted)
    assert (after.step, after.tensors) == (3, before.tensors)
    origin = after.facts["converted_from"]
    assert origin == {"folder": "step-00000003", "manifest_sha256": file_facts(checkpoint / MANIFEST).sha256, "weights_only": False}
    assert {key: value for key, value in after.facts.items() if key != "converted_from"} == before.facts
    headers = [read_header(converted / name) for name in after.files]
    assert len(headers) > 3
    assert {name: entry.shape for header in headers for name, entry in header.entries.items()} == {n: t.shape for n, t in after.tensors.items()}
    assert {entry.offset for header in headers for entry in header.entries.values()} <= {(), (0,), (0, 0), (0, 0, 0)}
    loaded = ["one"] if saved == "full 4" else ["full 2", "ddp 2"]
    for layout in loaded:
        answers = run_world(load_rank, num_ranks(layout), converted, layout)
        assert [wrong for wrong, _, _ in answers] == [[]] * num_ranks(layout)
        assert answers[0][1]["counters"] == FACTS["counters"]


def test_files_have_the_size_that_was_asked_for_or_one_tensor(tmp_path: Path) -> None:
    checkpoint = alone(tmp_path, 1)
    one = convert(checkpoint, tmp_path / "one")
    assert sorted(path.name for path in one.iterdir()) == [MANIFEST, "whole-00001-of-00001.safetensors"]
    many = convert(checkpoint, tmp_path / "many", file_bytes=1)
    assert [len(read_header(path).entries) for path in many.glob("*.safetensors")] == [1] * len(Manifest.read(many).tensors)


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, alive, seen = alone(tmp_path, 1), [], []
    real = converting.whole

    def watched(*arguments: Any) -> torch.Tensor:
        assert [ref for ref in alive if ref() is not None] == []
        found = real(*arguments)
        alive.append(weakref.ref(found))
        return found

    monkeypatch.setattr(converting, "whole", watched)
    convert(checkpoint, tmp_path / "whole", written=seen.append)
    assert len(alive) == len(seen) == len(Manifest.read(checkpoint).tensors)
    assert sum(seen) == sum(path.stat().st_size for path in (tmp_path / "whole").glob("*.safetensors")) - sum(
        min(entry.begin for entry in read_header(path).entries.values()) for path in (tmp_path / "whole").glob("*.safetensors")
    )


def test_weights_that_are_not_finite_in_another_dtype_are_refused_and_kept_in_their_own(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 1, {"model.w": torch.tensor([1e30, 1.0]), "model.count": torch.tensor([3]), "optimizer.w.step": torch.ones(())}, {})
    with pytest.raises(RunFailed, match=r"model\.w has 1 values that are NaN or infinite as torch\.float16"):
        convert(checkpoint, tmp_path / "half", weights_only=True, dtype="float16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "step-00000001"]
    found = Manifest.read(convert(checkpoint, tmp_path / "half", weights_only=True, dtype="bfloat16"))
    assert found.tensors == {"model.w": TensorFacts("BF16", (2,)), "model.count": TensorFacts("I64", (1,))}
    spoiled = save(tmp_path, 2, {"model.w": torch.tensor([float("nan")])}, {})
    assert verify(convert(spoiled, tmp_path / "spoiled")) == []


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"model.w": TensorFacts("F32", (3,))}, "model.w has 3 values, 2 are in the checkpoint"),
        ({"model.w": TensorFacts("F32", (2, 1))}, "does not lie in [2, 1]"),
        ({"model.w": TensorFacts("I32", (2,))}, "model.w is I32 in manifest.json and F32 in"),
        ({"model.w": TensorFacts("F8_E4M3", (0,))}, "a dtype that no checkpoint has"),
        ({"model.v": TensorFacts("F32", (2,))}, "model.v has 2 values, 0 are in the checkpoint"),
        ({}, "holds no weights"),
    ],
)
def test_a_manifest_that_says_other_than_the_files_is_refused(tmp_path: Path, tensors: dict[str, TensorFacts], said: str) -> None:
    checkpoint = save(tmp_path, 1, {"model.w": torch.ones(2)}, {})
    found = Manifest.read(checkpoint)
    (checkpoint / MANIFEST).write_text(Manifest(1, found.facts, tensors, found.files).text())
    assert verify(checkpoint) == []
    with pytest.raises(InputError) as error:
        convert(checkpoint, tmp_path / "whole")
    assert said in str(error.value)
    assert not (tmp_path / "whole").exists()
