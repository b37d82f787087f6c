"""Any layout goes on from what any other saved: weights and optimizer state bit for bit, and the next step of one process that was never stopped.

Each layout trains a few steps and saves; then one world a layout loads what all of them saved, one after the other, through the run's own `store`
and `restore`. State is gathered by boxes on both sides: each is whole, equal wherever it is held twice, and near that of one process.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pentamesh.checkpoint.held import Held
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
from pentamesh.run.chance import random_state, seed_anew
from pentamesh.run.data.batches import Batches
from pentamesh.run.initial import drawing
from pentamesh.run.optim import adamw
from pentamesh.run.place import parameters_of, place
from pentamesh.run.state import Counters, restore, store, tensors
from pentamesh.run.step import Trainee, take_step
from pentamesh.run.verify import toy_samples
from pentamesh.run.world import World, join
from pentamesh.run.worlds import run_world
from tests.proof.toys import TOYS, ZERO, reduced

# Two layers, and where tensors are fused as many key heads as there may be ranks: those of a fused tensor are not shared.
OWN_TOYS = {"llama": TOYS["llama"] | {"num_hidden_layers": 2}, "phi3": TOYS["phi3"] | {"num_hidden_layers": 2, "num_key_value_heads": 4}}
# Of a dense layer and a sparse one, with a buffer among its tensors; its experts are parted on layouts of their own.
OWN_TOYS |= {"deepseek-v3": TOYS["deepseek-v3"] | {"num_hidden_layers": 2}}
SPARSE = ("deepseek-v3",)

LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "one": (Layout(), {}),
    "ddp 4": (Layout(Mesh(dp_replicate=4)), {}),
    "zero1 4": (Layout(Mesh(dp_shard=4), "optimizer"), ZERO["zero1"]),
    "zero2 4": (Layout(Mesh(dp_shard=4), "gradients"), ZERO["zero2"]),
    "full 4": (Layout(Mesh(dp_shard=4), "parameters"), {}),
    "full 2": (Layout(Mesh(dp_shard=2), "parameters"), {}),
    "hybrid 2 x 2": (Layout(Mesh(dp_replicate=2, dp_shard=2), "parameters"), {}),
    "ddp 2 x tp 2": (Layout(Mesh(dp_replicate=2, tp=2)), {}),
    "full 2 x tp 2": (Layout(Mesh(dp_shard=2, tp=2), "parameters", sequence_parallel=True), {"reduce": "each"}),
    "tp 4": (Layout(Mesh(tp=4)), {}),
    "cp 2": (Layout(Mesh(cp=2)), {}),
    "cp 2, sharded": (Layout(Mesh(cp=2), "parameters", context="ulysses"), {}),
    "full 2 x cp 2": (Layout(Mesh(dp_shard=2, cp=2), "parameters"), {}),
    "cp 2 x tp 2": (Layout(Mesh(cp=2, tp=2), sequence_parallel=True), {}),
}
PARTED: dict[str, tuple[Layout, dict[str, Any]]] = {
    "ep 2": (Layout(Mesh(dp_shard=2, ep=2), "parameters"), {}),
    "ep 2 of 4": (Layout(Mesh(dp_shard=4, ep=2), "gradients"), ZERO["zero2"]),
    "ep 4": (Layout(Mesh(dp_shard=4, ep=4), "optimizer"), ZERO["zero1"]),
    "hybrid 2 x 2, ep 2": (Layout(Mesh(dp_replicate=2, dp_shard=2, ep=2), "parameters"), {}),
    "full 2 x tp 2, ep 2": (Layout(Mesh(dp_shard=2, tp=2, ep=2), "parameters", sequence_parallel=True), {"reduce": "each"}),
    "cp 2 x tp 2, ep 4": (Layout(Mesh(cp=2, tp=2, ep=4), "parameters", sequence_parallel=True), {}),
}
WHOLE_EXPERTS = ("one", "full 4", "full 2 x tp 2", "cp 2")


def layouts_of(toy: str) -> list[str]:
    return [*WHOLE_EXPERTS, *PARTED] if toy in SPARSE else list(LAYOUTS)


def laid_out(name: str) -> tuple[Layout, dict[str, Any]]:
    return (LAYOUTS | PARTED)[name]


GLOBAL_BATCH, MICRO_BATCH, SEED, BEFORE = 8, 2, 5, 2
DIGEST = "made up"
EXACT = 1e-6


@dataclass
class Found:
    """What one rank knows of a state. The first has the digest of every whole tensor, the norms of some, and the loss of the step after it."""

    digests: dict[str, str] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)
    torn: list[str] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    loss: float = math.nan
    position: str = ""
    chance: bool = True


def model_of(toy: str) -> ModelSpec:
    model = describe(OWN_TOYS[toy], toy)
    assert model is not None
    return model


def plan_of(toy: str, name: str, precision: str) -> Plan:
    """A plan of the toy, with the layout of that name in place of what the planner chose."""
    layout, policy = laid_out(name)
    if toy in SPARSE:
        policy = policy | {"balance": "bias", "balance_by": 0.01}
    accumulated = GLOBAL_BATCH // (MICRO_BATCH * layout.mesh.degree("dp_replicate", "dp_shard"))
    job = Job.model_validate(
        {
            "model": {"name": toy},
            "data": {"train": "rows.jsonl"},
            "batch": {"seq_len": 24, "micro_batch": MICRO_BATCH, "global_batch": GLOBAL_BATCH},
            "training": {"steps": 10, "seed": SEED},
            "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5},
            "hardware": "1xCPU",
            "method": "pretrain",
        }
    )
    made = planned(job, model_of(toy), read_hardware("1xCPU"), trained_only=True)
    return replace(made, layout=layout, policy=replace(Policy(MICRO_BATCH, accumulated), **policy), precision=PRECISIONS[precision])


def trainee_of(plan: Plan, world: World) -> Trainee:
    model = model_of(plan.job.model.name)
    module = place(model, plan.layout, plan.policy, plan.precision, world, drawing(SEED, std=0.05))
    parameters = parameters_of(module)
    optimizer = adamw(parameters, model, plan.job.optimizer, plan.precision, world, SEED)
    return Trainee(module, parameters, optimizer, model, plan.policy, world)


def batches_of(plan: Plan, world: World, vocab: int) -> Batches:
    samples = toy_samples(SEED, 4 * GLOBAL_BATCH - 3, vocab, 24)  # an epoch ends within the last step
    return Batches(samples, SEED, GLOBAL_BATCH, MICRO_BATCH, world.share)


def step(plan: Plan, trainee: Trainee, counters: Counters) -> tuple[Counters, float]:
    micros = batches_of(plan, trainee.world, trainee.model.vocab).step(counters.consumed)
    result = take_step(trainee, micros, plan.job.optimizer.max_grad_norm)
    assert not result.skipped
    return counters.after(result, GLOBAL_BATCH), result.loss


def gathered(trainee: Trainee, found: Found) -> None:
    """Note on the first rank what the whole of each tensor is, from what all ranks hold of it."""
    mine = {name: pieces(tensor) for name, tensor in tensors(trainee).items() if not name.startswith("rng")}
    everyone: list[Any] = [None] * trainee.world.num_ranks
    dist.gather_object(mine, everyone if trainee.world.is_first else None)
    if not trainee.world.is_first:
        return
    for name, (_, shape) in mine.items():
        rows = [piece for rank in everyone for piece in rank[name][0]]
        whole, times = np.zeros(shape, rows[0][1].dtype), np.zeros(shape, bool)
        for offset, values in rows:
            here = tuple(slice(low, low + size) for low, size in zip(offset, values.shape, strict=True))
            if not np.array_equal(whole[here][times[here]], values[times[here]]):
                found.torn.append(f"{name} differs between ranks")
            whole[here], times[here] = values, True
        if not times.all():
            found.torn.append(f"{name} is not whole")
        found.digests[name] = hashlib.sha256(f"{whole.dtype} {shape}".encode() + whole.tobytes()).hexdigest()
        found.norms[name] = float(np.linalg.norm(np.frombuffer(whole.tobytes(), np.float32).astype(float))) if whole.dtype == np.int32 else math.nan


def pieces(tensor: torch.Tensor) -> tuple[list[tuple[tuple[int, ...], np.ndarray]], tuple[int, ...]]:
    """The bits of what is here of a tensor, as integers, each piece with its place in the whole."""
    integers = {4: torch.int32, 2: torch.int16}
    local = tensor.local if isinstance(tensor, Held) else tensor
    bits = local.detach().contiguous().view(integers[local.dtype.itemsize]).numpy()
    if not isinstance(tensor, Held):
        return [((0,) * bits.ndim, bits)], tuple(bits.shape)
    places = [(box, tuple(slice(low, low + n) for low, n in zip(box.local_offset, box.size, strict=True))) for box in tensor.boxes]
    return [(box.offset, bits[place]) for box, place in places], tuple(tensor.shape)


def undisturbed(toy: str, precision: str) -> Found:
    """One process that is never stopped: its state after the first steps, and the loss of the next."""
    plan, found = plan_of(toy, "one", precision), Found()
    trainee = trainee_of(plan, join(plan.layout, "cpu"))
    for _ in range(BEFORE):
        found.counters, _ = step(plan, trainee, found.counters)
    gathered(trainee, found)
    found.position = str(batches_of(plan, trainee.world, trainee.model.vocab).rows(found.counters.consumed))
    found.counters, found.loss = step(plan, trainee, found.counters)
    return found


def saved(folders: dict[str, Path], toy: str, precision: str) -> dict[str, Found]:
    """Train a few steps and save, with each of the layouts that have as many ranks as this world; what was saved, on the first rank."""
    answers = {}
    for name, folder in folders.items():
        plan, found = plan_of(toy, name, precision), Found()
        trainee = trainee_of(plan, join(plan.layout, "cpu"))
        for _ in range(BEFORE):
            found.counters, _ = step(plan, trainee, found.counters)
        seed_anew(1, 2, trainee.world.rank)
        store(partial(save, folder), trainee, found.counters, plan, DIGEST)
        gathered(trainee, found)
        answers[name] = found
    return answers


def loaded(folders: dict[str, Path], toy: str, name: str, precision: str) -> dict[str, Found]:
    """Load what each layout saved, over the spoiled state of the one before, and take the next step."""
    plan = plan_of(toy, name, precision)
    trainee, answers = trainee_of(plan, join(plan.layout, "cpu")), {}
    for wrote, folder in folders.items():
        spoil(trainee)
        (checkpoint,) = published(folder)
        said: list[str] = []
        found = answers[wrote] = Found(counters=restore(checkpoint, trainee, plan, DIGEST, said.append))
        same = taken_up(trainee.world, laid_out(wrote)[0].mesh)
        found.chance = same == (not said) if trainee.world.is_first else not said
        gathered(trainee, found)
        batches = batches_of(plan, trainee.world, trainee.model.vocab)
        found.position = str(batches.rows(found.counters.consumed))
        found.counters, found.loss = step(plan, trainee, found.counters)
    return answers


def taken_up(world: World, mesh: Mesh) -> bool:
    """Whether this rank's random state is to be the saved one, since as many read rows, share them, cut tensors and part experts; it is that, or a
    new seed's."""
    state = random_state(world)[f"rng.{world.rank}"]
    same = all(mesh.degree(*axes) == world.layout.mesh.degree(*axes) for axes in (("dp_replicate", "dp_shard"), ("cp",), ("tp",), ("ep",)))
    seed_anew(*((1, 2) if same else (SEED, BEFORE)), world.rank)
    assert torch.equal(state, torch.get_rng_state())
    return same


