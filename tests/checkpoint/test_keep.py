"""Which checkpoints stay: the newest, those for good and the best, never without one that is whole; and what the pointers name."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pentamesh.checkpoint import disk
from pentamesh.checkpoint import keep as keeping
from pentamesh.checkpoint import manifest as checking
from pentamesh.checkpoint.keep import Retention, best, newest, prune
from pentamesh.checkpoint.manifest import Manifest, name_of
from pentamesh.checkpoint.names import BEST, LATEST, best_first, latest, left, point, published, step_of
from pentamesh.checkpoint.save import save
from pentamesh.errors import InputError
from pentamesh.job.job import Checkpoint

QUIET = lambda _: None  # noqa: E731


def saved(folder: Path, step: int, loss: Any = "none") -> Path:
    """A checkpoint of a few bytes, with a held-out loss where one is given."""
    return save(folder, step, {"model.w": torch.full((4,), float(step))}, {} if loss == "none" else {"held_out_loss": loss})


def flip(checkpoint: Path) -> None:
    path = sorted(checkpoint.glob("*.safetensors"))[0]
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def steps(folder: Path) -> list[int]:
    return [step_of(path) for path in published(folder)][::-1]


def pointed(folder: Path) -> tuple[int | None, int | None]:
    """The steps that latest.json and best.json name."""
    found = [json.loads((folder / name).read_text()) if (folder / name).exists() else None for name in (LATEST, BEST)]
    assert all(facts is None or facts["folder"] == name_of(facts["step"]) for facts in found)
    return found[0] and found[0]["step"], found[1] and found[1]["step"]


# Losses by step in the order of saving; what is kept; the steps that are left at the end, where each save is followed by a prune.
Losses = dict[int, Any]
RUNS: list[tuple[str, Losses, Retention, list[int], int | None]] = [
    ("the newest", dict.fromkeys(range(1, 7), "none"), Retention(2), [5, 6], None),
    ("one", dict.fromkeys(range(1, 7), "none"), Retention(1), [6], None),
    ("more than there are", {1: "none", 2: "none"}, Retention(9), [1, 2], None),
    ("every third for good", dict.fromkeys(range(1, 8), "none"), Retention(1, every=3), [3, 6, 7], None),
    ("the best beside the newest", {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.5}, Retention(1, best=True), [2, 4], 2),
    ("the best among the newest", {1: 3.0, 2: 2.0, 3: 1.5}, Retention(2, best=True), [2, 3], 3),
    ("the earlier of two that are as good", {1: 3.0, 2: 1.0, 3: 1.0, 4: 2.0}, Retention(1, best=True), [2, 4], 2),
    ("none that is not a number is the best", {1: None, 2: 2.0, 3: None, 4: True, 5: "0.1"}, Retention(1, best=True), [2, 5], 2),
    ("below zero is better", {1: -1.0, 2: 0, 3: 1.0}, Retention(1, best=True), [1, 3], 1),
    ("all of them", {2: 9.0, 4: 1.0, 6: 2.0, 8: 3.0, 10: 4.0, 12: 5.0}, Retention(2, every=6, best=True), [4, 6, 10, 12], 4),
    ("the best is not kept unasked", {1: 1.0, 2: 3.0, 3: 2.0}, Retention(2), [2, 3], 3),
    ("evaluated now and then", {1: 1.0, 2: "none", 3: 2.0, 4: "none"}, Retention(1, best=True), [1, 4], 1),
]


@pytest.mark.parametrize(("losses", "retention", "left_over", "is_best"), [run[1:] for run in RUNS], ids=[run[0] for run in RUNS])
def test_what_a_run_leaves(tmp_path: Path, losses: Losses, retention: Retention, left_over: list[int], is_best: int | None) -> None:
    most = 0
    for step, loss in losses.items():
        good = saved(tmp_path, step, loss)
        most = max(most, len(published(tmp_path)))
        prune(tmp_path, retention, good)
    assert steps(tmp_path) == left_over
    assert pointed(tmp_path) == (max(losses), is_best)
    every = min(losses)
    assert most <= retention.most(max(losses), every)


@pytest.mark.parametrize(
    ("retention", "last", "every", "most"),
    [
        (Retention(2), 100, None, 1),
        (Retention(2), 100, 10, 3),
        (Retention(2), 20, 10, 2),
        (Retention(1, every=50), 100, 10, 4),
        (Retention(1, every=50), 101, 10, 4),
        (Retention(1, every=50, best=True), 1000, 10, 23),
        (Retention(2, best=True), 10**15, 1, 4),
        (Retention(5, every=10), 100, 10, 10),
        (Retention(1, every=100), 100, None, 1),
    ],
)
def test_room_is_asked_for_what_stays_and_the_one_being_written(retention: Retention, last: int, every: int | None, most: int) -> None:
    assert retention.most(last, every) == most


def test_a_job_says_what_stays() -> None:
    assert Retention.of(Checkpoint()) == Retention(2)
    assert Retention.of(Checkpoint(keep=3, every=5, keep_every=10, keep_best=True)) == Retention(3, 10, best=True)


def test_what_dead_runs_left_goes(tmp_path: Path) -> None:
    paths = [saved(tmp_path, step) for step in (1, 2, 3, 10)]
    for name in ("step-00000004.partial", "step-00000011.partial", "step-00000001.removed"):
        (tmp_path / name).mkdir()
    assert [(step, kind) for _, step, kind in left(tmp_path)] == [(1, "removed"), (4, "partial"), (11, "partial")]
    assert prune(tmp_path, Retention(2), paths[3]) == [paths[1], paths[0]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "step-00000003", "step-00000010", "step-00000011.partial"]


def test_the_only_good_one_stays(tmp_path: Path) -> None:
    paths = [saved(tmp_path, step) for step in (1, 2, 3, 4)]
    for path in paths[2:]:
        flip(path)
    assert prune(tmp_path, Retention(2)) == [paths[0]]
    assert newest(tmp_path, say=QUIET) == paths[1]
    flip(paths[1])
    assert prune(tmp_path, Retention(1)) == []
    assert steps(tmp_path) == [2, 3, 4]


def test_one_that_is_kept_for_good_is_good_enough(tmp_path: Path) -> None:
    paths = [saved(tmp_path, step) for step in (1, 2, 3, 4)]
    flip(paths[3])
    assert prune(tmp_path, Retention(1, every=2)) == [paths[2], paths[0]]
    assert newest(tmp_path, say=QUIET) == paths[1]


def test_nothing_is_read_again_where_a_good_one_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [saved(tmp_path, step, float(step)) for step in (1, 2, 3, 4, 5)]

    def read(*_: object) -> None:
        raise AssertionError("a checksum was computed")

    monkeypatch.setattr(checking, "file_facts", read)
    monkeypatch.setattr(keeping, "verify", read)
    assert prune(tmp_path, Retention(2, every=3, best=True), good=paths[4]) == [paths[1]]
    with pytest.raises(AssertionError, match="a checksum"):
        prune(tmp_path, Retention(1))


@pytest.mark.parametrize("known", [True, False])
def test_spoiled_ones_of_a_future_that_was_given_up_push_nothing_out(tmp_path: Path, known: bool) -> None:
    """The newest two were passed over: the run goes on from step 4, saves 5, and later writes over them."""
    for step, loss in {2: 3.0, 4: 2.0, 6: 1.0, 8: 0.5}.items():
        saved(tmp_path, step, loss)
    for step in (6, 8):
        flip(tmp_path / name_of(step))
    going_on = newest(tmp_path, say=QUIET)
    assert going_on == tmp_path / name_of(4)
    point(tmp_path / name_of(4))
    assert pointed(tmp_path) == (4, 4)
    good = saved(tmp_path, 5, 1.5)
    assert pointed(tmp_path) == (5, 5)
    prune(tmp_path, Retention(2), good if known else None)
    assert steps(tmp_path) == ([4, 5, 6, 8] if known else [5, 6, 8])
    assert newest(tmp_path, say=QUIET) == good
    for step, loss in {6: 1.4, 7: 1.3, 8: 1.2}.items():
        prune(tmp_path, Retention(2), saved(tmp_path, step, loss))
    assert steps(tmp_path) == [7, 8]
    assert pointed(tmp_path) == (8, 8)
    assert newest(tmp_path) == tmp_path / name_of(8)


def test_a_best_one_removed_by_hand_is_no_longer_pointed_to(tmp_path: Path) -> None:
    for step, loss in {1: 1.0, 2: 3.0, 3: 2.0}.items():
        saved(tmp_path, step, loss)
    assert pointed(tmp_path) == (3, 1)
    shutil.rmtree(tmp_path / name_of(1))
    prune(tmp_path, Retention(1, best=True), saved(tmp_path, 4, 2.5))
    assert steps(tmp_path) == [3, 4]
    assert pointed(tmp_path) == (4, 3)


def test_the_best_that_is_whole_is_found_and_the_other_said(tmp_path: Path) -> None:
    paths = [saved(tmp_path, step, loss) for step, loss in {1: 2.0, 2: 1.0, 3: 3.0}.items()]
    assert best(tmp_path) == paths[1]
    flip(paths[1])
    heard: list[str] = []
    assert best(tmp_path, say=heard.append) == paths[0]
    assert "passing over checkpoint step-00000002" in heard[0]
    (paths[0] / "manifest.json").write_text("{")
    assert [path for path, _ in best_first(published(tmp_path))] == [paths[1], paths[2]]
    assert best(tmp_path / "nowhere") is None


def test_a_manifest_with_a_number_that_is_none_is_refused(tmp_path: Path) -> None:
    """JSON readers take NaN where nobody forbids it; a stranger's manifest may hold one with a checksum that is right."""
    path, other = saved(tmp_path, 1, 1.0), saved(tmp_path, 2, 5.0)
    text = json.loads((path / "manifest.json").read_text())
    del text["sha256"]
    for value in (math.nan, -math.inf):
        text["held_out_loss"] = value
        (path / "manifest.json").write_text(json.dumps(text | {"sha256": checking._digest(text)}))
        with pytest.raises(InputError, match=r"not a checkpoint's manifest"):
            Manifest.read(path)
        assert [found for found, _ in best_first(published(tmp_path))] == [other]


