"""The loop: from a plan and a world to a trained model, with metrics, checkpoints, a receipt and an export."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from pentamesh.checkpoint.disk import check_room
from pentamesh.checkpoint.keep import agreed, published
from pentamesh.checkpoint.together import first
from pentamesh.checkpoint.weights import Weights
from pentamesh.errors import InputError, RunFailed
from pentamesh.layout.rhythm import LedgerRow, ledger, rhythm
from pentamesh.model.read import read_model
from pentamesh.model.spec import ModelSpec
from pentamesh.plan.plan import Plan
from pentamesh.plan.receipt import Measured, receipt
from pentamesh.run.after import export_run
from pentamesh.run.data.batches import Batches
from pentamesh.run.data.prepare import prepare
from pentamesh.run.data.samples import Prepared, open_prepared
from pentamesh.run.evaluate import held_out
from pentamesh.run.folder import RunFolder, write_json
from pentamesh.run.initial import initial
from pentamesh.run.ledger import Recorder, differences
from pentamesh.run.optim import adamw, learning_rate, set_learning_rate
from pentamesh.run.options import Options
from pentamesh.run.peak import measured_peak, rss_peak_bytes, standing_bytes
from pentamesh.run.place import Filler, parameters_of, place
from pentamesh.run.progress import Progress
from pentamesh.run.source import model_folder, tokenizer_of
from pentamesh.run.state import Counters, restore, store
from pentamesh.run.state import tensors as state_tensors
from pentamesh.run.step import StepResult, Trainee, take_step
from pentamesh.run.world import World
from pentamesh.units import format_path

__all__ = ["MAX_UNUSABLE_STEPS", "run"]

# A loss that is not finite may be one bad batch; this many in a row are a broken run.
MAX_UNUSABLE_STEPS = 10


@dataclass
class Measurements:
    """What is gathered for the receipt."""

    step_s: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    ledger: list[LedgerRow] = field(default_factory=list)
    unusable_in_a_row: int = 0


@dataclass(frozen=True)
class Run:
    """Everything that stays the same while the loop runs."""

    plan: Plan
    folder: RunFolder
    world: World
    trainee: Trainee
    prepared: Prepared
    batches: Batches
    num_steps: int
    progress: Progress


def run(plan: Plan, folder: RunFolder, world: World, options: Options) -> str:
    """Train as planned and return `done` or `stopped`. Collective: every rank calls it.

    Raises PentameshError for what can be said clearly; the same on every rank where the cause is shared.
    """
    torch.manual_seed(plan.job.training.seed + world.rank)
    made = _set_up(plan, folder, world)
    counters = _start(made, options)
    measured = Measurements()
    last = min(made.num_steps, options.stop_at or made.num_steps)
    if counters.step > last:
        where = "training" if last == made.num_steps else "--stop-at"
        raise InputError(f"the checkpoint is of step {counters.step}, and the run ends at step {last}", where=where, hint="let the run end later")
    while counters.step < last:
        counters = _one_step(made, counters, measured)
        if counters.step == last or _due(counters.step, plan.job.checkpoint.every):
            store(folder.checkpoints, made.trainee, counters, plan, made.prepared.train_digest)
    _finish(made, measured, counters)
    return "done" if counters.step == made.num_steps else "stopped"


def _set_up(plan: Plan, folder: RunFolder, world: World) -> Run:
    job = plan.job
    source = _source(plan, world)
    model = read_model(str(source))
    prepared = _prepare(plan, model, source, folder)
    num_steps, in_run = _length(plan, len(prepared.train))
    trainee = _trainee(plan, model, source, world)
    first("looking for room for checkpoints", lambda: check_room(folder.checkpoints, _room(trainee, plan, folder)))
    batches = Batches(
        prepared.train,
        job.training.seed,
        job.batch.global_batch,
        job.batch.micro_batch,
        world.data_rank,
        world.data_degree,
        num_samples_in_run=in_run,
    )
    return Run(plan, folder, world, trainee, prepared, batches, num_steps, Progress(plan, num_steps, job.logging.every))


def _room(trainee: Trainee, plan: Plan, folder: RunFolder) -> int:
    """Bytes that checkpoints still need on disk: those that are kept and the one being written, less those that are there."""
    each = sum(t.nbytes for t in state_tensors(trainee).values())  # of whole tensors, also where a rank holds a part
    return each * max(1, plan.job.checkpoint.keep + 1 - len(published(folder.checkpoints)))


def _source(plan: Plan, world: World) -> Path:
    first("finding the model", lambda: model_folder(plan.job.model, Path()))  # a download happens once
    return model_folder(plan.job.model, Path())


def _prepare(plan: Plan, model: ModelSpec, source: Path, folder: RunFolder) -> Prepared:
    """Tokenise once, on rank 0; every rank then maps the same files."""

    def work() -> None:
        prepare(plan.job, tokenizer_of(source), Path(), folder.data)

    first("preparing the data", work)
    found = open_prepared(folder.data)
    held_out = found.held_out and found.held_out.within(model.vocab, str(source))
    return replace(found, train=found.train.within(model.vocab, str(source)), held_out=held_out)


def _length(plan: Plan, num_samples: int) -> tuple[int, int | None]:
    """Optimizer steps of the run, and how many samples it sees where epochs say so (its last step may be smaller)."""
    training = plan.job.training
    if training.steps is not None:
        return training.steps, None
    if training.epochs is None:
        raise InputError("the job says neither `training.steps` nor `training.epochs`", where="training")
    in_run = max(1, round(num_samples * training.epochs))
    return math.ceil(in_run / plan.job.batch.global_batch), in_run


def _trainee(plan: Plan, model: ModelSpec, source: Path, world: World) -> Trainee:
    module = place(model, plan.layout, plan.policy, plan.precision, world, _filler(plan, model, source, world))
    parameters = parameters_of(module)
    return Trainee(module, parameters, adamw(parameters, model, plan.job.optimizer, plan.precision), model, plan.policy, world)


def _filler(plan: Plan, model: ModelSpec, source: Path, world: World) -> Filler:
    if plan.job.method == "pretrain":
        seed, std = plan.job.training.seed, float(model.config.get("initializer_range", 0.02))
        return lambda tensor, held, rank, dtype: initial(tensor, held, rank, seed=seed, std=std, dtype=dtype, device=world.device)
    weights = Weights.open(source)
    weights.check(model)
    return lambda tensor, held, rank, dtype: weights.read(tensor, held, rank, dtype, world.device)


def _start(made: Run, options: Options) -> Counters:
    """The counters to go on from: those of the newest checkpoint when resuming, else zero, with the held-out loss before any step."""
    found = agreed(made.folder.checkpoints, say=made.progress.say) if options.resume else None
    if found is not None:
        counters = restore(found, made.trainee, made.plan, made.prepared.train_digest)
        if made.world.is_first:
            made.folder.rewind(counters.step)
            made.progress.say(f"resumed from {found.name}: step {counters.step}, {counters.consumed} samples consumed")
        return counters
    if made.world.is_first:
        made.folder.rewind(-1)
        if options.resume:
            made.progress.say("nothing to resume from: starting at step 0")
    _evaluate(made, Counters(), {})
    return Counters()


def _one_step(made: Run, counters: Counters, measured: Measurements) -> Counters:
    job, index = made.plan.job, len(measured.step_s)
    lr = learning_rate(job.optimizer, counters.step, made.num_steps)
    set_learning_rate(made.trainee.optimizer, lr)
    started = time.perf_counter()
    micros = [micro.to(made.world.device, non_blocking=True) for micro in made.batches.step(counters.consumed)]
    with _instruments(made, measured, index):
        result = take_step(made.trainee, micros, job.optimizer.max_grad_norm)
    elapsed = time.perf_counter() - started
    after = counters.after(result, job.batch.global_batch)
    _note(made, measured, result, elapsed)
    row = _row(made, after, result, lr, elapsed, measured.peak_bytes)
    if after.step == made.num_steps or _due(after.step, job.training.evaluate_every):
        _evaluate(made, after, row)
    if made.world.is_first:
        made.folder.append_metrics(row)
        made.progress.step(row)
        if result.skipped:
            made.progress.say(f"step {after.step} updated nothing: {result.skipped}")
    return after


@contextmanager
def _instruments(made: Run, measured: Measurements, index: int) -> Iterator[None]:
    """Measure the peak in the first two steps of this start and record the ledger of the second: the first one sets things up."""
    with ExitStack() as stack:
        peak = recorder = None
        if index < 2 or made.world.device.type == "cuda":
            standing = [*state_tensors(made.trainee).values(), *(p.grad for p in made.trainee.parameters.values() if p.grad is not None)]
            peak = stack.enter_context(measured_peak(made.world.device, standing))
        if index == 1:
            recorder = stack.enter_context(Recorder(made.world))
        yield
    if peak is not None:
        measured.peak_bytes = max(measured.peak_bytes, peak.peak_bytes)
    if recorder is not None:
        measured.ledger = recorder.rows()


def _note(made: Run, measured: Measurements, result: StepResult, elapsed: float) -> None:
    measured.step_s.append(elapsed)
    measured.num_tokens.append(result.num_tokens)
    measured.losses.append(result.loss)
    measured.unusable_in_a_row = measured.unusable_in_a_row + 1 if result.skipped and result.num_trained_tokens else 0
    if measured.unusable_in_a_row == MAX_UNUSABLE_STEPS:
        raise RunFailed(
            f"{MAX_UNUSABLE_STEPS} steps in a row had a loss or gradient that is not finite (the last: {result.skipped})",
            where=format_path(made.folder.metrics),
            hint="lower optimizer.lr, add optimizer.warmup_steps, or look at the rows of these steps",
        )


def _row(made: Run, counters: Counters, result: StepResult, lr: float, elapsed: float, peak_bytes: int) -> dict[str, Any]:
    """One line of metrics.jsonl. Tokens are those of this step; `trained_tokens` and `total_tokens` count the run's."""
    tokens_per_s = result.num_tokens / elapsed
    planned = made.plan.mfu / made.plan.tokens_per_s if made.plan.tokens_per_s else 0.0
    return {
        "step": counters.step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": lr,
        "tokens": {"trained": result.num_trained_tokens, "total": result.num_tokens},
        "trained_tokens": counters.trained_tokens,
        "total_tokens": counters.total_tokens,
        "consumed_samples": counters.consumed,
        "tokens_per_s": tokens_per_s,
        "step_s": elapsed,
        "mfu": tokens_per_s * planned,
        "peak_bytes": peak_bytes,
        "rss_peak_bytes": rss_peak_bytes(),
        "skipped": result.skipped or None,
    }


