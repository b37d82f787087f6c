"""What is saved comes back bit for bit, on any number of ranks; what was touched is refused on all of them."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from pentamesh.checkpoint import disk, headers, shards
from pentamesh.checkpoint import save as saving
from pentamesh.checkpoint.headers import read_header
from pentamesh.checkpoint.keep import Retention, agreed, newest, prune
from pentamesh.checkpoint.load import load
from pentamesh.checkpoint.manifest import MANIFEST, Manifest, verify
from pentamesh.checkpoint.names import latest, published
from pentamesh.checkpoint.save import save
from pentamesh.errors import InputError, PentameshError, RunFailed
from pentamesh.run.worlds import run_world

FACTS = {"counters": {"consumed": 400, "trained_tokens": 12345}, "param_groups": [{"lr": 0.1 + 0.2, "betas": (0.9, 0.95)}], "plan": "abc"}
# Every dtype of a weight or state, and shapes that no number of ranks divides: 1 and 7 rows, none, and no dim at all.
PLAIN = {
    "optimizer.w.step": torch.tensor(7.0),
    "count": torch.tensor([2**40, -1]),
    "bytes": torch.arange(11, dtype=torch.uint8),
    "none": torch.zeros(0, 3),
}
CUT = {"model.seven": (7,), "model.one": (1, 5), "model.wide": (6, 10), "model.deep": (3, 4, 2)}
CUT_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f64": torch.float64}


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def state(degrees: tuple[int, ...], placements: tuple[Any, ...], *, filled: bool, seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors cut over a mesh, tensors that all ranks share, and one that each has for itself."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = {name: tensor.clone() for name, tensor in PLAIN.items()}
    found[f"rng.{rank}"] = torch.full((16,), rank, dtype=torch.uint8)
    for name, shape in CUT.items():
        for suffix, dtype in CUT_DTYPES.items():
            whole = values(shape, dtype, seed)
            found[f"{name}.{suffix}"] = distribute_tensor(whole, init_device_mesh("cpu", degrees), placements) if placements else whole
    return found if filled else {name: torch.full_like(tensor, 99) for name, tensor in found.items()}


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names whose local bits differ."""

    def bits(tensor: torch.Tensor) -> bytes:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.contiguous().flatten().view(torch.uint8).numpy().tobytes()

    assert found.keys() == expected.keys()
    return [name for name in expected if bits(found[name]) != bits(expected[name])]


Placed = tuple[tuple[int, ...], tuple[Any, ...]]
LAYOUTS: dict[str, Placed] = {
    "full 4": ((4,), (Shard(0),)),
    "full 2": ((2,), (Shard(0),)),
    "hybrid 2 x 2": ((2, 2), (Replicate(), Shard(0))),
    "columns 2 x rows 2": ((2, 2), (Shard(0), Shard(1))),
    "ddp 2": ((2,), ()),
    "one": ((1,), ()),
}
TWO_DIMS = {"model.one", "model.wide", "model.deep"}


def laid_out(layout: str, *, filled: bool, seed: int = 0) -> dict[str, torch.Tensor]:
    degrees, placements = LAYOUTS[layout]
    found = state(degrees, placements if Shard(1) not in placements else (), filled=filled, seed=seed)
    if Shard(1) in placements:
        mesh = init_device_mesh("cpu", degrees)
        for name in [n for n in found if n.rpartition(".")[0] in TWO_DIMS]:
            found[name] = distribute_tensor(found[name], mesh, placements)
    return found


def save_rank(folder: Path, layout: str, step: int, seed: int = 0) -> str:
    return str(save(folder, step, laid_out(layout, filled=True, seed=seed), FACTS))


def load_rank(checkpoint: Path, layout: str, seed: int = 0) -> tuple[list[str], dict[str, Any], int]:
    found = laid_out(layout, filled=False)
    facts = load(checkpoint, found)
    return differing(found, laid_out(layout, filled=True, seed=seed)), facts, len(found)


def num_ranks(layout: str) -> int:
    return int(torch.Size(LAYOUTS[layout][0]).numel())


def alone(folder: Path, step: int, seed: int = 0) -> Path:
    return save(folder, step, state((1,), (), filled=True, seed=seed), FACTS)


