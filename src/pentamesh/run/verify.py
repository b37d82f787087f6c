"""`verify`: the same job on one process and on many, compared number by number - and its collectives with the predicted ones.

A trial is a small model, a layout and a few steps on made-up samples of uneven length. In float64 the comparison leaves nothing to rounding:
losses and every gradient agree to 1e-10 or the layout is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from pentamesh.job.job import Optimizer
from pentamesh.job.precision import PRECISIONS
from pentamesh.layout.crossings import LedgerRow, ledger
from pentamesh.layout.mesh import Layout, Mesh
from pentamesh.layout.policy import Policy
from pentamesh.layout.rhythm import rhythm
from pentamesh.layout.rules import copies, on_expert_view
from pentamesh.layout.split import split
from pentamesh.model.dims import TensorSpec
from pentamesh.model.families import describe
from pentamesh.model.frozen import frozen
from pentamesh.model.roles import Role
from pentamesh.model.spec import ModelSpec
from pentamesh.run.arrivals import arrivals, by_micro_batch
from pentamesh.run.balance import Loads
from pentamesh.run.data.batches import Batches
from pentamesh.run.data.order import Row
from pentamesh.run.data.samples import Samples
from pentamesh.run.initial import drawing
from pentamesh.run.ledger import Recorder
from pentamesh.run.optim import adamw
from pentamesh.run.place import local, parameters_of, place, unwrapped
from pentamesh.run.step import Trainee, take_step
from pentamesh.run.world import World, join, leave
from pentamesh.run.worlds import run_world

__all__ = ["Outcome", "Trial", "compare", "errors", "fake_outcome", "outcome", "predicted_ledger", "toy_samples"]


@dataclass(frozen=True)
class Trial:
    """A small job: a config.json's worth of model, what of it is frozen, a layout, a policy and how many steps of which global batch, of rows that
    hold one sample each or several."""

    config: dict[str, Any]
    layout: Layout = field(default_factory=Layout)
    policy: Policy = field(default_factory=Policy)
    precision: str = "fp64"
    num_steps: int = 3
    global_batch: int = 8
    longest: int = 24
    in_a_row: int = 1
    freeze: tuple[str, ...] = ()
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(lr=1e-3, weight_decay=0.1, max_grad_norm=0.5))
    seed: int = 7

    @property
    def model(self) -> ModelSpec:
        spec = describe(self.config, "toy")
        if spec is None:
            raise ValueError(f"no family describes {self.config.get('model_type')}")
        return frozen(spec, self.freeze)

    def alone(self) -> Trial:
        """The same samples on one process, each in a row of its own, with the whole batch accumulated there."""
        rows = self.global_batch * self.in_a_row
        policy = replace(self.policy, grad_accum=rows // self.policy.micro_batch)
        return replace(self, layout=Layout(Mesh()), policy=policy, global_batch=rows, in_a_row=1)


@dataclass(frozen=True)
class InRows(Batches):
    """Rows of so many samples, one after the other."""

    in_a_row: int = 1

    def _rows(self, first: int, stop: int) -> list[Row]:
        alone = super()._rows(first * self.in_a_row, stop * self.in_a_row)
        return [tuple(index for row in alone[at : at + self.in_a_row] for index in row) for at in range(0, len(alone), self.in_a_row)]


@dataclass
class Outcome:
    """What a trial produced on one rank: per step the loss, norm, gradients and how even the loads of experts were; the final parameters, and buffers
    of the model's files; the last step's ledger, the lengths of the rows of its micro-batches, how many samples these hold, and the rows that came to
    its experts in each of their sparse layers; placements checked."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, np.ndarray]] = field(default_factory=list)
    parameters: dict[str, np.ndarray] = field(default_factory=dict)
    ledger: list[LedgerRow] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    came: list[list[int]] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    loads: list[Loads | None] = field(default_factory=list)
    num_tensors_checked: int = 0
    split_errors: list[str] = field(default_factory=list)


