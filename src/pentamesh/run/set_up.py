"""Set-up: from a plan and a world to everything that stays the same while the loop runs - model, data, optimizer, and room for checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from pentamesh.checkpoint.disk import check_room
from pentamesh.checkpoint.keep import Retention
from pentamesh.checkpoint.names import published
from pentamesh.checkpoint.saver import Saver
from pentamesh.checkpoint.together import first
from pentamesh.checkpoint.weights import Weights
from pentamesh.errors import InputError
from pentamesh.model.frozen import frozen
from pentamesh.model.read import read_model
from pentamesh.model.spec import ModelSpec
from pentamesh.plan.drift import check_model, model_facts
from pentamesh.plan.plan import Plan
from pentamesh.run.board import Board
from pentamesh.run.data.batches import Batches
from pentamesh.run.data.samples import Samples
from pentamesh.run.data.stream import Stream
from pentamesh.run.folder import RunFolder
from pentamesh.run.initial import drawing
from pentamesh.run.optim import adamw
from pentamesh.run.place import Filler, parameters_of, place
from pentamesh.run.progress import Progress
from pentamesh.run.rows import Rows, rows
from pentamesh.run.source import model_folder, tokenizer_of
from pentamesh.run.state import tensors as state_tensors
from pentamesh.run.step import Trainee
from pentamesh.run.world import World

__all__ = ["Run", "set_up"]


@dataclass(frozen=True)
class Run:
    """Everything that stays the same while the loop runs."""

    plan: Plan
    folder: RunFolder
    world: World
    trainee: Trainee
    rows: Rows
    batches: Batches
    num_steps: int
    progress: Progress
    board: Board
    saver: Saver


def set_up(plan: Plan, folder: RunFolder, world: World) -> Run:
    """A run that is ready for its first step. Collective: every rank calls it.

    Raises PentameshError: for a model or data that cannot be used, and Drift for another model than was planned.
    """
    job = plan.job
    source = _source(plan, folder)
    model = frozen(read_model(str(source)), job.training.freeze)  # its new tokens are in the folder
    check_model(plan.model, model_facts(model), str(source), "plan it again, or put the model back as it was")
    found = rows(job, lambda: tokenizer_of(source, job.data.chat_template), folder, lambda samples: samples.within(model.vocab, str(source)))
    num_steps, in_run = _length(plan, found.train)
    trainee = _trainee(plan, model, source, world)
    first("looking for room for checkpoints", lambda: check_room(folder.checkpoints, _room(trainee, plan, folder, num_steps)))
    batches = Batches(
        found.train,
        job.training.seed,
        job.batch.global_batch,
        job.batch.micro_batch,
        world.share,
        num_rows_in_run=in_run,
        group_by_length=job.batch.group_by_length,
    )
    board = Board(folder.tensorboard if job.logging.tensorboard and world.is_first else None)
    progress, kept = Progress(plan, num_steps, job.logging.every), job.checkpoint
    saver = Saver(folder.checkpoints, Retention.of(kept), asynchronous=plan.memory.copy_bytes > 0, say=progress.say)
    return Run(plan, folder, world, trainee, found, batches, num_steps, progress, board, saver)


def _room(trainee: Trainee, plan: Plan, folder: RunFolder, num_steps: int) -> int:
    """Bytes that checkpoints still need on disk: those that stay over the run and the one being written, less those that are there."""
    each = sum(t.nbytes for t in state_tensors(trainee).values())  # of whole tensors, also where a rank holds a part
    kept = plan.job.checkpoint
    return each * max(1, Retention.of(kept).most(num_steps, kept.every) - len(published(folder.checkpoints)))


def _source(plan: Plan, folder: RunFolder) -> Path:
    first("finding the model", lambda: model_folder(plan.job.model, folder.base))  # downloaded or unpacked once
    return model_folder(plan.job.model, folder.base)


def _length(plan: Plan, train: Samples | Stream) -> tuple[int, int | None]:
    """Optimizer steps of the run, and how many rows it sees where epochs say so (its last step may be smaller)."""
    training = plan.job.training
    if training.steps is not None:
        return training.steps, None
    if training.epochs is None or isinstance(train, Stream):
        raise InputError("the job says neither `training.steps` nor `training.epochs`", where="training")
    in_run = max(1, round(train.num_rows * training.epochs))
    return math.ceil(in_run / plan.job.batch.global_batch), in_run


def _trainee(plan: Plan, model: ModelSpec, source: Path, world: World) -> Trainee:
    module = place(model, plan.layout, plan.policy, plan.precision, world, _filler(plan, model, source))
    parameters = parameters_of(module)
    optimizer = adamw(parameters, model, plan.job.optimizer, plan.precision, world, plan.job.training.seed)
    return Trainee(module, parameters, optimizer, model, plan.policy, world)


def _filler(plan: Plan, model: ModelSpec, source: Path) -> Filler:
    if plan.job.method == "pretrain":
        seed, std = plan.job.training.seed, float(model.config.get("initializer_range", 0.02))
        return drawing(seed, std)
    weights = Weights.open(source)
    weights.check(model)
    return weights.read_into
