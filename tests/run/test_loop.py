"""The loop on toy jobs: a resumed run is the undisturbed one bit for bit, the receipt and metrics say what happened, the export loads."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pentamesh.checkpoint.manifest import Manifest
from pentamesh.checkpoint.names import published
from pentamesh.errors import Drift, InputError, RunFailed
from pentamesh.job.precision import PRECISIONS
from pentamesh.plan.plan import Plan
from pentamesh.run import loop, measurements
from pentamesh.run.asked import read_asked
from pentamesh.run.data.batches import IGNORED, Micro
from pentamesh.run.evaluate import evaluate
from pentamesh.run.folder import RunFolder
from pentamesh.run.launch import _cause, keep
from pentamesh.run.loop import Ending, run
from pentamesh.run.options import Options
from pentamesh.run.set_up import Run
from pentamesh.run.state import Counters
from pentamesh.run.worker import work
from pentamesh.run.world import join
from pentamesh.run.worlds import run_world
from tests.proof.toys import reduced
from tests.run import toy

PLAIN = Options()


def rank(folder: Path, options: Options) -> Ending:
    """What each rank of a world does."""
    plan = Plan.read(RunFolder(folder).plan)
    return run(plan, RunFolder(folder), join(plan.layout, "cpu"), options)


def trained(job: Path, options: Options = PLAIN) -> RunFolder:
    """Plan the job and run it in a world of its own."""
    folder = keep(read_asked(job), options, even_so=False)
    num_ranks = Plan.read(folder.plan).layout.mesh.num_ranks
    outcomes = run_world(rank, num_ranks, folder.path, options)
    assert len(set(outcomes)) == 1
    return folder


def contents(checkpoint: Path) -> dict[str, bytes]:
    """Every tensor's bytes, by file and name."""
    found = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            found[f"{path.name}:{name}"] = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return found


def metrics(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.metrics.read_text().splitlines()]


STRATEGIES = {
    "ddp": {"layout__shard": "none"},
    "zero1": {"layout__shard": "optimizer"},
    "zero2": {"layout__shard": "gradients"},
    "full_shard": {"layout__shard": "parameters"},
    "hybrid_shard": {"layout__shard": "parameters", "layout__replicate": 2},
    "multi_axis": {"layout__shard": "parameters", "layout__tensor": 2, "layout__sequence_parallel": True},
}


# Every strategy in fp32, and each other precision with some of them.
OFTEN = {("bf16", "full_shard"), ("bf16-pure", "hybrid_shard"), ("bf16-pure", "multi_axis")}
RESUMED = [(strategy, precision) for strategy in STRATEGIES for precision in ("fp32", "bf16", "bf16-pure")]


@pytest.mark.parametrize("case", reduced(RESUMED, lambda case: case[1] == "fp32" or case[::-1] in OFTEN), ids=" ".join)
def test_resume_is_a_continuation(tmp_path: Path, case: tuple[str, str]) -> None:
    strategy, precision = case
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    changes = STRATEGIES[strategy] | {"precision": precision, "training__steps": 10, "checkpoint__every": 5, "hardware": "4xCPU"}
    whole = trained(toy.job(tmp_path / "a", **changes))
    assert Plan.read(whole.plan).strategy == strategy
    job = toy.job(tmp_path / "b", **changes)
    trained(job, Options(stop_at=5))
    halves = trained(job, Options(resume=True))

    name = "step-00000010"
    first, second = contents(whole.checkpoints / name), contents(halves.checkpoints / name)
    assert first.keys() == second.keys()
    assert [key for key in first if first[key] != second[key]] == []
    keep_keys = ("step", "loss", "grad_norm", "lr", "tokens", "consumed_samples")
    assert [{k: row[k] for k in keep_keys} for row in metrics(whole)] == [{k: row[k] for k in keep_keys} for row in metrics(halves)]