def spoil(trainee: Trainee) -> None:
    """Leave nothing that could pass for what a checkpoint brings."""
    for name, tensor in tensors(trainee).items():
        if not name.startswith("rng"):
            (tensor.local if isinstance(tensor, Held) else tensor).detach().fill_(9.0)


KINDS = (("llama", "fp32"), ("phi3", "fp32"), ("llama", "bf16-pure"), ("deepseek-v3", "fp32"))
CASES = [(toy, precision, name) for toy, precision in KINDS for name in layouts_of(toy)]
FEW = ("one", "zero1 4", "full 2", "full 2 x tp 2", "cp 2 x tp 2")


def kept(case: tuple[str, str, str]) -> bool:
    """Every layout loads for one family, and most that part experts for one that has them; of the other two what cuts over tensor ranks and what
    cuts over context ranks, from a few."""
    toy, precision, name = case
    if toy in SPARSE:
        return name in ("one", "ep 2 of 4", "hybrid 2 x 2, ep 2", "full 2 x tp 2, ep 2", "cp 2 x tp 2, ep 4")
    return (toy, precision) == ("llama", "fp32") or name in ("full 2 x tp 2", "full 2 x cp 2")


def ranks_of(name: str) -> int:
    return laid_out(name)[0].mesh.num_ranks


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """What every layout saved of a toy (or a few, where not every case is run), made once, with the undisturbed run."""
    made: dict[tuple[str, str], tuple[Found, dict[str, Path], dict[str, Found]]] = {}

    def of(toy: str, precision: str) -> tuple[Found, dict[str, Path], dict[str, Found]]:
        if (toy, precision) not in made:
            every = toy in SPARSE or (toy, precision) == ("llama", "fp32") or request.config.getoption("whole")
            folder = tmp_path_factory.mktemp("saved")
            folders = {name: folder / str(number) for number, name in enumerate(layouts_of(toy) if every else FEW)}
            states: dict[str, Found] = {}
            for num_ranks in (1, 2, 4):
                these = {name: path for name, path in folders.items() if ranks_of(name) == num_ranks}
                states |= run_world(saved, num_ranks, these, toy, precision)[0]
            made[toy, precision] = run_world(undisturbed, 1, toy, precision)[0], folders, states
        return made[toy, precision]

    return of