def toy_samples(seed: int, num_samples: int, vocab: int, longest: int) -> Samples:
    """`num_samples` samples of 2 to `longest` tokens below `vocab`, whose tokens are trained with a probability of each sample's own."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(2, longest + 1, num_samples)
    offsets = np.cumsum(lengths) - lengths
    tokens = draw.integers(0, vocab, lengths.sum()).astype(np.int32)
    trained = draw.random(lengths.sum()) < np.repeat(draw.random(num_samples), lengths)
    return Samples(tokens, trained, np.stack([offsets, lengths], axis=1), int((lengths - 1).sum()), int(trained.sum()), pad_id=0)


def outcome(trial: Trial) -> Outcome:
    """Run a trial on this process's world, and return what came out; gradients and parameters are whole, on rank 0 only."""
    world = join(trial.layout, "cpu")
    trainee, found = _trainee(trial, world), Outcome()
    _check_splits(trainee, found, trial)
    _steps(trial, trainee, found, watch=lambda t: _keep_gradients(t, found))
    found.parameters = {t.name: _whole(trainee.parameters[t.name], t, world, found) for t in trainee.model.parameters}
    buffers = dict(unwrapped(trainee.module).named_buffers())
    found.parameters |= {t.name: _whole(buffers[t.name], t, world, found) for t in trainee.model.buffers}
    return found


def fake_outcome(trial: Trial, rank: int) -> Outcome:
    """What one rank of the trial's world holds and which collectives it makes, in a process of its own: its peers are made up.

    Numbers mean nothing, since nothing is really sent; shapes, first contents and collectives are those of the real world, however large.
    DistributedDataParallel does not run on such a group.
    """
    size = trial.layout.mesh.num_ranks
    leave()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    trainee, found = _trainee(trial, join(trial.layout, "cpu")), Outcome()
    _check_splits(trainee, found, trial)
    _steps(trial, trainee, found)
    return found


def _steps(trial: Trial, trainee: Trainee, found: Outcome, watch: Callable[[Trainee], None] | None = None) -> None:
    world = trainee.world
    samples = toy_samples(trial.seed, trial.global_batch * trial.num_steps * trial.in_a_row, trainee.model.vocab, trial.longest)
    batches = InRows(samples, trial.seed, trial.global_batch, trial.policy.micro_batch, world.share, in_a_row=trial.in_a_row)
    for step in range(trial.num_steps):
        micros = batches.step(step * trial.global_batch)
        with Recorder(world) as recorder, arrivals(trainee.module) as came:
            result = take_step(trainee, micros, trial.optimizer.max_grad_norm, watch=watch)
        found.losses.append(result.loss)
        found.norms.append(result.grad_norm)
        found.loads.append(result.loads)
        found.samples = [len(micro.sizes) for micro in micros if micro.sizes is not None]
        found.ledger, found.lengths = recorder.rows(), [world.share.row_length(micro.input_ids.shape[1]) for micro in micros]
        found.came = by_micro_batch(came, len(micros))


def predicted_ledger(trial: Trial, found: Outcome, rank: int = 0) -> list[LedgerRow]:
    """What `layout.rhythm` says a steady step of this trial moves, on a rank the rows of whose micro-batches have these lengths, and to whose experts
    so many rows came."""
    return ledger(rhythm(trial.model, trial.layout, trial.policy, PRECISIONS[trial.precision], found.lengths, rank, found.came, found.samples))


def compare(trial: Trial) -> dict[str, float]:
    """Worst relative errors of a trial on its own number of processes against one: `loss`, `norm`, `gradient`, `parameter`."""
    many = run_world(outcome, trial.layout.mesh.num_ranks, trial)[0]
    alone = run_world(outcome, 1, trial.alone())[0]
    return errors(many, alone)


def errors(many: Outcome, alone: Outcome) -> dict[str, float]:
    """Relative errors between two outcomes; a tensor's is the norm of the difference over the norm of the reference."""
    gradients = [_relative(m[name], a[name]) for m, a in zip(many.gradients, alone.gradients, strict=True) for name in a]
    return {
        "loss": max(abs(m - a) / abs(a) for m, a in zip(many.losses, alone.losses, strict=True)),
        "norm": max(abs(m - a) / abs(a) for m, a in zip(many.norms, alone.norms, strict=True)),
        "first_gradient": max(_relative(many.gradients[0][name], alone.gradients[0][name]) for name in alone.gradients[0]),
        "gradient": max(gradients),
        "parameter": max(_relative(many.parameters[name], alone.parameters[name]) for name in alone.parameters),
    }


