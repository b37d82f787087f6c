"""The state of a run: everything that a checkpoint keeps, and that a resumed run continues from bit by bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch

from pentamesh.checkpoint.held import held
from pentamesh.checkpoint.load import load
from pentamesh.checkpoint.manifest import Manifest
from pentamesh.checkpoint.together import first, together
from pentamesh.errors import InputError
from pentamesh.layout.split import split
from pentamesh.model.roles import Role
from pentamesh.plan.plan import Plan
from pentamesh.run.chance import random_state, saved_by, seed_anew, set_random_state
from pentamesh.run.optim import STATE_NAMES
from pentamesh.run.place import local, unwrapped
from pentamesh.run.step import StepResult, Trainee

__all__ = ["Counters", "restore", "store", "tensors"]


T = TypeVar("T")


@dataclass(frozen=True)
class Counters:
    """How far a run is. `consumed` samples over all ranks decide which comes next; nothing else does."""

    step: int = 0
    consumed: int = 0
    trained_tokens: int = 0
    total_tokens: int = 0
    skipped_steps: int = 0

    def after(self, result: StepResult, global_batch: int) -> Counters:
        """The counters after one more step."""
        return Counters(
            self.step + 1,
            self.consumed + global_batch,
            self.trained_tokens + result.num_trained_tokens,
            self.total_tokens + result.num_tokens,
            self.skipped_steps + bool(result.skipped),
        )


def tensors(trainee: Trainee, *, shared: bool = False) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by name: weights, moments of those that are trained, step counts, buffers that the model's files have
    and each rank's random state.

    With `shared`, of what several ranks hold each has its share only: what it saves.
    """
    found: dict[str, torch.Tensor] = {}
    rank, layout = trainee.world.rank, trainee.world.layout
    for tensor in trainee.model.parameters:
        parameter, kept = trainee.parameters[tensor.name], split(tensor, Role.STATE, layout)
        found |= held(f"model.{tensor.name}", local(parameter.detach()), kept, rank, shared=shared)
        for name in STATE_NAMES if tensor.trained else ():
            value = trainee.optimizer.state[parameter][name]
            own = f"optimizer.{tensor.name}.{name}"
            found |= held(own, local(value), kept, rank, shared=shared) if value.ndim else {own: value}
    buffers = dict(unwrapped(trainee.module).named_buffers())
    for tensor in trainee.model.buffers:
        found |= held(f"model.{tensor.name}", buffers[tensor.name], split(tensor, Role.STATE, layout), rank, shared=shared)
    return found | random_state(trainee.world)


Save = Callable[[int, Mapping[str, torch.Tensor], Mapping[str, Any]], T]


def store(save: Save[T], trainee: Trainee, counters: Counters, plan: Plan, data: str, held_out_loss: float | None = None) -> T:
    """What `save` makes of the step, its tensors and its facts; `data` is the digest of the training samples. Collective.

    `held_out_loss` is that of its weights, where they were evaluated.
    """
    facts: dict[str, Any] = {
        "counters": asdict(counters),
        "data": {"consumed": counters.consumed, **_order(plan, data)},
        "precision": plan.precision.name,
        "layout": plan.to_json()["layout"],
        "plan": plan.fingerprint,
        "world_size": trainee.world.num_ranks,
        "saved_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    if held_out_loss is not None:
        facts["held_out_loss"] = held_out_loss if math.isfinite(held_out_loss) else None  # JSON has no NaN
    return save(counters.step, tensors(trainee, shared=True), facts)


def _order(plan: Plan, data: str) -> dict[str, Any]:
    """What decides which samples come when: themselves, the seed, and how many are grouped to a step, where steps are of like length."""
    batch = plan.job.batch
    return {"digest": data, "seed": plan.job.training.seed, "grouped": batch.global_batch if batch.group_by_length else None}


def restore(path: Path, trainee: Trainee, plan: Plan, data: str, say: Callable[[str], object]) -> Counters:
    """Fill the trainee from a checkpoint that verifies, whatever layout wrote it, and return how far it was. Collective.

    Each rank takes up its own random state where ranks are what they were; else it seeds itself anew, which the first rank `say`s.

    Raises InputError when the samples or their order are not those that the checkpoint has consumed a part of: its place in them would mean
    nothing.
    """
    world, seed = trainee.world, plan.job.training.seed
    manifest = first("reading the manifest", lambda: Manifest.read(path))
    counters = _counters(manifest, path, _order(plan, data))
    found, own = tensors(trainee), random_state(world)
    wrote = saved_by(manifest.facts.get("layout"), world.layout.mesh)
    goes_on = all(together("comparing ranks", lambda: wrote is None and own.keys() <= manifest.tensors.keys()))
    if not goes_on:
        found = {name: tensor for name, tensor in found.items() if name not in own}
    load(path, found, verified=True)
    if goes_on:
        set_random_state(found, world)
        return counters
    seed_anew(seed, counters.step, world.rank)
    if world.is_first:
        say(f"{path.name} was saved by {wrote or 'other devices'}, not {world.layout.mesh}: every rank seeds its random numbers anew")
    return counters


def _counters(manifest: Manifest, path: Path, order: dict[str, Any]) -> Counters:
    """How far the run was. Raises InputError where the manifest does not say, or its samples came in another order."""
    try:
        counters = Counters(**{name: int(count) for name, count in manifest.facts["counters"].items()})
        trained_on = {key: manifest.facts["data"][key] for key in order}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"the manifest does not say how far the run was: {type(error).__name__} {error}", where=str(path)) from None
    if trained_on != order:
        hint = "give it the same rows, held-out share, seed, lengths, grouping and tokenizer, or start anew in another logging.folder"
        raise InputError(f"the training data is not what {path.name} was trained on", where="data", hint=hint)
    return counters
