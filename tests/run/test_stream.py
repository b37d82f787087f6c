"""Streamed runs: the same steps whatever the ranks and the pace of the chunks, gone on with bit for bit, in bounded room."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pentamesh.checkpoint.manifest import Manifest
from pentamesh.checkpoint.names import published
from pentamesh.errors import InputError, RunFailed
from pentamesh.job.precision import PRECISIONS
from pentamesh.plan.plan import Plan
from pentamesh.run.asked import read_asked
from pentamesh.run.data.batches import Batches
from pentamesh.run.data.supply import Supply
from pentamesh.run.evaluate import evaluate
from pentamesh.run.folder import RunFolder
from pentamesh.run.launch import keep
from pentamesh.run.loop import Ending, run
from pentamesh.run.options import Options
from pentamesh.run.world import join
from pentamesh.run.worlds import run_world
from tests.run import toy
from tests.run.test_loop import contents, metrics

PLAIN = Options()
# 40 rows: chunks of 16, 16 and 8; a step of 8 rows, the first of which evaluates on 10 others.
STREAM: dict[str, Any] = {"data": {"train": "rows.jsonl", "held_out": "held.jsonl", "streaming": True, "shuffle_rows": 16}, "hardware": "1xCPU"}


def job(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    toy.rows(folder / "held.jsonl", 10, seed=1)
    return toy.job(folder, **(STREAM | changes))


def seen(folder: Path, options: Options, pause_s: float) -> tuple[Ending, list[list[list[int]]], int]:
    """What each rank of a world does. Its steps are told as the tokens of their rows, beside the most chunks that lay on the disk at once."""
    plan, steps, most = Plan.read(RunFolder(folder).plan), [], 0
    step = Batches.step

    def told(self: Batches, consumed: int) -> Any:
        nonlocal most
        time.sleep(pause_s)
        found = step(self, consumed)
        steps.append([row.tolist() for micro in found for row in micro.input_ids])
        most = max(most, len(list((folder / "stream").glob("[0-9]*"))))
        return found

    Batches.step = told
    return run(plan, RunFolder(folder), join(plan.layout, "cpu"), options), steps, most


def trained(path: Path, options: Options = PLAIN, pause_s: float = 0.0) -> tuple[RunFolder, list[Any]]:
    folder = keep(read_asked(path), options, even_so=False)
    return folder, run_world(seen, Plan.read(folder.plan).layout.mesh.num_ranks, folder.path, options, pause_s)


def told(folder: RunFolder) -> list[dict[str, Any]]:
    return [{key: row[key] for key in ("step", "loss", "grad_norm", "lr", "tokens", "consumed_samples")} for row in metrics(folder)]


def stripped(rows: list[list[int]], pad: int = 2) -> list[tuple[int, ...]]:
    """Rows without what pads them (the end of a turn, which each row ends with once)."""
    return [tuple(row[: max((i for i, token in enumerate(row) if token != pad), default=0) + 1]) for row in rows]


@pytest.mark.parametrize("global_batch", [8, 12])
def test_every_row_is_seen_once_a_pass_in_another_order_and_room_is_bounded(tmp_path: Path, global_batch: int) -> None:
    """Steps of 12 cross the ends of chunks; what a rank computes is told by its tokens, sorted by length in each step."""
    batch = {"seq_len": 128, "micro_batch": 2, "global_batch": global_batch}
    folder, [(_, steps, most)] = trained(job(tmp_path, training__steps=120 // global_batch, batch=batch))
    rows = [row for step in steps for row in stripped(step)]
    num_whole = 40 // global_batch * global_batch
    assert sum(Counter(rows).values()) == 120
    assert set(Counter(rows).values()) <= {3, 6, 9}
    assert rows[:num_whole] != rows[40 : 40 + num_whole]
    assert most <= 3
    lines = [json.loads(line) for line in (folder.stream / "chunks.jsonl").read_text().splitlines()[1:]]
    assert [(line["epoch"], line["index"], line["rows"]) for line in lines][:6] == [(e, i, n) for e in (0, 1) for i, n in enumerate((16, 16, 8))]
    assert list(folder.stream.glob("[0-9]*")) == []


def test_ranks_and_pace_change_nothing(tmp_path: Path) -> None:
    """Steps of 12 cross the ends of chunks; two ranks hold a shard each."""
    batch = {"seq_len": 128, "micro_batch": 2, "global_batch": 12}
    one, _ = trained(job(tmp_path / "one", batch=batch))
    slow, _ = trained(job(tmp_path / "slow", batch=batch), pause_s=0.5)
    two, ranks = trained(job(tmp_path / "two", batch=batch, hardware="2xCPU"))
    assert told(one) == told(slow)
    assert [row["loss"] for row in told(two)] == pytest.approx([row["loss"] for row in told(one)], rel=1e-5)
    assert [row["tokens"] for row in told(two)] == [row["tokens"] for row in told(one)]
    assert max(most for _, _, most in ranks) <= 3
    assert [row.get("held_out_loss") for row in metrics(one)][-1] is not None
    loss = evaluate(read_located(tmp_path / "one/job.yaml"), one.export, PRECISIONS["fp32"]).loss
    assert loss == pytest.approx(metrics(one)[-1]["held_out_loss"], rel=1e-5)


def read_located(path: Path) -> Any:
    return Plan.read(RunFolder(path.parent / "runs/job").plan).job


@pytest.mark.parametrize(
    ("stop", "changes"),
    [
        (1, {}),  # in the middle of a chunk
        (2, {}),  # at the end of one
        (5, {}),  # at the end of a pass
        (7, {"hardware": "2xCPU"}),  # in the second pass, on two ranks
        (3, {"batch": {"seq_len": 128, "micro_batch": 2, "global_batch": 4, "packing": True}}),
        (3, {"batch": {"seq_len": 128, "micro_batch": 2, "global_batch": 24, "group_by_length": True}}),  # over more than a chunk
    ],
)
def test_resume_is_a_continuation(tmp_path: Path, stop: int, changes: dict[str, Any]) -> None:
    changes = changes | {"training__steps": 8, "checkpoint__every": 20}
    whole, _ = trained(job(tmp_path / "whole", **changes))
    path = job(tmp_path / "halves", **changes)
    trained(path, Options(stop_at=stop))
    halves, _ = trained(path, Options(resume=True))
    first, second = (contents(folder.checkpoints / "step-00000008") for folder in (whole, halves))
    assert first.keys() == second.keys()
    assert [key for key in first if first[key] != second[key]] == []
    assert told(whole) == told(halves)


def test_a_lost_record_is_made_again(tmp_path: Path) -> None:
    whole, _ = trained(job(tmp_path / "whole", training__steps=8))
    path = job(tmp_path / "halves", training__steps=8)
    folder, _ = trained(path, Options(stop_at=7))
    (folder.stream / "chunks.jsonl").unlink()
    trained(path, Options(resume=True))
    assert told(whole) == told(folder)


def slowly_saved(folder: Path) -> None:
    """A run whose saves take longer than what it gives them when it ends in an error."""
    from pentamesh.checkpoint import saver
    from pentamesh.checkpoint.phases import listeners

    saver._LAST_CHANCE_S = 0.0
    listeners.append(lambda phase: time.sleep(1.0) if phase == "flush" else None)
    plan = Plan.read(RunFolder(folder).plan)
    run(plan, RunFolder(folder), join(plan.layout, "cpu"), PLAIN)


def torn(folder: Path, **changes: Any) -> Path:
    """A job whose row 20 is none, of the second chunk: two steps are taken before it is needed."""
    path = job(folder, **changes)
    rows = folder / "rows.jsonl"
    lines = rows.read_text().splitlines()
    rows.write_text("\n".join([*lines[:19], '{"messages": 5}', *lines[20:]]) + "\n")
    return path


def test_a_fault_waits_for_the_save_that_is_on_its_way(tmp_path: Path) -> None:
    folder = keep(read_asked(torn(tmp_path, checkpoint__every=2)), PLAIN, even_so=False)
    with pytest.raises(InputError, match=r"rows.jsonl:20"):
        run_world(slowly_saved, 1, folder.path)
    assert [checkpoint.name for checkpoint in published(folder.checkpoints)] == ["step-00000002"]


def not_saved(folder: Path) -> str:
    """What is said of a run that can neither go on nor save."""
    from pentamesh.checkpoint import saver

    def full(*_args: object, **_more: object) -> None:
        raise OSError(28, "No space left on device")

    saver.save = full
    plan = Plan.read(RunFolder(folder).plan)
    with pytest.raises(RunFailed) as failed:
        run(plan, RunFolder(folder), join(plan.layout, "cpu"), PLAIN)
    return str(failed.value)


def test_a_fault_is_said_though_what_was_learned_cannot_be_saved(tmp_path: Path) -> None:
    folder = keep(read_asked(torn(tmp_path, checkpoint__every=20)), PLAIN, even_so=False)
    (said,) = run_world(not_saved, 1, folder.path)
    assert "rows.jsonl:20" in said
    assert "No space left on device" in said


def test_a_fault_stops_the_run_with_what_was_learned_saved_and_is_mended(tmp_path: Path) -> None:
    whole, _ = trained(job(tmp_path / "whole", checkpoint__every=20))
    path = torn(tmp_path / "torn", checkpoint={"every": 20, "keep_best": True})
    with pytest.raises(InputError, match=r"`messages` is a number(.|\n)*rows.jsonl:20"):
        trained(path)
    folder = RunFolder(tmp_path / "torn/runs/job")
    assert [checkpoint.name for checkpoint in published(folder.checkpoints)] == ["step-00000002"]
    evaluated = json.loads(folder.held_out.read_text().splitlines()[-1])
    saved = Manifest.read(folder.checkpoints / "step-00000002")
    assert (saved.step, saved.facts["held_out_loss"]) == (evaluated["step"], evaluated["held_out_loss"])
    shutil.copyfile(tmp_path / "whole/rows.jsonl", tmp_path / "torn/rows.jsonl")
    trained(path, Options(resume=True))
    assert told(folder) == told(whole)


@pytest.mark.parametrize("at", [3, 20])
def test_other_rows_where_the_run_has_read_are_refused(tmp_path: Path, at: int) -> None:
    """In a chunk that is done with, which is only read, and in the one that is gone on with."""
    path = job(tmp_path)
    trained(path, Options(stop_at=3))
    rows = tmp_path / "rows.jsonl"
    lines = rows.read_text().splitlines()
    lines[at] = json.dumps({"messages": [{"role": "user", "content": "red"}, {"role": "assistant", "content": "blue"}]})
    rows.write_text("\n".join(lines) + "\n")
    first = at // 16 * 16
    with pytest.raises(InputError, match=f"rows {first + 1} to {first + 16} are not those that the run has read there before"):
        trained(path, Options(resume=True))


def test_other_settings_are_refused(tmp_path: Path) -> None:
    path = job(tmp_path)
    trained(path, Options(stop_at=3))
    job(tmp_path, data=STREAM["data"] | {"shuffle_rows": 8})
    with pytest.raises(InputError, match="the training data is not what step-00000003 was trained on"):
        trained(path, Options(resume=True))


def test_a_dead_streamer_is_an_error(tmp_path: Path) -> None:
    from pentamesh.run.source import tokenizer_of

    path = job(tmp_path)
    supply = Supply(read_asked(path).job, lambda: tokenizer_of(tmp_path / "model"), tmp_path / "stream", "x")
    supply.start(0)
    supply._child._process.kill()
    with pytest.raises(RunFailed, match=r"the process that prepares the stream ended with signal 9(.|\n)*set data.shuffle_rows to fewer"):
        supply.take()
    supply.release(0)
    supply.close()
