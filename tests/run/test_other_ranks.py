"""A run goes on with other processes than it began with: each row is trained once an epoch, and the losses are those of an undisturbed run."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from pentamesh.errors import InputError
from pentamesh.layout.mesh import Mesh
from pentamesh.plan.plan import Plan
from pentamesh.run.asked import read_asked
from pentamesh.run.chance import saved_by, seed_anew
from pentamesh.run.data import batches
from pentamesh.run.folder import RunFolder
from pentamesh.run.launch import keep
from pentamesh.run.loop import run
from pentamesh.run.options import Options
from pentamesh.run.progress import Progress
from pentamesh.run.world import join
from pentamesh.run.worlds import run_world
from tests.proof.toys import reduced
from tests.run import toy
from tests.run.test_loop import metrics, trained

Items = list[tuple[int, ...]]


def seen(folder: Path, options: Options) -> tuple[Items, list[str]]:
    """What each rank of a world does; the tokens of every sample that it trains on, and what it says."""
    found: Items = []
    said: list[str] = []
    collate, say = batches.collate, Progress.say

    def noted(samples: Any, rows: Any, *share: Any) -> batches.Micro:
        found.extend(tuple(samples.sample(i)[0].tolist()) for row in rows for i in row)
        return collate(samples, rows, *share)

    def heard(self: Progress, text: str) -> None:
        said.append(text)
        say(self, text)

    batches.collate, Progress.say = noted, heard
    plan = Plan.read(RunFolder(folder).plan)
    run(plan, RunFolder(folder), join(plan.layout, "cpu"), options)
    return found, said


def gone(job: Path, options: Options) -> tuple[RunFolder, Items, list[str]]:
    """The folder of a run that went as far as asked, what all its ranks were trained on, and what they said."""
    folder = keep(read_asked(job), options, even_so=False)
    ranks = run_world(seen, Plan.read(folder.plan).layout.mesh.num_ranks, folder.path, options)
    return folder, [item for items, _ in ranks for item in items], [text for _, said in ranks for text in said]


# 24 rows an epoch: eight, and eight of a source with weight 2. A step of 4 rows is a sixth of it.
WEIGHTED = {"data__train": [{"rows": "rows.jsonl"}, {"rows": "more.jsonl", "weight": 2}]}
CASES: dict[str, dict[str, Any]] = {
    "sources with weights": WEIGHTED,
    "packed": {"batch__packing": True, "batch__seq_len": 110},
    "grouped by length": {"batch__group_by_length": True},
    "streamed": {"data__streaming": True, "data__shuffle_rows": 10, "training": {"steps": 12}},
}


def job_of(folder: Path, case: str, hardware: str, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    toy.rows(folder / "rows.jsonl", 8 if case == "sources with weights" else 24)
    toy.rows(folder / "more.jsonl", 8, seed=1)
    own: dict[str, Any] = {"data__held_out": None, "training": {"epochs": 2}, "checkpoint": {"every": 100}, "optimizer__lr": 1e-3}
    batch = {"batch__micro_batch": 1, "batch__global_batch": 4}
    return toy.job(folder, **(own | batch | CASES[case] | {"hardware": hardware} | changes))


@pytest.mark.parametrize("case", reduced(CASES, lambda case: case == "sources with weights"))
def test_each_row_is_trained_once_an_epoch(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two epochs begun on four ranks, stopped in the middle of the first and in that of the second: gone on with on two ranks, then on one."""
    whole, all_items, _ = gone(job_of(tmp_path / "whole", case, "4xCPU"), Options())
    last = metrics(whole)[-1]["step"]
    _, first, _ = gone(job_of(tmp_path / "parts", case, "4xCPU"), Options(stop_at=last // 4))
    _, second, talk_of_two = gone(job_of(tmp_path / "parts", case, "2xCPU", layout={}), Options(resume=True, stop_at=last * 3 // 4))
    parts, third, talk_of_one = gone(job_of(tmp_path / "parts", case, "1xCPU", layout={}), Options(resume=True))
    talk = capfd.readouterr().err

    assert Counter([*first, *second, *third]) == Counter(all_items)
    times = Counter(all_items)
    assert sum(times.values()) == 48
    assert sorted(times.values()) == ([2] * 8 + [4] * 8 if case == "sources with weights" else [2] * 24)
    assert [row["loss"] for row in metrics(parts)] == pytest.approx([row["loss"] for row in metrics(whole)], rel=1e-6)
    same = ("step", "lr", "tokens", "trained_tokens", "total_tokens", "consumed_samples")
    assert [{key: row[key] for key in same} for row in metrics(parts)] == [{key: row[key] for key in same} for row in metrics(whole)]
    assert json.loads(parts.receipt.read_text())["ledger_equal"] is True
    assert "the plan changed since the checkpoint, from 4 to 2 processes:\n" in talk
    assert "the plan changed since the checkpoint, from 2 to 1 processes:\n" in talk
    assert "  job.hardware: 4xCPU -> 2xCPU" in talk
    saved = f"step-{last // 4:08} was saved by dp_shard 4, not dp_replicate 2: every rank seeds its random numbers anew"
    assert [text for text in talk_of_two if "random" in text] == [saved]
    assert len([text for text in talk_of_one if "random" in text]) == 1


def test_what_a_run_cannot_go_on_with_is_refused_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights of another dtype, and processes that the global batch cannot be dealt out to; then it goes on, in another compute dtype too."""
    folder = trained(toy.job(tmp_path, hardware="1xCPU", layout={}), Options(stop_at=2))
    before = folder.plan.read_bytes()

    def refused(**changes: Any) -> str:
        with pytest.raises(InputError) as error:
            keep(read_asked(toy.job(tmp_path, layout={}, **changes)), Options(resume=True), even_so=False)
        assert folder.plan.read_bytes() == before
        return str(error.value)

    said = refused(hardware="1xCPU", precision="bf16-pure")
    assert "step-00000002 keeps weights and optimizer state in float32 (fp32), and bf16-pure keeps them in bfloat16" in said
    assert "set precision to fp32 or bf16, or start anew in another logging.folder from `pentamesh export" in said
    said = refused(hardware="3xCPU")
    assert "global_batch = 8 is not a multiple of micro_batch x data ranks = 2 x 3 = 6" in said
    assert "use global_batch = 6 or 12" in said
    capsys.readouterr()
    keep(read_asked(toy.job(tmp_path, hardware="2xCPU", layout={}, precision="bf16")), Options(resume=True), even_so=False)
    told = capsys.readouterr().err
    assert "from 1 to 2 processes:" in told
    assert "  precision.compute: float32 -> bfloat16" in told


def test_a_manifest_says_whether_ranks_are_what_they_were() -> None:
    """Copies or shards of the data axes, it is one and the same rank; a layout that cannot be read is another."""
    wrote = asdict(Mesh(dp_replicate=2, dp_shard=2)) | {"edp": 2, "shard": "parameters"}
    assert saved_by(wrote, Mesh(dp_shard=4)) is None
    assert saved_by(wrote, Mesh(dp_replicate=4)) is None
    assert saved_by(wrote, Mesh(dp_shard=2, tp=2)) == "dp_replicate 2 x dp_shard 2"
    assert saved_by(wrote, Mesh(dp_shard=2)) == "dp_replicate 2 x dp_shard 2"
    for harm in (None, [], {}, wrote | {"tp": "two"}, wrote | {"tp": None}, wrote | {"dp_shard": 0}):
        assert saved_by(harm, Mesh(dp_shard=4)) == "a layout that its manifest does not give"


def test_a_seed_of_its_own_for_every_seed_step_and_rank() -> None:
    drawn = {}
    for seed, step, rank in ((0, 1, 0), (0, 1, 1), (0, 11, 0), (1, 1, 0), (0, 1, 10)):
        seed_anew(seed, step, rank)
        drawn[seed, step, rank] = tuple(torch.rand(4).tolist())
    assert len(set(drawn.values())) == len(drawn)
    seed_anew(0, 1, 1)
    assert tuple(torch.rand(4).tolist()) == drawn[0, 1, 1]