def test_one_that_was_replaced_does_not_count(tmp_path: Path) -> None:
    paths = [saved(tmp_path, step) for step in (1, 2)]
    shutil.copytree(paths[1], tmp_path / "step-00000002.replaced")
    assert prune(tmp_path, Retention(2, every=2), paths[1]) == [tmp_path / "step-00000002.replaced"]
    assert published(tmp_path) == [paths[1], paths[0]]
    paths[1].rename(tmp_path / "step-00000002.replaced")  # a kill between the two renames of a save
    assert prune(tmp_path, Retention(1), paths[0]) == []
    assert prune(tmp_path, Retention(1)) == [paths[0]]
    assert published(tmp_path) == [tmp_path / "step-00000002.replaced"]


def test_one_that_was_replaced_stays_where_it_is_the_good_one(tmp_path: Path) -> None:
    paths = [saved(tmp_path, step) for step in (1, 2)]
    aside = tmp_path / "step-00000002.replaced"
    shutil.copytree(paths[1], aside)
    flip(paths[1])
    assert newest(tmp_path, say=QUIET) == aside
    assert prune(tmp_path, Retention(1), aside) == [paths[0]]
    assert published(tmp_path) == [paths[1], aside]


def test_a_removal_cut_short_leaves_nothing_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [saved(tmp_path, step) for step in (1, 2)]

    def killed(path: Path) -> None:
        if path.exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(disk, "discard", killed)
        with pytest.raises(KeyboardInterrupt):
            prune(tmp_path, Retention(1), paths[1])
    assert published(tmp_path) == [paths[1]]
    prune(tmp_path, Retention(1))
    assert not list(tmp_path.glob("*.removed"))


def test_latest_of_a_pointer_that_leads_out_stays_in_the_folder(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    (tmp_path / LATEST).write_text(json.dumps({"folder": "../../elsewhere"}))
    assert latest(tmp_path) == tmp_path / "elsewhere"
    os.truncate(tmp_path / LATEST, 3)
    assert latest(tmp_path) is None
