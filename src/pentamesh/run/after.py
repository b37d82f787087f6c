"""After a run: its checkpoints as models for others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from pentamesh.checkpoint.export import export
from pentamesh.checkpoint.keep import best as best_of
from pentamesh.checkpoint.keep import newest
from pentamesh.checkpoint.names import published
from pentamesh.errors import InputError, Problem
from pentamesh.job.job import Model
from pentamesh.job.precision import ITEMSIZE
from pentamesh.model.gguf import gguf_file
from pentamesh.model.read import read_model, resolved
from pentamesh.model.spec import ModelSpec
from pentamesh.plan.plan import Plan
from pentamesh.run.folder import RunFolder
from pentamesh.run.kept import Kept
from pentamesh.run.push import push
from pentamesh.run.source import model_folder, model_source
from pentamesh.units import format_path

__all__ = ["export_kept", "export_run", "exported", "push_export"]


def export_run(run: Path, target: Path | None = None) -> Path:
    """The Hugging Face folder that a run's newest checkpoint that verifies was written to. Raises InputError."""
    return export_kept(Kept(published(RunFolder(run).checkpoints), RunFolder(run).checkpoints, RunFolder(run)), target)


def export_kept(
    meant: Kept, target: Path | None = None, step: int | None = None, dtype: str | None = None, model: str | None = None, *, best: bool = False
) -> Path:
    """The Hugging Face folder that one of the checkpoints was written to: that of `step`, the `best`, or the newest that verifies.

    Checkpoints that lie apart from their run need the `model` that it started from, and a `target`. Raises InputError.
    """
    if problems := list(_unclear(meant, target, step, model, best)):
        raise InputError(*problems)
    saved = _chosen(meant, step, best)
    plan = Plan.read(meant.run.plan) if meant.run else None
    if model is not None:
        source = model_source(Model(name=resolved(model)))
    else:
        assert plan is not None
        assert meant.run is not None
        source = model_folder(plan.job.model, meant.run.base)
    if plan is not None and plan.job.method == "pretrain" and dtype is None:
        dtype = "float32"  # weights drawn at random have no dtype of the source's to keep
    target = target or (meant.run.export if meant.run else None)
    assert target is not None
    return export(saved, read_model(str(source)), source, target, dtype, chat_template=plan.job.data.chat_template if plan else None)


def push_export(run: Path, exported: Path, repository: str) -> str:
    """The address on the hub that what a run has `exported` was pushed to, private or not as its job says. Raises RunFailed."""
    return push(run, exported, repository, private=Plan.read(RunFolder(run).plan).job.checkpoint.private)


def exported(target: Path, plan: Plan, model: ModelSpec) -> str:
    """What to say of the export of a finished run: where it is, and that its base's dtype is narrower than what was computed in, if it is."""
    kept, computed = str(model.config.get("dtype")), plan.precision.compute
    said = f"exported to {format_path(target)}"
    if plan.job.method == "pretrain" or ITEMSIZE.get(kept, ITEMSIZE[computed]) >= ITEMSIZE[computed]:
        return said
    wider = f"pentamesh export {format_path(target.parent)} --dtype {computed}"
    return f"{said} as {kept}, like the base model; `{wider}` keeps what was trained in {computed}"


def _unclear(meant: Kept, target: Path | None, step: int | None, model: str | None, best: bool) -> Iterator[Problem]:
    if step is not None and best:
        yield Problem(f"--step {step} and --best each name a checkpoint", "--best", "keep one of them")
    elif meant.folder is None and (step is not None or best):
        yield Problem(
            f"{meant.checkpoints[0].name} is one checkpoint already", "--best" if best else "--step", "leave it out, or give the run folder"
        )
    if meant.run is None and model is None:
        what = "the checkpoint lies apart from its run, which would say of which model it is"
        yield Problem(what, "--model", "add --model FOLDER: the model that the run started from, with its config and tokenizer")
    if meant.run is None and target is None:
        yield Problem("nothing says where to write", "--to", "add --to FOLDER")
    if model is not None and gguf_file(Path(resolved(model))):
        yield Problem(f"{model} is a GGUF file", "--model", "give a Hugging Face folder, such as the `base` folder of the run")


def _chosen(meant: Kept, step: int | None, best: bool) -> Path:
    if step is not None or meant.folder is None:
        return meant.of_step(step) if step is not None else meant.checkpoints[0]  # `export` verifies it
    found = (best_of if best else newest)(meant.folder, say=sys.stderr.write)
    if found is None:
        what = "no whole checkpoint has a held-out loss" if best else "there is no checkpoint that can be exported"
        hint = "checkpoint.keep_best and training.evaluate_every evaluate what is saved" if best else "train first: `pentamesh train job.yaml`"
        raise InputError(what, where=str(meant.folder), hint=hint)
    return found
