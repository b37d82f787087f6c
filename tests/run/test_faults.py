"""Runs on disks that fill up or turn read-only, and checkpoints that were harmed: said, survived, and the same weights in the end."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pentamesh.checkpoint.manifest import MANIFEST, File, Manifest, file_facts, name_of, verify
from pentamesh.checkpoint.names import published
from pentamesh.run.asked import read_asked
from pentamesh.run.folder import RunFolder
from pentamesh.run.launch import keep
from pentamesh.run.options import Options
from tests.run import toy
from tests.trials.kills import contents, losses
from tests.trials.worlds import ENDED, running

RANKS, STEPS = 2, 8
Act = Callable[[str, int, int, Path], None]  # phase, which of its kind, rank, run folder


@dataclass(frozen=True)
class Ended:
    """How a run ended: the exit code of each rank, what it said, and its outcome.json."""

    codes: list[int]
    talk: str
    outcome: dict[str, Any]


def at_work(act: Act | None, options: Options, folder: Path, resume: bool) -> int:
    """A rank as its process runs it, with `act` at the beginning of each phase; returns the exit code."""
    from pentamesh.checkpoint.phases import listeners
    from pentamesh.run.worker import work

    heard: Counter[str] = Counter()
    rank, lock = int(os.environ["RANK"]), threading.Lock()

    def listen(phase: str) -> None:
        with lock:
            heard[phase] += 1
            count = heard[phase]
        if act is not None:
            act(phase, count, rank, folder)

    listeners.append(listen)
    return work(lambda: RunFolder(folder), replace(options, resume=resume))


def ended(run: RunFolder, act: Act | None = None, *, resume: bool = False, stop_at: int | None = None) -> Ended:
    run.outcome.unlink(missing_ok=True)
    log = run.path.parent / "log.txt"
    log.write_text("")
    with running(run.path, RANKS, log, resume=resume, how=partial(at_work, act, Options(stop_at=stop_at))) as world:
        for _ in world.listen(120):
            pass
    last = [said[-1] for said in world.heard]
    assert [heard.what for heard in last] == [ENDED] * RANKS, log.read_text()
    return Ended([int(heard.more) for heard in last], log.read_text(), run.read_outcome() or {})


@dataclass(frozen=True)
class Made:
    """A run that was planned and its data prepared; one that came half-way, with two checkpoints; and what an undisturbed one ends with."""

    planned: RunFolder
    halfway: RunFolder
    tensors: dict[str, bytes]
    losses: list[tuple[int, float]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made")
    toy.model_folder(folder / "model", hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    changes: dict[str, Any] = {"checkpoint": {"every": 2, "keep": 2, "export": False}, "training": {"steps": STEPS, "evaluate_every": None}}
    run = keep(read_asked(toy.job(folder, batch={"seq_len": 128, "micro_batch": 1, "global_batch": 2}, **changes)), Options(), even_so=False)
    assert ended(run).codes == [0] * RANKS
    found = Made(run, RunFolder(folder / "halfway/run"), contents(run.checkpoints / name_of(STEPS)), losses(run))
    shutil.rmtree(run.checkpoints)
    run.metrics.unlink()
    shutil.copytree(run.path, found.halfway.path)
    assert ended(found.halfway, stop_at=4).codes == [0] * RANKS
    assert [path.name for path in published(found.halfway.checkpoints)] == [name_of(4), name_of(2)]
    return found


def copied(run: RunFolder, folder: Path) -> RunFolder:
    found = RunFolder(folder / "run")
    shutil.copytree(run.path, found.path, ignore=shutil.ignore_patterns("run.lock"))
    return found


def as_undisturbed(run: RunFolder, made: Made) -> None:
    found = contents(run.checkpoints / name_of(STEPS))
    assert found.keys() == made.tensors.keys()
    assert [name for name in found if found[name] != made.tensors[name]] == []
    assert losses(run) == made.losses
    assert not [*run.checkpoints.glob("*.partial"), *run.checkpoints.glob("*.removed")]


# What happens to the newest checkpoint while nobody looks, and what is said of it.


def shard(checkpoint: Path) -> Path:
    return sorted(checkpoint.glob("*.safetensors"))[-1]


def flip(checkpoint: Path) -> str:
    content = bytearray(shard(checkpoint).read_bytes())
    content[-3] ^= 1
    shard(checkpoint).write_bytes(content)
    return f"{shard(checkpoint).name} is not as it was written: its SHA-256 differs"


def truncate(checkpoint: Path) -> str:
    size = shard(checkpoint).stat().st_size
    os.truncate(shard(checkpoint), size - 1)
    return f"{shard(checkpoint).name} has {size - 1:,} bytes, {size:,} were written"


def remove(checkpoint: Path) -> str:
    path = shard(checkpoint)
    path.unlink()
    return f"{path.name} is missing"


def empty_manifest(checkpoint: Path) -> str:
    os.truncate(checkpoint / MANIFEST, 0)
    return "manifest.json is not a checkpoint's manifest"


class Opened:
    """Unpickled, it writes a file beside the run."""

    def __init__(self, told: Path) -> None:
        self.told = told

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.told, "a pickle was opened")


def plant_pickle(checkpoint: Path) -> str:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Opened(checkpoint.parents[2] / "opened")))
    return ".metadata is a pickle and not part of the checkpoint"


def link_shard(checkpoint: Path) -> str:
    path, elsewhere = shard(checkpoint), checkpoint.parents[2] / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    return f"{path.name} is a link or a folder"


def link_folder(checkpoint: Path) -> str:
    elsewhere = checkpoint.parents[2] / "elsewhere"
    checkpoint.rename(elsewhere)
    checkpoint.symlink_to(elsewhere)
    return f"{checkpoint.name} is not a checkpoint folder"


@pytest.mark.parametrize("harm", [flip, truncate, remove, empty_manifest, plant_pickle, link_shard, link_folder], ids=lambda harm: harm.__name__)
def test_a_newest_checkpoint_that_was_harmed_is_named_and_the_run_goes_on_from_the_one_before(
    harm: Callable[[Path], str], made: Made, tmp_path: Path
) -> None:
    run = copied(made.halfway, tmp_path)
    said = harm(run.checkpoints / name_of(4))
    elsewhere = tmp_path / "elsewhere"
    before = sorted(path.read_bytes() for path in (elsewhere.iterdir() if elsewhere.is_dir() else [elsewhere])) if elsewhere.exists() else []
    found = ended(run, resume=True)
    assert found.codes == [0] * RANKS, found.talk
    assert "passing over checkpoint step-00000004, which cannot be used" in found.talk
    assert said in found.talk
    assert "resumed from step-00000002: step 2" in found.talk
    as_undisturbed(run, made)
    assert all(verify(path) == [] for path in published(run.checkpoints))
    assert not (tmp_path / "opened").exists()
    # What a link led to is neither read nor removed.
    assert before == (sorted(path.read_bytes() for path in (elsewhere.iterdir() if elsewhere.is_dir() else [elsewhere])) if before else [])


def test_where_every_checkpoint_was_harmed_the_run_ends_and_nothing_is_overwritten(made: Made, tmp_path: Path) -> None:
    run = copied(made.halfway, tmp_path)
    said = [empty_manifest(run.checkpoints / name_of(4)), flip(run.checkpoints / name_of(2))]
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    found = ended(run, resume=True)
    assert found.codes == [2] * RANKS
    assert found.outcome["problems"][0]["what"] == "none of the 2 checkpoints is as it was written"
    assert all(each in found.talk for each in said)
    run.outcome.unlink()
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == {p: b for p, b in before.items() if p != run.outcome}


def test_a_pickle_that_a_manifest_vouches_for_is_not_opened(made: Made, tmp_path: Path) -> None:
    """Whoever can write a checkpoint can write its checksums, too."""
    run = copied(made.halfway, tmp_path)
    checkpoint = run.checkpoints / name_of(4)
    path = shard(checkpoint)
    path.write_bytes(pickle.dumps(Opened(tmp_path / "opened")))
    manifest = Manifest.read(checkpoint)
    facts: dict[str, File] = {**manifest.files, path.name: file_facts(path)}
    (checkpoint / MANIFEST).write_text(replace(manifest, files=facts).text())
    assert verify(checkpoint) == []
    found = ended(run, resume=True)
    assert found.codes == [2] * RANKS
    assert found.outcome["problems"][0]["what"].startswith(f"{path.name} is not a whole safetensors file")
    assert not (tmp_path / "opened").exists()
    assert len(published(run.checkpoints)) == 2


# Disks that fill up while the run is at work. The real thing is a small file system of its own, which only root may mount.


@contextmanager
def mounted(folder: Path, size: str = "8m") -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "pentamesh-test", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs root, to mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leave no byte free."""
    with (folder / "filler").open("ab", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def full_from(phase: str, nth: int, until: int | None, said: str, count: int, rank: int, folder: Path) -> None:
    """The disk is full from the nth `phase` of rank 0 on, until a later flush, of which there is one a save."""
    if rank == 0 and (said, count) == (phase, nth):
        fill(folder / "checkpoints")
    if rank == 0 and (said, count) == ("flush", until):
        (folder / "checkpoints/filler").unlink()


FULL = [("flush", "the checkpoint could not be written"), ("publish", "publishing the checkpoint failed")]


@pytest.mark.parametrize(("phase", "what"), FULL)
def test_a_save_that_meets_a_full_disk_is_said_and_the_next_one_is_made(phase: str, what: str, made: Made, tmp_path: Path) -> None:
    run = copied(made.planned, tmp_path)
    with mounted(run.checkpoints):
        found = ended(run, partial(full_from, phase, 2, 3))
        assert found.codes == [0] * RANKS, found.talk
        assert found.talk.count("the checkpoint of step 4 could not be saved") == 1
        assert what in found.talk
        assert "No space left on device" in found.talk
        assert [path.name for path in published(run.checkpoints)] == [name_of(8), name_of(6)]
        as_undisturbed(run, made)


@pytest.mark.parametrize(("nth", "left", "resumed"), [(1, [], "nothing to resume from"), (4, [6, 4], "resumed from step-00000006")])
def test_the_third_failure_in_a_row_and_that_of_the_last_save_end_the_run(
    nth: int, left: list[int], resumed: str, made: Made, tmp_path: Path
) -> None:
    """Full from the first save on, and full at the last one."""
    run = copied(made.planned, tmp_path)
    with mounted(run.checkpoints):
        found = ended(run, partial(full_from, "flush", nth, None))
        assert found.codes == [5] * RANKS, found.talk
        assert "No space left on device" in found.talk
        assert found.outcome["exit_code"] == 5
        assert len(losses(run)) == STEPS
        assert [path.name for path in published(run.checkpoints)] == [name_of(step) for step in left]
        assert all(verify(path) == [] for path in published(run.checkpoints))
        (run.checkpoints / "filler").unlink()
        found = ended(run, resume=True)
        assert found.codes == [0] * RANKS, found.talk
        assert resumed in found.talk
        as_undisturbed(run, made)


def nowhere_to_write_metrics(said: str, count: int, rank: int, folder: Path) -> None:
    """From step 5 on, metrics.jsonl lies on a disk that is always full."""
    if rank == 0 and (said, count) == ("train", 5):
        RunFolder(folder).metrics.rename(folder / "metrics so far")
        RunFolder(folder).metrics.symlink_to("/dev/full")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_is_full_when_metrics_are_written(made: Made, tmp_path: Path) -> None:
    """The run ends and says so; with room it goes on, and every step has its line once."""
    run = copied(made.planned, tmp_path)
    found = ended(run, nowhere_to_write_metrics)
    assert found.codes == [5] * RANKS, found.talk
    assert found.outcome["problems"][0]["what"] == "metrics.jsonl cannot be written: No space left on device"
    run.metrics.unlink()
    (run.path / "metrics so far").rename(run.metrics)
    found = ended(run, resume=True)
    assert found.codes == [0] * RANKS, found.talk
    assert re.search("resumed from step-0000000[24]: ", found.talk)  # a save may have been on its way
    as_undisturbed(run, made)


def occupied(said: str, count: int, rank: int, folder: Path) -> None:
    """Rank 1 finds a folder where its shard of the second save should be."""
    if rank == 1 and (said, count) == ("flush", 2):
        (folder / "checkpoints" / f"{name_of(4)}.partial" / shard(folder / "checkpoints" / name_of(2)).name).mkdir()


def test_a_rank_that_cannot_write_its_shard(made: Made, tmp_path: Path) -> None:
    run = copied(made.planned, tmp_path)
    found = ended(run, occupied)
    assert found.codes == [0] * RANKS, found.talk
    assert found.talk.count("the checkpoint of step 4 could not be saved") == 1
    assert "Is a directory" in found.talk
    assert "rank 1" in found.talk
    as_undisturbed(run, made)


ROOT = os.geteuid() == 0
REFUSED = "Read-only file system" if ROOT else "Permission denied"


@contextmanager
def one_that_can_be_locked(folder: Path) -> Iterator[None]:
    """What `lock` can make read-only: permissions do not bind root, for whom it is a file system of its own."""
    if ROOT:
        with mounted(folder):
            yield
    else:
        folder.mkdir()
        yield


def lock(folder: Path, *, again: bool = False) -> None:
    """Make the folder read-only, or let it be written `again`."""
    if ROOT:
        subprocess.run(["mount", "-o", f"remount,{'rw' if again else 'ro'}", str(folder)], check=True)
    else:
        folder.chmod(0o755 if again else 0o555)


def locked(said: str, count: int, rank: int, folder: Path) -> None:
    if rank == 0 and (said, count) == ("flush", 2):
        lock(folder / "checkpoints")


def test_a_folder_that_is_read_only_is_refused_before_the_first_step(made: Made, tmp_path: Path) -> None:
    run = copied(made.planned, tmp_path)
    with one_that_can_be_locked(run.checkpoints):
        lock(run.checkpoints)
        found = ended(run)
        assert found.codes == [2] * RANKS
        assert found.outcome["problems"][0]["what"] == f"the folder cannot be written: {REFUSED}"
        assert not run.metrics.exists()


def test_a_folder_that_turns_read_only(made: Made, tmp_path: Path) -> None:
    run = copied(made.planned, tmp_path)
    with one_that_can_be_locked(run.checkpoints):
        found = ended(run, locked)
        assert found.codes == [5] * RANKS, found.talk
        assert REFUSED in found.talk
        assert [path.name for path in published(run.checkpoints)] == [name_of(2)]
        lock(run.checkpoints, again=True)
        found = ended(run, resume=True)
        assert "resumed from step-00000002" in found.talk
        as_undisturbed(run, made)


def test_what_a_pointer_says_does_not_lead_out_of_the_folder(made: Made, tmp_path: Path) -> None:
    from pentamesh.checkpoint.names import LATEST, latest

    run = copied(made.halfway, tmp_path)
    shutil.copytree(run.checkpoints / name_of(4), tmp_path / name_of(9))
    pointer = json.loads((run.checkpoints / LATEST).read_text())
    (run.checkpoints / LATEST).write_text(json.dumps(pointer | {"folder": f"../../{name_of(9)}", "step": 9}))
    assert latest(run.checkpoints) == run.checkpoints / name_of(9)
    found = ended(run, resume=True)
    assert "resumed from step-00000004: step 4" in found.talk
    as_undisturbed(run, made)