def test_one_process_without_a_group(tmp_path: Path) -> None:
    checkpoint = alone(tmp_path, 50)
    assert checkpoint == tmp_path / "step-00000050"
    found = state((1,), (), filled=False)
    facts = load(checkpoint, found)
    assert differing(found, state((1,), (), filled=True)) == []
    assert facts == {"step": 50, "world_size": 1, **FACTS, "param_groups": [{"lr": 0.1 + 0.2, "betas": [0.9, 0.95]}]}
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000050", "latest.json"}
    assert latest(tmp_path) == checkpoint


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_same_layout_round_trip_is_bitwise(tmp_path: Path, layout: str) -> None:
    run_world(save_rank, num_ranks(layout), tmp_path, layout, 3)
    for rank, (wrong, facts, count) in enumerate(run_world(load_rank, num_ranks(layout), tmp_path / "step-00000003", layout)):
        assert (rank, wrong, facts["world_size"]) == (rank, [], num_ranks(layout))
        assert count == len(CUT) * len(CUT_DTYPES) + len(PLAIN) + 1


@pytest.mark.parametrize(
    ("saved", "loaded"), [("full 4", "full 2"), ("hybrid 2 x 2", "one"), ("full 4", "columns 2 x rows 2"), ("columns 2 x rows 2", "ddp 2")]
)
def test_another_layout_reads_the_same_bits(tmp_path: Path, saved: str, loaded: str) -> None:
    run_world(save_rank, num_ranks(saved), tmp_path, saved, 3)
    answers = run_world(load_rank, num_ranks(loaded), tmp_path / "step-00000003", loaded)
    assert [wrong for wrong, _, _ in answers] == [[]] * num_ranks(loaded)


def test_what_all_ranks_share_is_written_once(tmp_path: Path) -> None:
    run_world(save_rank, 4, tmp_path, "hybrid 2 x 2", 3)
    checkpoint = tmp_path / "step-00000003"
    entries = [(name, entry) for file in Manifest.read(checkpoint).files for name, entry in read_header(checkpoint / file).entries.items()]
    expected = {**PLAIN, "model.seven.f32": values((7,), torch.float32), "model.wide.bf16": values((6, 10), torch.bfloat16)}
    for name, tensor in expected.items():
        assert sum(entry.end - entry.begin for found, entry in entries if found == name) == tensor.nbytes, name
    assert sum(name.startswith("rng.") for name, _ in entries) == 4


def test_files_stay_below_their_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "FILE_BYTES", 300)
    checkpoint = alone(tmp_path, 1)
    files = Manifest.read(checkpoint).files
    largest = max(tensor.nbytes for tensor in state((1,), (), filled=True).values())
    assert len(files) > 3
    for name in files:
        held = sum(e.end - e.begin for e in read_header(checkpoint / name).entries.values())
        assert held <= max(300, largest)
    found = state((1,), (), filled=False)
    load(checkpoint, found)
    assert differing(found, state((1,), (), filled=True)) == []


def test_names_shapes_and_dtypes_that_differ_are_all_listed(tmp_path: Path) -> None:
    checkpoint = alone(tmp_path, 1)
    found = state((1,), (), filled=False)
    found["model.seven.f32"] = torch.zeros(8)
    found["model.one.bf16"] = torch.zeros(1, 5)
    found["model.eleven.f32"] = torch.zeros(2)
    del found["count"]
    with pytest.raises(InputError) as error:
        load(checkpoint, found)
    said = str(error.value)
    assert "model.seven.f32 is F32 [7] in the checkpoint and F32 [8] in the run" in said
    assert "model.one.bf16 is BF16 [1, 5] in the checkpoint and F32 [1, 5] in the run" in said
    assert "model.eleven.f32 is not in the checkpoint" in said
    assert "count I64 [2] is in the checkpoint and not in the run" in said


def test_facts_that_json_lacks_are_refused_before_any_byte(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="not JSON compliant"):
        save(tmp_path, 1, {"a": torch.ones(1)}, {"lr": float("nan")})
    with pytest.raises(RunFailed, match="files of the facts are the manifest's own keys"):
        save(tmp_path, 1, {"a": torch.ones(1)}, {"files": 3})
    assert list(tmp_path.iterdir()) == []


