"""Biases of experts are state: a checkpoint has them, any layout takes them up, and a run that was stopped goes on as if it had not been."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from pentamesh.checkpoint.manifest import Manifest
from pentamesh.checkpoint.names import published
from pentamesh.checkpoint.save import save
from pentamesh.job.hardware import read_hardware
from pentamesh.job.job import Job
from pentamesh.job.precision import PRECISIONS
from pentamesh.layout.mesh import Layout, Mesh
from pentamesh.layout.policy import Policy
from pentamesh.model.families import describe
from pentamesh.model.spec import ModelSpec
from pentamesh.plan.plan import Plan
from pentamesh.plan.search import plan as planned
from pentamesh.run.data.batches import Batches
from pentamesh.run.initial import drawing
from pentamesh.run.optim import adamw
from pentamesh.run.options import Options
from pentamesh.run.place import parameters_of, place, unwrapped
from pentamesh.run.state import Counters, restore, store
from pentamesh.run.step import Trainee, take_step
from pentamesh.run.verify import toy_samples
from pentamesh.run.world import World, join
from pentamesh.run.worlds import run_world
from tests.proof.toys import DEEPSEEK_V3, TOYS
from tests.run import toy
from tests.run.test_loop import contents, metrics, trained

LAYOUTS = {
    "one": Layout(),
    "ddp 2": Layout(Mesh(dp_replicate=2)),
    "full 2, ep 2": Layout(Mesh(dp_shard=2, ep=2), "parameters"),
    "cp 2 x tp 2, ep 4": Layout(Mesh(cp=2, tp=2, ep=4), "parameters", sequence_parallel=True),
}
GLOBAL_BATCH, MICRO_BATCH, SEED, BEFORE, AFTER = 8, 2, 5, 3, 2
DIGEST = "made up"


@dataclass
class Found:
    """Biases by their name when a state was saved or taken up and after further steps, and the losses of these."""

    then: dict[str, list[float]] = field(default_factory=dict)
    after: dict[str, list[float]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)


def model() -> ModelSpec:
    found = describe(TOYS["deepseek-v3"], "deepseek-v3")
    assert found is not None
    return found


def plan_of(name: str) -> Plan:
    layout = LAYOUTS[name]
    accumulated = GLOBAL_BATCH // (MICRO_BATCH * layout.mesh.degree("dp_replicate", "dp_shard"))
    asked = {"model": {"name": "toy"}, "batch": {"seq_len": 24, "micro_batch": MICRO_BATCH, "global_batch": GLOBAL_BATCH}, "hardware": "1xCPU"}
    made = planned(Job.model_validate(asked | {"training": {"steps": 10, "seed": SEED}}), model(), read_hardware("1xCPU"), trained_only=True)
    policy = Policy(MICRO_BATCH, accumulated, balance="bias", balance_by=0.01)
    return replace(made, layout=layout, policy=policy, precision=PRECISIONS["fp64"])


def trainee_of(plan: Plan, world: World) -> Trainee:
    module = place(model(), plan.layout, plan.policy, plan.precision, world, drawing(SEED, std=0.05))
    parameters = parameters_of(module)
    optimizer = adamw(parameters, model(), plan.job.optimizer.model_copy(update={"lr": 1e-3}), plan.precision, world, SEED)
    return Trainee(module, parameters, optimizer, model(), plan.policy, world)


def steps(plan: Plan, trainee: Trainee, counters: Counters, count: int, found: Found) -> Counters:
    batches = Batches(toy_samples(SEED, 40, trainee.model.vocab, 24), SEED, GLOBAL_BATCH, MICRO_BATCH, trainee.world.share)
    for _ in range(count):
        result = take_step(trainee, batches.step(counters.consumed), 1.0)
        counters = counters.after(result, GLOBAL_BATCH)
        found.losses.append(result.loss)
    return counters


def biases(trainee: Trainee) -> dict[str, list[float]]:
    held = dict(unwrapped(trainee.module).named_buffers())
    return {tensor.name: held[tensor.name].tolist() for tensor in trainee.model.buffers}


def undisturbed() -> Found:
    plan, found = plan_of("one"), Found()
    trainee = trainee_of(plan, join(plan.layout, "cpu"))
    counters = steps(plan, trainee, Counters(), BEFORE, found)
    found.then, found.losses = biases(trainee), []
    steps(plan, trainee, counters, AFTER, found)
    found.after = biases(trainee)
    return found


def saved(name: str, folder: Path) -> dict[str, list[float]]:
    plan = plan_of(name)
    trainee = trainee_of(plan, join(plan.layout, "cpu"))
    counters = steps(plan, trainee, Counters(), BEFORE, Found())
    store(partial(save, folder), trainee, counters, plan, DIGEST)
    return biases(trainee)


def taken_up(name: str, folders: list[Path]) -> list[Found]:
    """What this layout makes of each of the checkpoints."""
    plan, answers = plan_of(name), []
    trainee = trainee_of(plan, join(plan.layout, "cpu"))
    for folder in folders:
        with torch.no_grad():
            for buffer in (held for held_name, held in unwrapped(trainee.module).named_buffers() if held_name in biases(trainee)):
                buffer.fill_(9.0)
        found = Found()
        counters = restore(published(folder)[-1], trainee, plan, DIGEST, lambda _: None)
        found.then = biases(trainee)
        steps(plan, trainee, counters, AFTER, found)
        found.after = biases(trainee)
        answers.append(found)
    return answers


def test_any_layout_takes_up_the_biases_that_any_other_saved(tmp_path: Path) -> None:
    reference = run_world(undisturbed, 1)[0]
    assert any(value for values in reference.then.values() for value in values)
    assert reference.after != reference.then
    folders = {name: tmp_path / str(number) for number, name in enumerate(LAYOUTS)}
    for name, folder in folders.items():
        for rank in run_world(saved, LAYOUTS[name].mesh.num_ranks, name, folder):
            assert rank == reference.then, name
        kept = Manifest.read(published(folder)[-1]).tensors
        assert {kept[f"model.{tensor.name}"].dtype for tensor in model().buffers} == {"F32"}
    for name, layout in LAYOUTS.items():
        for rank in run_world(taken_up, layout.mesh.num_ranks, name, list(folders.values())):
            for found in rank:
                assert (found.then, found.after) == (reference.then, reference.after), name
                assert found.losses == pytest.approx(reference.losses, rel=1e-9)


DEEPSEEK = {key: value for key, value in DEEPSEEK_V3.items() if key not in ("vocab_size", "max_position_embeddings", "num_hidden_layers")}


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Weights, moments and biases, and what each line of metrics says of loads."""
    changes = {"method": "pretrain", "experts": {"balance": "bias", "bias_step": 0.02}, "training__steps": 6, "checkpoint__every": 3}
    changes["checkpoint__export"] = False
    jobs = []
    for name in ("a", "b"):
        toy.model_folder(tmp_path / name / "model", **DEEPSEEK)
        jobs.append(toy.job(tmp_path / name, **changes))
    whole = trained(jobs[0])
    trained(jobs[1], Options(stop_at=3))
    halves = trained(jobs[1], Options(resume=True))
    first, second = (contents(folder.checkpoints / "step-00000006") for folder in (whole, halves))
    assert first == second
    told = [[row["experts"] for row in metrics(folder)] for folder in (whole, halves)]
    assert told[0] == told[1]
    assert all(row.keys() == {"max_load", "mean_max_load", "idle"} for row in told[0])
    receipt = json.loads(whole.receipt.read_text())
    assert receipt["ledger_equal"] is True
