"""Held-out loss: the mean over trained tokens of rows that are never trained on, in a run or of any model folder."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from pentamesh.checkpoint.weights import Weights
from pentamesh.errors import InputError, RunFailed
from pentamesh.job.job import Job
from pentamesh.job.precision import Precision
from pentamesh.layout.mesh import TOKEN_AXES, Layout
from pentamesh.layout.policy import Policy
from pentamesh.model.read import read_model
from pentamesh.model.spec import ModelSpec
from pentamesh.run.data.batches import held_out_batches
from pentamesh.run.data.held_out import prepare_held_out
from pentamesh.run.data.pace import Pace
from pentamesh.run.data.samples import Samples
from pentamesh.run.loss import weighted_loss
from pentamesh.run.place import place
from pentamesh.run.source import tokenizer_of
from pentamesh.run.world import World, join

__all__ = ["HeldOut", "evaluate", "held_out"]


@dataclass(frozen=True)
class HeldOut:
    """Mean loss per trained token over `num_tokens` of them."""

    loss: float
    num_tokens: int


def evaluate(job: Job, folder: Path, precision: Precision) -> HeldOut:
    """The loss of the model in `folder` on the held-out rows of `job` (with absolute paths), in one process.

    Raises InputError without such rows, and RunFailed where the loss is not finite.
    """
    world = join(Layout())
    model = read_model(str(folder))
    weights = Weights.open(folder)
    weights.check(model)
    with tempfile.TemporaryDirectory(prefix="pentamesh-") as scratch:
        tokenizer = tokenizer_of(folder, job.data.chat_template)
        samples = prepare_held_out(job, tokenizer, Path(), Path(scratch) / "data", progress=Pace())
        if samples is None:
            raise InputError("the job holds no rows out", where="data.held_out", hint="give a file of held-out rows, or a share such as 0.05")
        samples = samples.within(model.vocab, model.name)
        module = place(model, Layout(), Policy(), precision, world, weights.read_into)
        found = held_out(module, samples, job.batch.micro_batch, model, world)
    if not math.isfinite(found.loss):
        raise RunFailed(f"the held-out loss is {found.loss}: the model computes what is not finite in {precision.name}", where=str(folder))
    return found


@torch.no_grad()
def held_out(module: nn.Module, samples: Samples, micro_batch: int, model: ModelSpec, world: World) -> HeldOut:
    """The held-out loss of the whole set; every rank computes its share, in as many micro-batches as every other."""
    was_training = module.training
    module.eval()
    loss_sum, num_tokens = 0.0, 0
    for micro in held_out_batches(samples, micro_batch, world.share):
        micro = micro.to(world.device)
        loss_sum += float(weighted_loss(module, micro, model, world))
        num_tokens += micro.num_trained
    module.train(was_training)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # without a backward nothing else frees what was gathered, and the next step would start with it
    total_loss, total_tokens = world.sum([loss_sum, float(num_tokens)], TOKEN_AXES)
    return HeldOut(total_loss / max(1.0, total_tokens), int(total_tokens))