def uneven_rank(folder: Path) -> None:
    save(folder, 1, {"moment": torch.zeros(2 + dist.get_rank())}, {})


def test_a_cut_tensor_that_is_not_a_dtensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"moment is F32 \[2\] on an earlier rank and F32 \[3\] on rank 1"):
        run_world(uneven_rank, 2, tmp_path)


# What a stranger, a full disk or a bad one do to a folder, and what is said.


def flip(checkpoint: Path) -> None:
    path = sorted(checkpoint.glob("*.safetensors"))[-1]
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def truncate(checkpoint: Path) -> None:
    path = sorted(checkpoint.glob("*.safetensors"))[0]
    os.truncate(path, path.stat().st_size - 5)


def remove(checkpoint: Path) -> None:
    sorted(checkpoint.glob("*.safetensors"))[0].unlink()


def plant_metadata(checkpoint: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps({"planted": True}))


def plant_pickle(checkpoint: Path) -> None:
    (checkpoint / "optimizer.pt").write_bytes(pickle.dumps([1]))


def plant_shard(checkpoint: Path) -> None:
    (checkpoint / "shard-00009-model-00001-of-00001.safetensors").write_bytes(sorted(checkpoint.glob("*.safetensors"))[0].read_bytes())


def link_out(checkpoint: Path) -> None:
    path = sorted(checkpoint.glob("*.safetensors"))[0]
    path.rename(checkpoint.parent / "elsewhere")
    path.symlink_to(checkpoint.parent / "elsewhere")


def name_outside(checkpoint: Path) -> None:
    found = Manifest.read(checkpoint)
    name, facts = next(iter(found.files.items()))
    (checkpoint / name).rename(checkpoint.parent / "elsewhere")
    files = {**{n: f for n, f in found.files.items() if n != name}, "../elsewhere": facts}
    (checkpoint / MANIFEST).write_text(Manifest(found.step, found.facts, found.tensors, files).text())


def edit_manifest(checkpoint: Path) -> None:
    path = checkpoint / MANIFEST
    path.write_text(path.read_text().replace('"consumed": 400', '"consumed": 401'))


def cut_manifest(checkpoint: Path) -> None:
    os.truncate(checkpoint / MANIFEST, 100)


def drop_manifest(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink()


def other_version(checkpoint: Path) -> None:
    path = checkpoint / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2}))


HARM: list[tuple[Callable[[Path], None], str]] = [
    (flip, "is not as it was written: its SHA-256 differs"),
    (truncate, "were written"),
    (remove, "is missing"),
    (plant_metadata, ".metadata is a pickle and not part of the checkpoint"),
    (plant_pickle, "optimizer.pt is a pickle and not part of the checkpoint"),
    (plant_shard, "shard-00009-model-00001-of-00001.safetensors is not in manifest.json"),
    (link_out, "is a link or a folder"),
    (name_outside, "../elsewhere in manifest.json is not the plain name of a file"),
    (edit_manifest, "manifest.json is not as it was written"),
    (cut_manifest, "manifest.json is not a checkpoint's manifest"),
    (drop_manifest, "this is no finished checkpoint"),
    (other_version, "version 2, not pentamesh.checkpoint version 1"),
]


@pytest.mark.parametrize(("harm", "said"), HARM, ids=[harm.__name__ for harm, _ in HARM])
def test_harm_is_named_and_the_one_before_is_used(tmp_path: Path, harm: Callable[[Path], None], said: str) -> None:
    older, newer = alone(tmp_path, 1), alone(tmp_path, 2, seed=1)
    assert newest(tmp_path) == newer
    harm(newer)
    with pytest.raises(InputError) as error:
        load(newer, state((1,), (), filled=False))
    assert said in str(error.value)
    heard: list[str] = []
    assert newest(tmp_path, say=heard.append) == older
    assert len(heard) == 1
    assert "passing over checkpoint step-00000002" in heard[0]
    assert said in heard[0]
    harm(older) if harm not in (link_out, name_outside) else remove(older)
    assert newest(tmp_path, say=heard.append) is None


