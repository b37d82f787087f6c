"""The loop: from a plan and a world to a trained model, with metrics, checkpoints, a receipt and an export."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pentamesh.checkpoint.keep import agreed
from pentamesh.checkpoint.names import point, published
from pentamesh.checkpoint.phases import announce
from pentamesh.checkpoint.together import first, together
from pentamesh.errors import InputError, PentameshError, Problem, RunFailed
from pentamesh.plan.plan import Plan
from pentamesh.plan.receipt import receipt
from pentamesh.run.after import export_run, exported
from pentamesh.run.data.batches import Micro
from pentamesh.run.evaluate import held_out
from pentamesh.run.folder import RunFolder, write_json
from pentamesh.run.measurements import Measurements
from pentamesh.run.optim import learning_rate, set_learning_rate
from pentamesh.run.options import Options
from pentamesh.run.peak import count_allocations, rss_peak_bytes
from pentamesh.run.push import push
from pentamesh.run.set_up import Run, set_up
from pentamesh.run.state import Counters, restore, store
from pentamesh.run.step import StepResult, take_step
from pentamesh.run.world import World
from pentamesh.units import format_path

__all__ = ["MAX_UNUSABLE_STEPS", "Ending", "run"]

# A loss that is not finite may be one bad batch; this many in a row are a broken run.
MAX_UNUSABLE_STEPS = 10


@dataclass(frozen=True)
class Ending:
    """How a run ended: `done` or `stopped`, and every collective of any rank that was not as planned."""

    outcome: str
    drift: tuple[Problem, ...] = ()


def run(plan: Plan, folder: RunFolder, world: World, options: Options) -> Ending:
    """Train as planned. Collective: every rank calls it.

    Raises PentameshError for what can be said clearly; the same on every rank where the cause is shared.
    """
    if world.device.type == "cpu":
        count_allocations()
    torch.manual_seed(plan.job.training.seed + world.rank)
    made = set_up(plan, folder, world)
    counters = _start(made, options)
    measured = Measurements(plan, made.trainee, from_step=counters.step + 1, copy_bytes=lambda: made.saver.copy_bytes)
    last = min(made.num_steps, options.stop_at or made.num_steps)
    if counters.step > last:
        where = "training" if last == made.num_steps else "--stop-at"
        raise InputError(f"the checkpoint is of step {counters.step}, and the run ends at step {last}", where=where, hint="let the run end later")
    with closing(made.rows), made.saver:
        counters = _train(made, counters, last, measured)
    made.board.close()
    if made.world.is_first and counters.step < made.num_steps:
        made.progress.say(f"stopped after step {counters.step} of {made.num_steps}: --resume goes on from there")
    return Ending("done" if counters.step == made.num_steps else "stopped", _finish(made, measured, counters))


def _start(made: Run, options: Options) -> Counters:
    """The counters to go on from: those of the newest checkpoint when resuming, else zero, with the held-out loss before any step.

    Raises InputError where there are checkpoints and none is whole: starting again would write over what may still be mended.
    """
    found = _newest(made) if options.resume else None
    if found is not None:
        counters = restore(found, made.trainee, made.plan, made.rows.digest, made.progress.say)
        made.board.start(counters.step)
        if made.world.is_first:
            made.folder.rewind(counters.step)
            point(found)
            made.progress.say(f"resumed from {found.name}: step {counters.step}, {counters.consumed} samples consumed")
            if counters.step == made.num_steps:
                made.progress.say(f"nothing is left to train: step {counters.step} is the last")
        return counters
    made.board.start(-1)
    if made.world.is_first:
        made.folder.rewind(-1)
        if options.resume:
            made.progress.say("nothing to resume from: starting at step 0")
    _evaluate(made, Counters(), {})
    return Counters()


def _newest(made: Run) -> Path | None:
    folder = made.folder.checkpoints
    found = agreed(folder, say=made.progress.say)
    if found is None and (spoiled := first("counting checkpoints", lambda: len(published(folder)))):
        hint = "put back what was written, or start anew: without --resume in another logging.folder"
        raise InputError(f"none of the {spoiled} checkpoints is as it was written", where=format_path(folder), hint=hint)
    return found


def _train(made: Run, counters: Counters, last: int, measured: Measurements) -> Counters:
    """Go on to step `last`, and save what is due.

    Older checkpoints go when a step after the newest has had a finite loss and gradient, and a step that had not saves nothing before the
    last: weights that nothing can be learned from any more never push out those that were good.
    """
    num_unusable, usable, saved = 0, True, counters.step
    while counters.step < last:
        counters, result, loss = _one_step(made, counters, measured, last, unsaved=usable and counters.step > saved)
        usable = result.is_usable
        num_unusable = 0 if usable else num_unusable + 1
        if num_unusable == MAX_UNUSABLE_STEPS:
            raise _unusable(made, result)
        if usable:
            made.saver.proved()
        if _saves(made, counters.step, last, result):
            _store(made, counters, loss)
            saved = counters.step
    made.saver.settle(proved=usable)
    return counters


def _store(made: Run, counters: Counters, held_out_loss: float | None) -> None:
    """Begin to save the state after a step."""
    store(made.saver.begin, made.trainee, counters, made.plan, made.rows.digest, held_out_loss)


def _saves(made: Run, step: int, last: int, result: StepResult) -> bool:
    """Whether the weights after a step, the one that gave `result`, are saved."""
    return step == last or (result.is_usable and _due(step, made.plan.job.checkpoint.every))


def _one_step(made: Run, counters: Counters, measured: Measurements, last: int, *, unsaved: bool) -> tuple[Counters, StepResult, float | None]:
    """The counters after one more step, what it gave, and the held-out loss after it, where that was due."""
    announce("train")
    job = made.plan.job
    lr = learning_rate(job.optimizer, counters.step, made.num_steps)
    set_learning_rate(made.trainee.optimizer, lr)
    started = time.perf_counter()
    micros = [micro.to(made.world.device, non_blocking=True) for micro in _next(made, counters, unsaved=unsaved)]
    with measured.instruments(micros) as watch:
        result = take_step(made.trainee, micros, job.optimizer.max_grad_norm, watch)
    elapsed_s = time.perf_counter() - started
    after = counters.after(result, job.batch.global_batch)
    measured.add(result, elapsed_s)
    row = _row(made, after, result, lr, measured)
    due = after.step == made.num_steps or _due(after.step, job.training.evaluate_every)
    due = due or (job.checkpoint.keep_best and _saves(made, after.step, last, result))
    loss = _evaluate(made, after, row) if due else None
    if made.world.is_first:
        made.folder.append_metrics(row)
        made.board.add(row)
        made.progress.step(row)
        if result.skipped:
            made.progress.say(f"step {after.step} updated nothing: {result.skipped}")
    return after, result, loss


def _next(made: Run, counters: Counters, *, unsaved: bool) -> list[Micro]:
    """The micro-batches of the next step. Where rows of a stream keep it from being taken, on all ranks alike, what was learned is saved first."""
    try:
        return made.batches.step(counters.consumed)
    except PentameshError as fault:
        try:
            _save_what_was_learned(made, counters, unsaved=unsaved)
        except PentameshError as failed:
            raise RunFailed(*fault.problems, *failed.problems) from fault
        raise


def _save_what_was_learned(made: Run, counters: Counters, *, unsaved: bool) -> None:
    """Save the state before a run ends early, or wait until what is on its way is saved."""
    if unsaved:
        loss = _evaluate(made, counters, {}) if made.plan.job.checkpoint.keep_best else None
        _store(made, counters, loss)
    made.saver.settle(proved=False)


def _unusable(made: Run, last: StepResult) -> RunFailed:
    return RunFailed(
        f"{MAX_UNUSABLE_STEPS} steps in a row had a loss or gradient that is not finite (the last: {last.skipped})",
        where=format_path(made.folder.metrics),
        hint="lower optimizer.lr, add optimizer.warmup_steps, or look at the rows of these steps",
    )


def _row(made: Run, counters: Counters, result: StepResult, lr: float, measured: Measurements) -> dict[str, Any]:
    """One line of metrics.jsonl. Tokens are those of this step; `trained_tokens` and `total_tokens` count the run's."""
    step_s = measured.step_s[-1]
    tokens_per_s = result.num_tokens / step_s
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
        "step_s": step_s,
        "mfu": tokens_per_s * planned,
        "peak_bytes": measured.peak_bytes,
        "rss_peak_bytes": rss_peak_bytes(),
        "skipped": result.skipped or None,
        **({} if result.loads is None else {"experts": result.loads.row()}),
    }


