"""What a run measures is what there is: the allocator's peak whichever thread releases, and the states of each strategy byte by byte."""

from __future__ import annotations

import threading

import pytest
import torch

from pentamesh.job.precision import PRECISIONS
from pentamesh.layout.mesh import Layout, Mesh
from pentamesh.layout.policy import Policy
from pentamesh.run.data.batches import Batches
from pentamesh.run.initial import drawing
from pentamesh.run.optim import adamw
from pentamesh.run.peak import count_allocations, measured_peak
from pentamesh.run.place import parameters_of, place
from pentamesh.run.standing import Standing, storage_bytes
from pentamesh.run.state import tensors
from pentamesh.run.step import Trainee, take_step
from pentamesh.run.verify import Trial, toy_samples
from pentamesh.run.world import join
from pentamesh.run.worlds import run_world

CPU = torch.device("cpu")
MIB = 2**20
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
NUM_RANKS, ACCUM = 2, 4
TRIALS = {
    "ddp": (Layout(Mesh(dp_replicate=2), "none"), Policy(1, ACCUM)),
    "zero1": (Layout(Mesh(dp_shard=2), "optimizer"), Policy(1, ACCUM, reshard=False, keep_gathered=True)),
    "zero2": (Layout(Mesh(dp_shard=2), "gradients"), Policy(1, ACCUM, reshard=False, keep_gathered=True, reduce="each")),
    "full_shard": (Layout(Mesh(dp_shard=2), "parameters"), Policy(1, ACCUM, reduce="each")),
    "full_shard_once": (Layout(Mesh(dp_shard=2), "parameters"), Policy(1, ACCUM)),
}


def now_bytes() -> int:
    """What the allocator holds, by its own count."""
    with measured_peak(CPU) as found:
        torch.empty(1)
    assert found.peak_bytes is not None
    return found.peak_bytes


def test_what_another_thread_releases_is_gone() -> None:
    """gloo's threads hold the last reference to what a collective worked on."""
    count_allocations()
    before = now_bytes()
    with measured_peak(CPU) as found:
        for _ in range(8):
            held = [torch.empty(MIB, dtype=torch.uint8)]
            thread = threading.Thread(target=held.clear)
            thread.start()
            thread.join()
    assert found.peak_bytes is not None
    assert found.peak_bytes - before == pytest.approx(MIB, rel=0.01)


def stepped(trial: Trial) -> tuple[Standing, list[tuple[int, int]]]:
    """Two steps of a trial: the states that stood, and after each step the bytes that the allocator counts beside those of all storages."""
    count_allocations()
    world, precision = join(trial.layout, "cpu"), PRECISIONS[trial.precision]
    module = place(trial.model, trial.layout, trial.policy, precision, world, drawing(trial.seed))
    parameters = parameters_of(module)
    trainee = Trainee(
        module, parameters, adamw(parameters, trial.model, trial.optimizer, precision, world, trial.seed), trial.model, trial.policy, world
    )
    samples = toy_samples(trial.seed, 2 * trial.global_batch, trial.model.vocab, trial.longest)
    batches = Batches(samples, trial.seed, trial.global_batch, 1, world.share)
    standing, counted = Standing(), []
    for step in range(2):
        micros = batches.step(step * trial.global_batch)
        with standing.watched(trainee), measured_peak(CPU):
            take_step(trainee, micros, 1.0, standing.look)
        del micros
        kept = (getattr(t, "local", t) for t in tensors(trainee).values())
        there = [*kept, *(p.grad for p in parameters.values() if p.grad is not None), *module.buffers()]
        counted.append((now_bytes(), storage_bytes(t for t in there)))
    return standing, counted


def trial_of(strategy: str, precision: str) -> Trial:
    layout, policy = TRIALS[strategy]
    return Trial(CONFIG, layout, policy, precision, global_batch=NUM_RANKS * ACCUM, longest=64)


@pytest.mark.parametrize("strategy", ["zero2", "full_shard"])
def test_the_allocator_counts_what_stands(strategy: str) -> None:
    """After a step with a reduction in every micro-batch nothing is left but weights and state: its count does not drift from that."""
    for _, counted in run_world(stepped, NUM_RANKS, trial_of(strategy, "fp32")):
        for total, storages in counted:
            assert total == pytest.approx(storages, abs=0.01 * storages)


# Bytes of weights, gradients and optimizer state per parameter, over two ranks. Under `bf16` ZeRO-1 and ZeRO-2 keep gradients in the dtype that
# they are reduced in (docs/decisions/0005).
STATES = {
    ("ddp", "fp32"): (4, 4, 8),
    ("zero1", "fp32"): (4, 4, 8 / 2),
    ("zero2", "fp32"): (4, 4 / 2, 8 / 2),
    ("full_shard", "fp32"): (4 / 2, 4 / 2, 8 / 2),
    ("full_shard_once", "fp32"): (4 / 2, 4 / 2, 8 / 2),
    ("ddp", "bf16"): (4, 4, 8),
    ("zero1", "bf16"): (2, 4, 12 / 2),
    ("zero2", "bf16"): (2, 4 / 2, 12 / 2),
    ("full_shard", "bf16"): (4 / 2, 4 / 2, 8 / 2),
}


@pytest.mark.parametrize(("strategy", "precision"), STATES)
def test_states_stand_as_the_strategy_says(strategy: str, precision: str) -> None:
    trial = trial_of(strategy, precision)
    expected = [each * trial.model.num_parameters for each in STATES[strategy, precision]]
    for standing, _ in run_world(stepped, NUM_RANKS, trial):
        assert [standing.weights, standing.gradients, standing.optimizer] == pytest.approx(expected, rel=0.001)