def _evaluate(made: Run, counters: Counters, row: dict[str, Any]) -> None:
    """Add the held-out loss to `row`, and say it."""
    if made.prepared.held_out is None:
        return
    found = held_out(made.trainee.module, made.prepared.held_out, made.plan.job.batch.micro_batch, made.world)
    row["held_out_loss"] = found.loss
    if made.world.is_first:
        made.folder.append_held_out({"step": counters.step, "held_out_loss": found.loss, "num_tokens": found.num_tokens})
        made.progress.say(f"held-out loss after step {counters.step}: {found.loss:.4f} over {found.num_tokens:,} trained tokens")


def _finish(made: Run, measured: Measurements, counters: Counters) -> None:
    """Write the receipt, and the export when the run is complete. The peak is that of the fullest rank."""
    peak, rss = (int(n) for n in made.world.max([measured.peak_bytes, rss_peak_bytes()]))
    if made.world.is_first and measured.step_s:
        _write_receipt(made, measured, peak, rss)
    if counters.step == made.num_steps and made.plan.job.checkpoint.export:
        target = first("exporting", lambda: export_run(made.folder.path))
        if made.world.is_first:
            made.progress.say(f"exported to {format_path(target)}")


def _write_receipt(made: Run, measured: Measurements, peak: int, rss: int) -> None:
    plan = made.plan
    predicted = ledger(rhythm(made.trainee.model, plan.layout, plan.policy, plan.precision, plan.job.batch.seq_len))
    states = [t for name, t in state_tensors(made.trainee).items() if not name.startswith("rng")]
    facts = Measured(
        step_s=tuple(measured.step_s),
        num_tokens=tuple(measured.num_tokens),
        peak_bytes=peak,
        rss_peak_bytes=rss,
        # Gradients stand where weights do, in the same shape and dtype, when a step needs them.
        states_bytes=standing_bytes(states) + standing_bytes(made.trainee.parameters.values()),
        ledger=tuple(measured.ledger),
        predicted_ledger=tuple(predicted),
        first_loss=measured.losses[0],
        last_loss=measured.losses[-1],
    )
    write_json(made.folder.receipt, receipt(plan, facts))
    if measured.ledger and (found := differences(predicted, measured.ledger)):
        made.progress.say("the collectives of step 2 are not the predicted ones:\n  " + "\n  ".join(found))


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
