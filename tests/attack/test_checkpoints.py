"""Checkpoints that somebody tampered with, mixed up or mistyped: a clear error, nothing lost, no traceback."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pentamesh.checkpoint.convert import convert
from pentamesh.checkpoint.headers import write_tensors
from pentamesh.checkpoint.keep import Retention, best, newest, prune
from pentamesh.checkpoint.listing import listing, verification
from pentamesh.checkpoint.load import load
from pentamesh.checkpoint.manifest import MANIFEST, File, Manifest, TensorFacts, _digest, name_of, verify
from pentamesh.checkpoint.names import published
from pentamesh.checkpoint.save import save
from pentamesh.checkpoint.saver import Saver
from pentamesh.errors import InputError
from pentamesh.report.checkpoints import listed, verified
from pentamesh.run.folder import RunFolder
from pentamesh.run.launch import _interrupted

FACTS: dict[str, Any] = {"counters": {"step": 2, "consumed": 8}, "held_out_loss": 2.0, "precision": "fp32", "saved_at": "2026-01-01T00:00:00Z"}
WEIGHT = "model.w"


def state(fill: float = 1.0) -> dict[str, torch.Tensor]:
    return {WEIGHT: torch.full((4, 3), fill), "optimizer.w.exp_avg": torch.zeros(4, 3), "rng.0": torch.zeros(8, dtype=torch.uint8)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of two checkpoints, of steps 1 and 2."""
    for step in (1, 2):
        save(tmp_path / "checkpoints", step, state(step), FACTS)
    return tmp_path / "checkpoints"


