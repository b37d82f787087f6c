"""The state of a run: everything that a checkpoint keeps, and that a resumed run continues from bit by bit."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pentamesh.checkpoint.load import load
from pentamesh.checkpoint.save import save
from pentamesh.errors import InputError
from pentamesh.plan.plan import Plan
from pentamesh.run.optim import STATE_NAMES
from pentamesh.run.place import whole_view
from pentamesh.run.step import StepResult, Trainee

__all__ = ["Counters", "restore", "store", "tensors"]


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


def tensors(trainee: Trainee) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by name: weights, moments, step counts and each rank's random state."""
    found: dict[str, torch.Tensor] = {}
    for tensor in trainee.model.parameters:
        parameter = trainee.parameters[tensor.name]
        state = trainee.optimizer.state[parameter]
        found[f"model.{tensor.name}"] = whole_view(parameter.detach(), tensor, trainee.world)
        for part in STATE_NAMES:
            whole = state[part].ndim > 0
            found[f"optimizer.{tensor.name}.{part}"] = whole_view(state[part], tensor, trainee.world) if whole else state[part]
    found[f"rng.{trainee.world.rank}"] = torch.get_rng_state()
    if trainee.world.device.type == "cuda":
        found[f"rng_cuda.{trainee.world.rank}"] = torch.cuda.get_rng_state(trainee.world.device)
    return found


def store(folder: Path, trainee: Trainee, counters: Counters, plan: Plan, data: str) -> Path:
    """Save a checkpoint and return its path; `data` is the digest of the training samples. Collective."""
    facts: dict[str, Any] = {
        "counters": asdict(counters),
        "data": {"seed": plan.job.training.seed, "consumed": counters.consumed, "digest": data},
        "precision": plan.precision.name,
        "layout": plan.to_json()["layout"],
        "plan": plan.fingerprint,
        "world_size": trainee.world.num_ranks,
    }
    return save(folder, counters.step, tensors(trainee), facts)


def restore(path: Path, trainee: Trainee, plan: Plan, data: str) -> Counters:
    """Fill the trainee from a checkpoint that verifies and return how far it was. Collective.

    Raises InputError when the samples or their order are not those that the checkpoint has consumed a part of: its place in them would mean
    nothing.
    """
    found = tensors(trainee)
    facts = load(path, found, verified=True)
    try:
        counters = Counters(**{name: int(count) for name, count in facts["counters"].items()})
        trained_on = facts["data"]["digest"], facts["data"]["seed"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"the manifest does not say how far the run was: {type(error).__name__} {error}", where=str(path)) from None
    if trained_on != (data, plan.job.training.seed):
        hint = "give it the same rows, held-out share, seed, lengths and tokenizer, or start anew in another logging.folder"
        raise InputError(f"the training data is not what {path.name} was trained on", where="data", hint=hint)
    torch.set_rng_state(found[f"rng.{trainee.world.rank}"])
    if trainee.world.device.type == "cuda":
        torch.cuda.set_rng_state(found[f"rng_cuda.{trainee.world.rank}"], trainee.world.device)
    return counters
