"""Asked: what somebody wants trained, from a job file, a plan or a command line; and the plan of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pentamesh.errors import InputError
from pentamesh.job.hardware import Hardware, read_hardware, started_hardware
from pentamesh.job.job import Job
from pentamesh.job.read import check_trainable, is_hub_data, read_job, resolve
from pentamesh.job.started import started
from pentamesh.model.families import generic
from pentamesh.model.read import files_of, resolved
from pentamesh.model.spec import ModelSpec
from pentamesh.plan.drift import check_model, model_facts
from pentamesh.plan.model import model_of
from pentamesh.plan.plan import Plan
from pentamesh.plan.search import plan as make_plan
from pentamesh.run.board import check_board
from pentamesh.run.compiled import check_compiler
from pentamesh.run.deepep import check_deepep
from pentamesh.run.push import check_push
from pentamesh.run.source import model_source
from pentamesh.run.template import read_template

__all__ = ["Asked", "located", "planned", "read_asked"]


@dataclass(frozen=True)
class Asked:
    """A job and where it comes from.

    where      named in errors about it
    base       its relative paths go from here
    name       of its run folder, runs/NAME, where the job names none
    file       that it was read from, which its run must not overwrite
    plan       that it was given with, to be run as it stands
    """

    job: Job
    where: str
    base: Path
    name: str
    file: Path | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)
    plan: Plan | None = None


def read_asked(target: Path, overrides: Sequence[str] = ()) -> Asked:
    """What a job file (with `a.b=c` overrides) or a plan.json asks for. Raises InputError."""
    if target.suffix != ".json":
        job, recorded = read_job(target, overrides)
        return Asked(job, str(target), target.parent, target.stem, target, recorded)
    if overrides:
        raise InputError("a plan takes no overrides: it is run as it stands", where=str(target), hint="give the job file, then --set works")
    plan = Plan.read(target, as_made=True)
    return Asked(plan.job, str(target), target.parent, target.stem, target, plan=plan)


def planned(asked: Asked) -> Plan:
    """The plan that is asked for, its paths absolute. Raises InputError for what cannot be trained, and Drift where a plan's model is another."""
    job = asked.job
    check_trainable(job, asked.where, asked.base)
    check_board(job.logging, asked.where)
    check_deepep(job.experts, asked.where)
    check_push(job.checkpoint.push_to_hub, f"{asked.where} checkpoint.push_to_hub")
    if job.training.compile:
        check_compiler(asked.where)
    model, here = _model(asked), located(job, asked.base, asked.name)
    if asked.plan is None:
        plan = make_plan(here, model, _hardware(job), trained_only=True, overrides=dict(asked.overrides))
        _check_runnable(plan, model, asked.where)
        return plan
    _check_runnable(asked.plan, model, asked.where)
    hint = "plan it again, or put the model back as it was"
    check_model(asked.plan.model, model_facts(model), f"{job.model.name}, the model of {asked.where}", hint)
    return replace(asked.plan, job=here)


def located(job: Job, base: Path, name: str) -> Job:
    """The job with its paths made absolute, its chat template read and its model's name resolved: ranks may stand elsewhere than `base`.

    Raises InputError for a chat template that cannot be read or is none.
    """

    def absolute(path: str) -> str:
        return os.path.realpath(resolve(path, base))

    def here(rows: Any) -> Any:
        if isinstance(rows, tuple):
            return tuple(source.model_copy(update={"rows": here(source.rows)}) for source in rows)
        return absolute(rows) if isinstance(rows, str) and not is_hub_data(rows, base) else rows

    def elsewhere(folder: str | None) -> str | None:
        return folder if folder is None or "://" in folder else absolute(folder)

    found = {"train": here(job.data.train), "held_out": here(job.data.held_out)}
    if job.data.chat_template:
        found["chat_template"] = read_template(job.data.chat_template, base)
    return job.model_copy(
        update={
            "model": job.model.model_copy(update={"name": resolved(job.model.name, base)}),
            "data": job.data.model_copy(update=found),
            "checkpoint": job.checkpoint.model_copy(update={"folder": elsewhere(job.checkpoint.folder)}),
            "logging": job.logging.model_copy(update={"folder": absolute(job.logging.folder or f"runs/{name}")}),
        }
    )


def _model(asked: Asked) -> ModelSpec:
    """The model of a job. Raises InputError for one that is planned but not trained yet."""
    wanted = asked.job.model
    if wanted.new_tokens and files_of(wanted.name, asked.base, wanted.revision) is None:
        model_source(wanted.model_copy(update={"name": resolved(wanted.name, asked.base)}))  # its tokens decide how many rows it needs
    model = model_of(asked.job, asked.base)
    generic.check_trainable(model, asked.job.method, asked.where)
    return model


def _check_runnable(plan: Plan, model: ModelSpec, where: str) -> None:
    """Raises InputError for a layout that is planned but not trained yet."""
    if plan.layout.mesh.pp > 1:
        hint = "all other axes are: use pipeline = 1"
        raise InputError(f"{plan.layout.mesh} is planned but not trained yet", where=where, hint=hint)
    if model.steady is not None and plan.job.batch.seq_len > model.steady:
        what = f"beyond {model.steady:,} tokens the rotary frequencies of {model.name} follow the longest sequence of a micro-batch: not trained yet"
        raise InputError(what, where=f"{where} batch.seq_len", hint=f"use seq_len = {model.steady} or less")
    if plan.job.batch.packing and not model.is_described:
        what = f"packing with {model.name}, whose own attention would look from one sample into the next"
        raise InputError(what, where=f"{where} batch.packing", hint="use group_by_length: samples of like length need little padding")
    if plan.layout.sequence_parallel and model.learns_positions:
        what = f"sequence_parallel is planned for {model.name} but not trained yet: its positions are added to a whole stream"
        raise InputError(what, where=f"{where} layout.sequence_parallel", hint="leave it out")


def _hardware(job: Job) -> Hardware:
    """The job's hardware; `auto` among the processes that torchrun or srun started is this kind of machine, as often as there are nodes."""
    ours = started() if job.hardware == "auto" else None
    return started_hardware(*ours) if ours else read_hardware(job.hardware)