def verify_rank(folder: Path) -> tuple[str | None, list[str], str]:
    heard: list[str] = []
    found = agreed(folder, say=heard.append)
    try:
        load(folder / "step-00000002", laid_out("full 4", filled=False))
    except InputError as error:
        return found.name if found else None, heard, str(error)
    return found.name if found else None, heard, ""


def test_a_flipped_byte_fails_on_every_rank_though_one_reads_it(tmp_path: Path) -> None:
    for step in (1, 2):
        run_world(save_rank, 4, tmp_path, "full 4", step)
    flip(tmp_path / "step-00000002")
    answers = run_world(verify_rank, 4, tmp_path)
    assert [name for name, _, _ in answers] == ["step-00000001"] * 4
    assert [len(heard) for _, heard, _ in answers] == [1, 0, 0, 0]
    assert all("shard-00004-model-00001-of-00001.safetensors is not as it was written" in said for _, _, said in answers)


def one_rank_fails(folder: Path, place: str) -> tuple[str, list[str]]:
    """Save while rank 2 of 4 has a full disk at `place`."""

    def full(*_args: object, **_more: object) -> None:
        raise OSError(28, "No space left on device", str(folder))

    if place == "write" and dist.get_rank() == 2:
        shards.write_tensors = full
    elif place == "sync" and dist.get_rank() == 2:
        headers.settle = full
    elif place == "publish" and dist.get_rank() == 0:
        saving.publish = full
    elif place == "prepare" and dist.get_rank() == 0:
        saving.discard = full
    try:
        save(folder, 2, laid_out("full 4", filled=True), FACTS)
    except PentameshError as error:
        dist.barrier()
        return str(error), sorted(path.name for path in folder.iterdir())
    return "saved", []


@pytest.mark.parametrize("place", ["prepare", "write", "sync", "publish"])
def test_a_full_disk_on_one_rank_fails_on_all_and_leaves_what_was_there(tmp_path: Path, place: str) -> None:
    run_world(save_rank, 4, tmp_path, "full 4", 1)
    answers = run_world(one_rank_fails, 4, tmp_path, place, timeout_s=60)
    rank = 0 if place in ("prepare", "publish") else 2
    for said, left in answers:
        assert "No space left on device" in said
        assert f"rank {rank}" in said
        assert left == ["latest.json", "step-00000001"]
    assert newest(tmp_path) == latest(tmp_path) == tmp_path / "step-00000001"


class LostError(Exception):
    """As libraries of object stores raise: it holds what cannot be pickled, or is made of more than its words."""

    def __init__(self, words: str, _more: object) -> None:
        super().__init__(words)


def loses_its_connection(checkpoint: Path) -> tuple[str, str]:
    """What is said where rank 1 of 2 fails by an error of a library, in writing and in reading."""

    def lost(*_args: object, **_more: object) -> None:
        raise LostError("the connection was reset", None)

    if dist.get_rank() == 1:
        shards.write_tensors = shards.read_box = lost
    said = []
    for act in (save_rank, load_rank):
        try:
            act(checkpoint.parent if act is save_rank else checkpoint, "full 2", 2)
        except RunFailed as error:
            said.append(str(error))
    dist.barrier()
    return said[0], said[1]


def test_an_error_that_cannot_be_pickled_is_said_on_all_ranks(tmp_path: Path) -> None:
    run_world(save_rank, 2, tmp_path, "full 2", 1)
    for written, read in run_world(loses_its_connection, 2, tmp_path / "step-00000001", timeout_s=60):
        assert "the checkpoint could not be written: LostError: the connection was reset\n  where  rank 1" in written
        assert "the checkpoint could not be read: LostError: the connection was reset\n  where  rank 1" in read


def dies(folder: Path, place: str) -> None:
    """Save, with rank 1 killed at `place`."""

    def end(*_args: object, **_more: object) -> None:
        os._exit(9)

    if dist.get_rank() == (1 if place == "settle" else 0):
        setattr(headers if place == "settle" else saving, place, end)
    save(folder, 2, laid_out("full 2", filled=True), FACTS)


