"""After a run: its checkpoints as models for others."""

from __future__ import annotations

import sys
from pathlib import Path

from pentamesh.checkpoint.export import export
from pentamesh.checkpoint.keep import name_of, newest
from pentamesh.checkpoint.manifest import verify
from pentamesh.errors import InputError, Problem
from pentamesh.job.precision import ITEMSIZE
from pentamesh.model.read import read_model
from pentamesh.model.spec import ModelSpec
from pentamesh.plan.plan import Plan
from pentamesh.run.folder import RunFolder
from pentamesh.run.push import push
from pentamesh.run.source import model_folder
from pentamesh.units import format_path

__all__ = ["export_run", "exported", "push_export"]


def export_run(run: Path, target: Path | None = None, step: int | None = None, dtype: str | None = None) -> Path:
    """The Hugging Face folder that a run's checkpoint was written to: of `step`, or the newest that verifies. Raises InputError."""
    folder = RunFolder(run)
    if not folder.plan.is_file():
        raise InputError(
            f"{run} is no run folder: it has no {folder.plan.name}", where=str(run), hint="give the folder that `pentamesh train` wrote to"
        )
    plan = Plan.read(folder.plan)
    saved = _saved(folder, step)
    source = model_folder(plan.job.model, folder.base)
    # Weights drawn at random have no dtype of the source's to keep.
    weights = "float32" if plan.job.method == "pretrain" and dtype is None else dtype
    return export(saved, read_model(str(source)), source, target or folder.export, weights, chat_template=plan.job.data.chat_template)


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


def _saved(folder: RunFolder, step: int | None) -> Path:
    if step is None:
        found = newest(folder.checkpoints, say=sys.stderr.write)
        if found is None:
            raise InputError(f"{folder.path} has no checkpoint that can be exported", hint="train first: `pentamesh train job.yaml`")
        return found
    path = folder.checkpoints / name_of(step)
    if not path.is_dir():
        there = ", ".join(p.name for p in sorted(folder.checkpoints.glob("step-*"))) or "none"
        raise InputError(f"there is no checkpoint of step {step}", where=str(folder.checkpoints), hint=f"there are: {there}")
    if problems := verify(path):
        raise InputError(*(p if isinstance(p, Problem) else Problem(str(p)) for p in problems))
    return path