@pytest.mark.parametrize("case", reduced(CASES, kept), ids=" ".join)
def test_a_layout_loads_what_every_layout_saved(case: tuple[str, str, str], checkpoints: Any, record_proof) -> None:
    toy, precision, name = case
    reference, folders, states = checkpoints(toy, precision)
    ranks = run_world(loaded, ranks_of(name), folders, toy, name, precision)
    for wrote, before in states.items():
        found, position = ranks[0][wrote], {rank[wrote].position for rank in ranks}
        assert not before.torn
        assert not found.torn
        assert all(rank[wrote].chance for rank in ranks)
        assert len(before.digests) == sum(1 + 3 * tensor.trained for tensor in model_of(toy).parameters) + fused(toy) + len(model_of(toy).buffers)
        assert found.digests == before.digests
        assert before.counters == Counters(BEFORE, BEFORE * GLOBAL_BATCH, before.counters.trained_tokens, before.counters.total_tokens)
        assert found.counters == reference.counters
        assert position == {reference.position}
        errors = {}
        if precision == "fp32":
            near = {key: abs(before.norms[key] - norm) / norm for key, norm in reference.norms.items()}
            assert max(near.values()) < 1e-4, near
            errors["worst_relative_loss_error"] = abs(found.loss - reference.loss) / reference.loss
            assert errors["worst_relative_loss_error"] < EXACT, (wrote, errors)
        record_proof("any layout from any other, bit for bit", pairs=1, tensors=len(found.digests), **errors)


def fused(toy: str) -> int:
    """Tensors that a checkpoint has beyond one of each kind, since it keeps fused ones part by part: weight and two moments."""
    parts = [max(len(dim.parts) for dim in tensor.dims) for tensor in model_of(toy).parameters]
    return sum(3 * (number - 1) for number in parts if number > 1)