def _relative(found: np.ndarray, reference: np.ndarray) -> float:
    scale = float(np.linalg.norm(reference))
    return float(np.linalg.norm(found - reference)) / (scale or 1.0)


def _trainee(trial: Trial, world: World) -> Trainee:
    precision, model = PRECISIONS[trial.precision], trial.model
    module = place(model, trial.layout, trial.policy, precision, world, drawing(trial.seed))
    parameters = parameters_of(module)
    optimizer = adamw(parameters, model, trial.optimizer, precision, world, trial.seed)
    return Trainee(module, parameters, optimizer, model, trial.policy, world)


def _check_splits(trainee: Trainee, found: Outcome, trial: Trial) -> None:
    """Compare what this rank holds, filled by boxes, with the part that DTensor cuts for it out of the whole tensor."""
    for tensor in trainee.model.parameters:
        held = split(tensor, Role.STATE, trainee.world.layout)
        mine = local(trainee.parameters[tensor.name]).detach()
        theirs = _cut_by_torch(tensor, trial, trainee)
        if mine.shape != theirs.shape or tuple(mine.shape) != held.local_shape(trainee.world.rank) or not torch.equal(mine, theirs):
            found.split_errors.append(f"rank {trainee.world.rank}: {held}")
        found.num_tensors_checked += 1


def _cut_by_torch(tensor: TensorSpec, trial: Trial, trainee: Trainee) -> torch.Tensor:
    """The part of the whole tensor that DTensor gives this rank: cut along the tensor axis, and of that as its parameter is placed."""
    world, parameter = trainee.world, trainee.parameters[tensor.name]
    part = torch.empty(tensor.shape, dtype=parameter.dtype)
    drawing(trial.seed)(tensor, split(tensor, Role.STATE, Layout()), 0, part)
    cut = [position for position, cuts in enumerate(split(tensor, Role.USE, world.layout).cuts) if cuts]
    if on_expert_view(tensor, world.layout):
        part = part.chunk(world.layout.mesh.ep, dim=0)[world.layout.mesh.coord(world.rank, ("ep",))]
    elif cut and (shared := copies(tensor.dims[cut[0]], world.layout.mesh.tp)) > 1:
        part = part.chunk(world.layout.mesh.tp // shared, dim=cut[0])[world.layout.mesh.coord(world.rank, ("tp",)) // shared]
    elif cut:
        fused = part.split(list(tensor.dims[cut[0]].parts) or tensor.shape[cut[0]], dim=cut[0])
        pieces = [distribute_tensor(one, world.mesh["tp"], [Shard(cut[0])], src_data_rank=None).to_local() for one in fused]
        part = torch.cat(pieces, dim=cut[0])
    if isinstance(parameter, DTensor):
        part = distribute_tensor(part, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
    return part


def _keep_gradients(trainee: Trainee, found: Outcome) -> None:
    grads = {t: trainee.parameters[t.name].grad for t in trainee.model.parameters}
    found.gradients.append({t.name: _whole(grad, t, trainee.world, found) for t, grad in grads.items() if grad is not None})


def _whole(held: torch.Tensor, tensor: TensorSpec, world: World, found: Outcome) -> np.ndarray:
    """The whole tensor on rank 0, put together from the boxes of all ranks, an empty one elsewhere; copies that differ are noted.

    Not part of the step: its collectives are not recorded.
    """
    boxes, mine = split(tensor, Role.STATE, world.layout).boxes(world.rank), local(held).detach().double().cpu().numpy()
    everyone: list[Any] = [(boxes, mine)]
    if world.num_ranks > 1:
        everyone = [None] * world.num_ranks
        with _disable_current_modes():
            dist.gather_object((boxes, mine), everyone if world.is_first else None)
    if not world.is_first:
        return np.empty(0)
    whole = np.full(tensor.shape, np.nan)
    for rank, (theirs, part) in enumerate(everyone):
        for box in theirs:
            there = whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))]
            here = part[tuple(slice(o, o + n) for o, n in zip(box.local_offset, box.size, strict=True))]
            if not (np.isnan(there) | (there == here)).all():
                found.split_errors.append(f"rank {rank} has another {tensor.name} than the ranks before it")
            there[...] = here
    return whole