def _evaluate(made: Run, counters: Counters, row: dict[str, Any]) -> float | None:
    """The held-out loss, where the job holds rows out; it is added to `row`, and said."""
    if made.rows.held_out is None:
        return None
    found = held_out(made.trainee.module, made.rows.held_out, made.plan.job.batch.micro_batch, made.trainee.model, made.world)
    row["held_out_loss"] = found.loss
    if made.world.is_first:
        made.folder.append_held_out({"step": counters.step, "held_out_loss": found.loss, "num_tokens": found.num_tokens})
        if not counters.step:  # no row of metrics has it
            made.board.add({"step": 0, "held_out_loss": found.loss})
        made.progress.say(f"held-out loss after step {counters.step}: {found.loss:.4f} over {found.num_tokens:,} trained tokens")
    return found.loss


def _finish(made: Run, measured: Measurements, counters: Counters) -> tuple[Problem, ...]:
    """Write the receipt, and when the run is complete the export, and push it. Returns the collectives, of any rank, that were not as planned."""
    facts, kept = measured.facts(), made.plan.job.checkpoint
    if made.world.is_first and facts is not None:
        write_json(made.folder.receipt, receipt(made.plan, facts))
    drift = tuple(problem for found in together("comparing collectives", measured.drift) for problem in found)
    if counters.step == made.num_steps and kept.export:
        target = first("exporting", lambda: export_run(made.folder.path))
        if made.world.is_first:
            made.progress.say(exported(target, made.plan, made.trainee.model))
        if (repository := kept.push_to_hub) is not None:
            address = first("pushing to the hub", lambda: push(made.folder.path, target, repository, private=kept.private))
            if made.world.is_first:
                made.progress.say(f"pushed to {address}")
    return drift


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