@pytest.mark.parametrize("place", ["settle", "write_text", "publish"])
def test_a_rank_that_dies_in_a_save_leaves_no_checkpoint_and_the_next_save_cleans_up(tmp_path: Path, place: str) -> None:
    run_world(save_rank, 2, tmp_path, "full 2", 1)
    with pytest.raises(RunFailed):
        run_world(dies, 2, tmp_path, place, timeout_s=60)
    assert newest(tmp_path) == tmp_path / "step-00000001"
    run_world(save_rank, 2, tmp_path, "full 2", 2)
    assert newest(tmp_path) == tmp_path / "step-00000002"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "step-00000001", "step-00000002"]


def test_saving_a_step_again_replaces_it_and_one_is_there_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone(tmp_path, 1)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        real = Path.rename
        patch.setattr(Path, "rename", lambda path, to: killed() if path.name.endswith(".partial") else real(path, to))
        with pytest.raises(KeyboardInterrupt):
            alone(tmp_path, 1, seed=5)
    aside = tmp_path / "step-00000001.replaced"
    assert newest(tmp_path) == aside
    found = state((1,), (), filled=False)
    load(aside, found)
    assert differing(found, state((1,), (), filled=True)) == []
    again = alone(tmp_path, 1, seed=5)
    assert newest(tmp_path) == again
    load(again, found)
    assert differing(found, state((1,), (), filled=True, seed=5)) == []
    prune(tmp_path, Retention(1), again)
    assert published(tmp_path) == [again]


def test_room_is_checked_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "new/folder").mkdir(parents=True)
    (tmp_path / "new/folder/.trial").write_text("of a process that was killed")
    disk.check_room(tmp_path / "new" / "folder", 10)
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    with pytest.raises(InputError, match=r"not enough disk: .*PB are needed"):
        disk.check_room(tmp_path, 10**18)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="the folder cannot be written: Not a directory"):
        disk.check_room(tmp_path / "file" / "below", 10)

    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "settle", full)
    with pytest.raises(InputError, match="cannot be written: No space left"):
        disk.check_room(tmp_path, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "new"]


def unshared_rank(folder: Path) -> str:
    """Save where rank 1 writes to a disk that the first does not see."""
    real = saving._write

    def elsewhere(partial: Path, *more: Any) -> dict[str, Any]:
        files = real(partial, *more)
        for name in files if dist.get_rank() == 1 else ():
            (partial / name).unlink()
        return files

    saving._write = elsewhere
    try:
        return str(save(folder, 1, laid_out("full 2", filled=True), FACTS))
    except RunFailed as error:
        dist.barrier()
        return str(error)


def test_a_folder_that_hosts_do_not_share_is_refused(tmp_path: Path) -> None:
    for said in run_world(unshared_rank, 2, tmp_path):
        assert "the first rank does not see the files that all ranks wrote: shard-00002-model-00001-of-00001.safetensors" in said
        assert "must be one that all hosts share" in said
    assert list(tmp_path.iterdir()) == []


def test_every_file_of_a_checkpoint_is_on_disk_whole_before_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, int]] = []
    real = os.fsync

    def watched(handle: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{handle}")).name, os.fstat(handle).st_size))
        real(handle)

    monkeypatch.setattr(os, "fsync", watched)
    checkpoint = alone(tmp_path, 1)
    ((shard, facts),) = Manifest.read(checkpoint).files.items()
    manifest = ("manifest.json.partial", (checkpoint / MANIFEST).stat().st_size)
    folders = [i for i, (name, _) in enumerate(synced) if name in ("step-00000001.partial", tmp_path.name)]
    assert synced.index((shard, facts.bytes)) < synced.index(manifest) < folders[0] < folders[-1]
    assert synced[folders[-1]][0] == tmp_path.name
    assert verify(checkpoint) == []


def test_what_is_published_is_saved_although_the_pointers_to_it_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone(tmp_path, 1)

    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "point", full)
    assert newest(tmp_path) == tmp_path / "step-00000001"
    assert alone(tmp_path, 2) == newest(tmp_path) == tmp_path / "step-00000002"
    assert latest(tmp_path) == tmp_path / "step-00000001"