def test_bf16_pure_keeps_and_writes_bf16(tmp_path: Path) -> None:
    """Weights and moments are bfloat16 in the checkpoint, and the export has the dtype of the model that it started from."""
    toy.model_folder(tmp_path / "model", dtype="bfloat16")
    folder = trained(toy.job(tmp_path, precision="bf16-pure"))
    rows = metrics(folder)
    assert rows[-1]["held_out_loss"] < rows[2]["held_out_loss"]
    receipt = json.loads(folder.receipt.read_text())
    assert receipt["ledger_equal"] is True
    assert receipt["parts"]["states_bytes"]["ratio"] == pytest.approx(1, abs=0.01)
    kept = Manifest.read(folder.checkpoints / "step-00000006").tensors
    assert {facts.dtype for name, facts in kept.items() if name.startswith("model.") or name.endswith(("exp_avg", "exp_avg_sq"))} == {"BF16"}
    exported = [tensor.dtype for path in folder.export.glob("*.safetensors") for tensor in load_file(path).values()]
    assert set(exported) == {torch.bfloat16}


def test_what_a_run_leaves(tmp_path: Path) -> None:
    folder = trained(toy.job(tmp_path))
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert {"schema", "version", "loss", "grad_norm", "lr", "tokens_per_s", "step_s", "peak_bytes"} <= row.keys()
        assert 0 < row["tokens"]["trained"] < row["tokens"]["total"]
    assert "held_out_loss" in rows[2]
    assert "held_out_loss" in rows[5]
    held_out = [json.loads(line) for line in folder.held_out.read_text().splitlines()]
    assert [row["step"] for row in held_out] == [0, 3, 6]
    assert held_out[-1]["held_out_loss"] < held_out[0]["held_out_loss"]

    receipt = json.loads(folder.receipt.read_text())
    assert receipt["ledger_equal"] is True
    assert (receipt["from_step"], receipt["to_step"]) == (1, 6)
    assert receipt["parts"]["states_bytes"]["ratio"] == pytest.approx(1, abs=0.01)
    assert receipt["parts"]["peak_bytes"]["ratio"] > 0.2
    assert [path.name for path in sorted(folder.checkpoints.glob("step-*"))] == ["step-00000004", "step-00000006"]


def test_export_loads_with_plain_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = trained(toy.job(tmp_path))
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder.export, output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert AutoTokenizer.from_pretrained(folder.export).chat_template == toy.CHATML
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tensor_parallel_trains_as_data_parallel_does(tmp_path: Path) -> None:
    """Through plan, checkpoint, receipt and export: micro-batches of their own lengths, an uneven vocabulary, a tied head."""
    losses = {}
    for name, changes in {"data": {}, "tensor": {"layout__tensor": 2}, "sequence": {"layout__tensor": 2, "layout__sequence_parallel": True}}.items():
        (tmp_path / name).mkdir()
        folder = trained(toy.job(tmp_path / name, layout__shard="parameters", **changes))
        assert json.loads(folder.receipt.read_text())["ledger_equal"] is True
        losses[name] = [row["loss"] for row in metrics(folder)]
        exported = load_file(folder.export / "model.safetensors")
        assert exported["model.embed_tokens.weight"].shape[0] == Plan.read(folder.plan).model["vocab"]
    assert losses["tensor"] == pytest.approx(losses["data"], rel=1e-5)
    assert losses["sequence"] == pytest.approx(losses["data"], rel=1e-5)


@pytest.mark.parametrize(("how", "shard", "packing"), [("ring", "parameters", True), ("all_gather", "none", False), ("ulysses", "optimizer", False)])
def test_context_parallel_trains_as_data_parallel_does(how: str, shard: str, packing: bool, tmp_path: Path) -> None:
    """Losses, also held-out ones, of as many data ranks without it; the planned collectives; and a run that was stopped, bit for bit."""
    changes: dict[str, Any] = {"layout__shard": shard, "batch__packing": packing}
    data = trained(toy.job(tmp_path / "data", **changes))
    changes |= {"layout__context": 2, "layout__context_attention": how, "hardware": "4xCPU"}
    whole, job = trained(toy.job(tmp_path / "whole", **changes)), toy.job(tmp_path / "halves", **changes)
    trained(job, Options(stop_at=4))
    halves = trained(job, Options(resume=True))
    assert all(json.loads(folder.receipt.read_text())["ledger_equal"] is True for folder in (whole, halves))
    assert contents(whole.checkpoints / "step-00000006") == contents(halves.checkpoints / "step-00000006")
    for name in ("loss", "held_out_loss", "grad_norm", "tokens", "consumed_samples"):
        expected, found = ([row[name] for row in metrics(folder) if name in row] for folder in (data, whole))
        assert found == (pytest.approx(expected, rel=2e-5) if name.endswith(("loss", "norm")) else expected)


FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 8, "sliding_window": 16, "pad_token_id": None},
    "gemma3_text": {"head_dim": 8, "sliding_window": 16, "sliding_window_pattern": 2, "num_key_value_heads": 1, "pad_token_id": None},
    "phi3": {"tie_word_embeddings": False, "sliding_window": 16, "pad_token_id": None},
    "glm4": {"head_dim": 8, "tie_word_embeddings": False, "pad_token_id": None},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_dense_family_over_tensor_ranks(family: str, tmp_path: Path) -> None:
    """Losses of full shard, the planned collectives, a resumed run that continues, and an export that has the run's held-out loss."""
    found: list[list[float]] = []
    for name, changes in {"data": {}, "tensor": {"layout__tensor": 2, "layout__sequence_parallel": family != "gpt2"}}.items():
        toy.model_folder(tmp_path / name / "model", model_type=family, **FAMILIES[family])
        job = toy.job(tmp_path / name, hardware="4xCPU" if changes else "2xCPU", **changes)
        if changes:
            trained(job, Options(stop_at=3))
        folder = trained(job, Options(resume=bool(changes)))
        assert json.loads(folder.receipt.read_text())["ledger_equal"] is True
        held_out = [row["held_out_loss"] for row in metrics(folder) if "held_out_loss" in row]
        assert evaluate(Plan.read(folder.plan).job, folder.export, PRECISIONS["fp32"]).loss == pytest.approx(held_out[-1], rel=1e-6)
        found.append([row["loss"] for row in metrics(folder)] + held_out)
    assert found[1] == pytest.approx(found[0], rel=2e-5)


def test_pretraining_starts_from_the_same_weights_on_any_layout(tmp_path: Path) -> None:
    losses = []
    for name, hardware, shard in (("one", "1xCPU", "none"), ("two", "2xCPU", "none"), ("four", "4xCPU", "parameters")):
        (tmp_path / name).mkdir()
        job = toy.job(tmp_path / name, method="pretrain", hardware=hardware, layout__shard=shard, training__steps=3)
        losses.append([row["loss"] for row in metrics(trained(job))])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] == pytest.approx(losses[2], rel=1e-5)


def test_epochs_end_with_an_uneven_batch(tmp_path: Path) -> None:
    toy.model_folder(tmp_path / "model")
    toy.rows(tmp_path / "rows.jsonl", 7)
    job = toy.job(tmp_path, training={"epochs": 1}, data__held_out=None, hardware="4xCPU", batch__micro_batch=1, batch__global_batch=4)
    rows = metrics(trained(job))
    assert len(rows) == 2
    assert rows[-1]["consumed_samples"] == 8  # seven rows and one without labels