def rewritten(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The checkpoint with another manifest, whose own checksum is right."""
    found = json.loads((checkpoint / MANIFEST).read_text())
    del found["sha256"]
    change(found)
    (checkpoint / MANIFEST).write_text(json.dumps(found | {"sha256": _digest(found)}))
    return checkpoint


def put(*path: str, value: Any) -> Callable[[dict[str, Any]], object]:
    def change(found: dict[str, Any]) -> None:
        for key in path[:-1]:
            found = found[key]
        found[path[-1]] = value

    return change


def file_called(name: str) -> Callable[[dict[str, Any]], object]:
    return put("files", name, value={"bytes": 5, "sha256": "00"})


def whole_file(**facts: Any) -> Callable[[dict[str, Any]], object]:
    return lambda found: next(iter(found["files"].values())).update(facts)


UNUSABLE = {
    "step as text": put("step", value="2"),
    "negative step": put("step", value=-1),
    "half a step": put("step", value=2.5),
    "step NaN": put("step", value=float("nan")),
    "step a list": put("step", value=[2]),
    "step true": put("step", value=True),
    "another step": put("step", value=1),
    "step beyond counting": put("step", value=10**30),
    "files a list": put("files", value=["a"]),
    "no files": put("files", value={}),
    "size as text": whole_file(bytes="5"),
    "no size": whole_file(bytes=None),
    "negative size": whole_file(bytes=-5),
    "checksum a number": whole_file(sha256=3),
    "file without a name": file_called(""),
    "file outside": file_called("../x"),
    "file of a name that is too long": file_called("a" * 400),
    "file with a NUL": file_called("a\0b"),
    "file with a line end and colours": file_called("a\nb\x1b[31m"),
    "file with half a character": file_called("\ud800"),
    "shape as text": put("tensors", WEIGHT, "shape", value="abc"),
    "negative shape": put("tensors", WEIGHT, "shape", value=[-4, -3]),
    "shape that no disk holds": put("tensors", WEIGHT, "shape", value=[10**18, 10**18]),
    "shape of halves": put("tensors", WEIGHT, "shape", value=[1.5, 8]),
    "shape of lists": put("tensors", WEIGHT, "shape", value=[[4], [3]]),
    "dtype a list": put("tensors", WEIGHT, "dtype", value=["F32"]),
    "tensors a list": put("tensors", value=[]),
    "loss NaN": put("held_out_loss", value=float("nan")),
}


@pytest.mark.parametrize("change", UNUSABLE.values(), ids=UNUSABLE)
def test_a_manifest_of_wrong_types_is_refused_by_everything_that_reads_it(change: Any, folder: Path, tmp_path: Path) -> None:
    harmed, said = rewritten(folder / name_of(2), change), []
    problems = verify(harmed)
    assert problems
    assert all(problem.what and "\x1b" not in str(problem) for problem in problems)
    assert newest(folder, say=said.append) == best(folder, say=said.append) == folder / name_of(1)
    assert all(text.startswith(f"passing over checkpoint {harmed.name}, which cannot be used:\nerror: ") for text in said)
    with pytest.raises(InputError):
        convert(harmed, tmp_path / "converted")
    with pytest.raises(InputError):
        load(harmed, state())
    assert f"{harmed.name}  NOT WHOLE" in verified(verification(folder, published(folder)))
    assert harmed.name in listed(json.loads(json.dumps(listing(folder, published(folder)), allow_nan=False)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]


ODD_FACTS = {
    "loss beyond floats": put("held_out_loss", value=10**400),
    "loss a list": put("held_out_loss", value=[]),
    "time a number": put("saved_at", value=5),
    "time that clears the screen": put("saved_at", value="\x1b[2J"),
    "counters a list": put("counters", value=[1]),
    "layout as text": put("layout", value="x"),
    "layout of nothing": put("layout", value={"dp_shard": 0, "shard": ["a"]}),
    "precision a list": put("precision", value=["fp32"]),
    "ranks as text": put("world_size", value={"two": 2}),
}


@pytest.mark.parametrize("change", ODD_FACTS.values(), ids=ODD_FACTS)
def test_odd_facts_are_shown_and_lose_nothing(change: Any, folder: Path) -> None:
    rewritten(folder / name_of(2), change)
    text = listed(json.loads(json.dumps(listing(folder, published(folder)), allow_nan=False)))
    assert "cannot be read" not in text
    assert "\x1b" not in text
    prune(folder, Retention(1, None, best=True), folder / name_of(2))
    assert folder / name_of(2) in published(folder)


def test_a_checkpoint_under_the_name_of_another_step_is_passed_over(folder: Path) -> None:
    (folder / name_of(2)).rename(folder / "aside")
    (folder / name_of(1)).rename(folder / name_of(2))
    (folder / "aside").rename(folder / name_of(1))
    found = verification(folder, published(folder))
    assert [row["problems"][0]["what"] for row in found["checkpoints"]] == [
        "step-00000002 is not the name of step 1",
        "step-00000001 is not the name of step 2",
    ]
    assert found["resume_from"] is None
    assert found["checkpoints"][0]["problems"][0]["hint"] == "name it step-00000001, if it is the right one"


def test_files_swapped_between_checkpoints_of_one_size_are_told(folder: Path) -> None:
    one, two = (next((folder / name_of(step)).glob("*.safetensors")) for step in (1, 2))
    assert one.stat().st_size == two.stat().st_size
    aside = shutil.move(one, folder / "aside")
    two.rename(one)
    Path(aside).rename(two)
    for step in (1, 2):
        assert ["its SHA-256 differs" in problem.what for problem in verify(folder / name_of(step))] == [True]


def written(checkpoint: Path, tensors: dict[str, torch.Tensor], described: dict[str, TensorFacts], offsets: dict[str, tuple[int, ...]]) -> Path:
    """A checkpoint of one file whose manifest and checksums are right, whatever its header says."""
    checkpoint.mkdir()
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    file: File = write_tensors(checkpoint / "a.safetensors", shapes, tensors.values(), offsets)
    (checkpoint / MANIFEST).write_text(Manifest(3, FACTS, described, {"a.safetensors": file}).text())
    return checkpoint


FOUR = TensorFacts("F32", (4, 3))
LIES: dict[str, tuple[torch.Tensor, tuple[int, ...], str]] = {
    "another dtype": (torch.ones(4, 3, dtype=torch.bfloat16), (0, 0), "model.w is F32 in manifest.json and BF16 in a.safetensors"),
    "half of the rows": (torch.ones(2, 3), (0, 0), "model.w has 12 values, 6 are in the checkpoint"),
    "more rows": (torch.ones(5, 3), (0, 0), "does not lie in"),
    "another number of dims": (torch.ones(12), (0,), "does not lie in"),
    "rows elsewhere": (torch.ones(4, 3), (2, 0), "does not lie in"),
    "a place before the first": (torch.ones(4, 3), (-1, 0), "does not lie in"),
}


@pytest.mark.parametrize(("tensor", "offset", "said"), LIES.values(), ids=LIES)
def test_files_that_are_not_what_the_manifest_claims_are_not_loaded(tensor: Any, offset: Any, said: str, tmp_path: Path) -> None:
    checkpoint = written(tmp_path / name_of(3), {WEIGHT: tensor}, {WEIGHT: FOUR}, {WEIGHT: offset})
    assert not verify(checkpoint)
    with pytest.raises(InputError, match=r"model\.w") as told:
        load(checkpoint, {WEIGHT: torch.zeros(4, 3)})
    assert said in str(told.value)
    with pytest.raises(InputError):
        convert(checkpoint, tmp_path / "converted")


@pytest.mark.parametrize("inside", ["step-00000002/x", "step-00000001/x/y"])
def test_nothing_is_written_into_a_checkpoint(inside: str, folder: Path) -> None:
    with pytest.raises(InputError, match="would lie in the checkpoint step-"):
        convert(folder / name_of(2), folder / inside)
    assert not any(verify(folder / name_of(step)) for step in (1, 2))


def test_a_copy_under_the_name_of_another_step_is_not_written(folder: Path) -> None:
    with pytest.raises(InputError, match="step-00000003 is not the name of step 2"):
        convert(folder / name_of(2), folder / name_of(3))
    assert [path.name for path in published(folder)] == [name_of(2), name_of(1)]


def test_what_a_name_says_to_a_terminal_is_shown_and_not_done(folder: Path) -> None:
    (folder / name_of(2) / "\x1b[2J").touch()
    said: list[str] = []
    assert newest(folder, say=said.append) == folder / name_of(1)
    assert "\\x1b[2J is not in manifest.json" in said[0]
    assert "\x1b" not in said[0]


def test_strangers_among_the_checkpoints_keep_none_from_going(folder: Path, tmp_path: Path) -> None:
    """A file or a link under a step's name was renamed and could not be removed: nothing after it ever went, and the disk filled up."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (folder / "step-00000000").touch()
    (folder / "step-00000000.removed").touch()
    (folder / "step-00000000.replaced").symlink_to(tmp_path / "precious")
    (folder / "step-abc").mkdir()
    prune(folder, Retention(1), folder / name_of(2))
    assert sorted(path.name for path in folder.glob("step-*")) == [name_of(2), "step-abc"]
    assert (tmp_path / "precious" / "file").exists()


def test_a_run_that_is_ended_names_the_checkpoint_it_can_go_on_from(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "step-99999999999").mkdir()
    (folder / name_of(9)).symlink_to(folder / name_of(1))
    assert _interrupted(RunFolder(folder.parent), signal.SIGINT) == 130
    assert "ended by SIGINT; --resume goes on from step-00000002" in capsys.readouterr().err
    assert json.loads((folder.parent / "outcome.json").read_text())["outcome"] == "interrupted"


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_save_says_what_it_took(asynchronous: bool, tmp_path: Path) -> None:
    said: list[str] = []
    with Saver(tmp_path, Retention(1), asynchronous=asynchronous, say=said.append) as saver:
        saver.begin(5, state(), FACTS)
        saver.settle(proved=True)
    assert len(said) == 1
    assert re.fullmatch(r"saved step-00000005: [\d.]+ k?B in [\d.]+ m?s, of which steps waited [\d.]+ [mµu]?s", said[0])
    assert 0 < saver.saved[0].blocked_s <= saver.saved[0].total_s