def test_packed_rows_are_gone_on_with(tmp_path: Path) -> None:
    """Three epochs, stopped within the second: the undisturbed run bit for bit, with the planned collectives; without packing it is other data."""
    changes: dict[str, Any] = {"training": {"epochs": 3}, "batch__packing": True, "batch__global_batch": 4, "checkpoint__every": 100}
    whole = trained(toy.job(tmp_path / "a", **changes))
    assert json.loads(whole.receipt.read_text())["ledger_equal"] is True
    packs = json.loads((whole.data / "data.json").read_text())["splits"]["train"]["packs"]
    last = metrics(whole)[-1]
    assert last["consumed_samples"] == 4 * -(-3 * packs // 4)
    assert packs < 32 / 2
    job = toy.job(tmp_path / "b", **changes)
    trained(job, Options(stop_at=last["step"] // 2))
    halves = trained(job, Options(resume=True))
    name = f"step-{last['step']:08}"
    assert contents(whole.checkpoints / name) == contents(halves.checkpoints / name)
    with pytest.raises(InputError, match="the training data is not what"):
        trained(toy.job(tmp_path / "b", **changes | {"batch__packing": False, "training": {"epochs": 30}}), Options(resume=True))


def test_an_evaluation_leaves_nothing_gathered(tmp_path: Path) -> None:
    """The step after an evaluation gathers what it needs anew: its ledger is that of any other step."""
    folder = trained(toy.job(tmp_path, training__evaluate_every=1, training__steps=2))
    assert json.loads(folder.receipt.read_text())["ledger_equal"] is True


def test_the_same_rows_in_another_place_are_the_same(tmp_path: Path) -> None:
    """A project that was moved, or copied without its times, goes on; another order of the rows does not."""
    trained(toy.job(tmp_path / "here", training__steps=4), Options(stop_at=2))
    (tmp_path / "here").rename(tmp_path / "there")
    job = tmp_path / "there/job.yaml"
    os.utime(tmp_path / "there/rows.jsonl", (0, 0))
    assert [row["step"] for row in metrics(trained(job, Options(resume=True, stop_at=3)))] == [1, 2, 3]
    with pytest.raises(InputError, match="the training data is not what step-00000003 was trained on"):
        trained(toy.job(tmp_path / "there", training__steps=4, training__seed=1), Options(resume=True))


@pytest.mark.parametrize("harm", [{"consumed": "many"}, {"unheard": 1}, []])
def test_a_manifest_that_does_not_say_how_far_the_run_was(tmp_path: Path, harm: Any) -> None:
    job = toy.job(tmp_path, hardware="1xCPU", training__steps=2, data__held_out=None, training__evaluate_every=None)
    folder = trained(job, Options(stop_at=1))
    path = folder.checkpoints / "step-00000001"
    manifest = Manifest.read(path)
    counters = manifest.facts["counters"] | harm if isinstance(harm, dict) else harm
    (path / "manifest.json").write_text(replace(manifest, facts=manifest.facts | {"counters": counters}).text())
    with pytest.raises(InputError, match="the manifest does not say how far the run was"):
        trained(job, Options(resume=True))


def test_other_data_is_not_gone_on_with(tmp_path: Path) -> None:
    job = toy.job(tmp_path)
    trained(job, Options(stop_at=2))
    toy.rows(tmp_path / "rows.jsonl", 40, seed=1)
    with pytest.raises(InputError, match="the training data is not what step-00000002 was trained on"):
        trained(job, Options(resume=True))


def test_another_grouping_is_not_gone_on_with(tmp_path: Path) -> None:
    """Which samples come next depends on whether steps are of like length, and then on how many are in a step; without, steps may grow."""
    trained(toy.job(tmp_path), Options(stop_at=2))
    with pytest.raises(InputError, match="the training data is not what step-00000002 was trained on"):
        trained(toy.job(tmp_path, batch__group_by_length=True), Options(resume=True))
    trained(toy.job(tmp_path, batch__global_batch=16), Options(resume=True, stop_at=3))


def test_a_run_goes_on_without_its_plan(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What is lost with plan.json is a comparison, not a run."""
    job = toy.job(tmp_path, training__steps=4)
    folder = trained(job, Options(stop_at=2))
    folder.plan.unlink()
    trained(job, Options(resume=True))
    assert "what changed since the checkpoint cannot be told" in capfd.readouterr().err
    assert [row["step"] for row in metrics(folder)] == [1, 2, 3, 4]


def test_a_run_that_would_end_before_its_checkpoint(tmp_path: Path) -> None:
    job = toy.job(tmp_path, training__steps=4)
    trained(job, Options(stop_at=3))
    with pytest.raises(InputError, match="the checkpoint is of step 3, and the run ends at step 2"):
        trained(job, Options(resume=True, stop_at=2))


def test_checkpoints_of_which_none_is_whole_are_not_started_over(tmp_path: Path) -> None:
    """What is left of them, and the metrics of what they were trained with, stays for whoever can mend them."""
    job = toy.job(tmp_path, hardware="1xCPU", training__steps=4)
    folder = trained(job, Options(stop_at=3))
    for checkpoint in published(folder.checkpoints):
        os.truncate(next(checkpoint.glob("*.safetensors")), 100)
    with pytest.raises(InputError, match="none of the 2 checkpoints is as it was written"):
        trained(job, Options(resume=True))
    assert len(published(folder.checkpoints)) == 2
    assert [row["step"] for row in metrics(folder)] == [1, 2, 3]


def test_what_a_first_save_left_is_no_checkpoint(tmp_path: Path) -> None:
    job = toy.job(tmp_path)
    (tmp_path / "runs/job/checkpoints/step-00000002.partial").mkdir(parents=True)
    assert keep(read_asked(job), PLAIN, even_so=False).plan.exists()


def test_a_receipt_says_which_steps_it_is_of(tmp_path: Path) -> None:
    job = toy.job(tmp_path, hardware="1xCPU", training__steps=4)
    trained(job, Options(stop_at=3))
    receipt = json.loads(trained(job, Options(resume=True)).receipt.read_text())
    assert (receipt["from_step"], receipt["to_step"], receipt["num_steps"]) == (4, 4, 1)
    assert receipt["ledger_equal"] is None  # no steady step
    assert receipt["parts"]["states_bytes"]["measured"] is None


def unlabelled(folder: Path) -> Ending:
    """A rank of a run whose second step has no trained token."""
    own = loop._next

    def taken(made: Run, counters: Counters, *, unsaved: bool) -> list[Micro]:
        micros = own(made, counters, unsaved=unsaved)
        silent = [replace(micro, labels=torch.full_like(micro.labels, IGNORED), num_trained=0) for micro in micros]
        return silent if counters.step == 1 else micros

    loop._next = taken  # pyright: ignore[reportPrivateUsage]
    return rank(folder, PLAIN)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_step_without_a_trained_token_is_not_the_one_that_is_recorded(family: str, tmp_path: Path) -> None:
    sparse = {} if family == "llama" else {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    toy.model_folder(tmp_path / "model", **sparse)
    folder = keep(read_asked(toy.job(tmp_path, training__steps=3, layout__expert=2 if sparse else 1)), PLAIN, even_so=False)
    for ending in run_world(unlabelled, 2, folder.path):
        assert (ending.outcome, ending.drift) == ("done", ())
    assert [bool(row["skipped"]) for row in metrics(folder)] == [False, True, False]
    assert json.loads(folder.receipt.read_text())["ledger_equal"] is True


def drifted(folder: Path) -> int:
    """The exit code of a rank whose plan predicts no collectives."""
    measurements.ledger = lambda _: []  # pyright: ignore[reportPrivateImportUsage]
    return work(lambda: RunFolder(folder), PLAIN)


def test_other_collectives_than_planned_are_drift(tmp_path: Path) -> None:
    """Told by exit code 4 when the model is trained, saved and exported."""
    folder = keep(read_asked(toy.job(tmp_path)), PLAIN, even_so=False)
    assert run_world(drifted, 2, folder.path) == [4, 4]
    outcome = json.loads(folder.outcome.read_text())
    assert (outcome["outcome"], outcome["exit_code"], outcome["kind"], outcome["trained"]) == ("drift", 4, "collectives", "done")
    assert json.loads(folder.receipt.read_text())["ledger_equal"] is False
    assert (folder.export / "config.json").is_file()
    told = _cause(folder, {0: SimpleNamespace(exitcode=4), 1: SimpleNamespace(exitcode=4)})
    assert isinstance(told, Drift)
    assert {problem.where for problem in told.problems} == {f"collectives of step 2 on rank {rank}" for rank in (0, 1)}
    assert "recorded, not predicted" in str(told)


def test_weights_that_were_good_outlive_those_that_are_not(tmp_path: Path) -> None:
    """Step 5 is finite and breaks the weights; its own checkpoint and the ten steps that update nothing leave that of step 4."""
    job = toy.job(tmp_path, hardware="1xCPU", training__steps=40, checkpoint={"every": 1, "keep": 1}, optimizer={"schedule": "constant"})
    folder = trained(job, Options(stop_at=4))
    assert [path.name for path in published(folder.checkpoints)] == ["step-00000004"]
    toy.job(tmp_path, hardware="1xCPU", training__steps=40, checkpoint={"every": 1, "keep": 1}, optimizer={"schedule": "constant", "lr": 1e30})
    with pytest.raises(RunFailed, match="10 steps in a row had a loss or gradient that is not finite"):
        trained(job, Options(resume=True))
    assert [path.name for path in published(folder.checkpoints)] == ["step-00000005", "step-00000004"]
    assert [row["step"] for row in metrics(folder) if row["skipped"]] == list(range(6, 16))
