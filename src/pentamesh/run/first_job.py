"""First job: a job file for a model and rows, with what can be seen of both; a person goes on from there."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pentamesh.errors import InputError, Problem
from pentamesh.job.commented import commented
from pentamesh.job.hardware import read_hardware
from pentamesh.job.job import Batch, Job, Model
from pentamesh.job.read import is_hub_data, read_job_text
from pentamesh.model.families import generic
from pentamesh.model.read import files_of, read_model, resolved
from pentamesh.model.spec import ModelSpec
from pentamesh.run.data.doctor import Diagnosis, EncoderOf, diagnose
from pentamesh.run.data.judge import Length
from pentamesh.run.data.order import first_fit_decreasing
from pentamesh.run.data.subjects import file_subject

__all__ = ["FirstJob", "first_job", "write_first_job"]

T = TypeVar("T")

HEADING = "Written by `pentamesh init`. Paths are relative to this file; `pentamesh explain keys` lists what else it could say."
# The grain of a length: matmuls are cut into tiles of 64 and more.
GRAIN = 64
# Packing has to save so large a share of the rows.
WORTH_PACKING = 0.1
# So few different rows are all trained on.
FEWEST_TO_HOLD_OUT = 20
HELD_OUT, MOST_HELD_OUT = 0.05, 1_000
# Passes over few rows and over many.
EPOCHS, MANY_ROWS = (3, 1), 10_000
FAULTS_SHOWN = 3


@dataclass(frozen=True)
class FirstJob:
    """The text of a job file, and what a reader should know of how it came to be."""

    text: str
    notes: tuple[str, ...]


def write_first_job(model: str, data: str, out: Path, hardware: str, *, force: bool = False) -> FirstJob:
    """Write the job file `out` for a model and rows; whole, or not at all. Raises InputError."""
    _check_writable(out, force=force)
    found = first_job(model, data, out.parent, hardware)
    read_job_text(found.text, str(out))
    partial = out.with_name(f".{out.name}.partial")
    try:
        partial.write_text(found.text, encoding="utf-8")
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
    return found


def first_job(model: str, data: str, base: Path, hardware: str) -> FirstJob:
    """A job in the folder `base` for a model and rows, which are named from the current folder. Raises InputError with what is wrong with any."""
    problems: list[Problem] = []

    def attempt(read: Callable[[], T]) -> T | None:
        try:
            return read()
        except InputError as error:
            problems.extend(error.problems)
            return None

    spec = attempt(lambda: _trainable(model))
    subject = attempt(lambda: file_subject(data, "DATA"))
    machine = attempt(lambda: read_hardware(hardware, "--on"))
    if spec is None or subject is None or machine is None:
        raise InputError(*problems)
    encode, without = _encoder(model)
    longest = _longest(spec)
    found = diagnose([subject], Length(longest, "split"), encode, without_model=without)
    _check_in_order(found, data)
    named = {
        "model.name": _from(model, base) if Path(os.path.expanduser(model)).exists() else model,
        "data.train": data if is_hub_data(data, Path()) else _from(data, base),
        "hardware": hardware,
    }
    return FirstJob(commented(named | _data(found) | _batch(found, spec, longest, machine.num_devices), HEADING), _notes(found))


def _trainable(model: str) -> ModelSpec:
    if not model.strip():
        raise InputError("the name of the model is empty", where="MODEL", hint="give a folder, a hub id or a catalogue name")
    spec = read_model(model)
    generic.check_trainable(spec, "full", "MODEL")
    return spec


def _check_writable(out: Path, *, force: bool) -> None:
    if out.suffix not in (".yaml", ".yml"):
        raise InputError(f"{out} does not end like a job file", where="--out", hint="let it end in .yaml")
    if out.is_dir() or ((out.exists() or out.is_symlink()) and not force):
        hint = "name another file" if out.is_dir() else "name another file, or give --force to replace it"
        raise InputError(f"{out} is there already", where="--out", hint=hint)
    if not out.parent.is_dir():
        raise InputError(f"there is no folder {out.parent}", where="--out", hint="make it first")


def _encoder(model: str) -> tuple[EncoderOf | None, str]:
    """What encodes rows for a model whose files are on this machine, or why nothing does."""
    if files_of(model) is None:
        return None, f"{model} is not on this machine"
    from pentamesh.run.examine import encoder_of

    try:
        return encoder_of(Job(model=Model(name=resolved(model)))), ""
    except InputError as error:
        return None, error.problems[0].what


def _longest(model: ModelSpec) -> int:
    """The longest sequence that the model has positions for, and is trained at."""
    return min(filter(None, (model.max_positions, model.steady)), default=Batch().seq_len)


def _check_in_order(found: Diagnosis, data: str) -> None:
    """Raises InputError unless every row is in order, by what is proposed where something is."""
    faults = found.best.told
    if not faults:
        return
    num_rows = found.given.num_rows
    shown = [Problem(f.what, ", ".join(spot.where for spot in f.places), f.hint) for f in faults[:FAULTS_SHOWN]]
    what = f"{num_rows - found.best.num_in_order:,} of {num_rows:,} rows are not in order" if num_rows else "there are no rows to train on"
    hint = f"`pentamesh data doctor {data}` says all that is wrong; with --out FOLDER it keeps the rows that are in order"
    raise InputError(*shown, Problem(what, "DATA", hint))


def _from(name: str, base: Path) -> str:
    """A path of the current folder as it is called from `base`."""
    path = os.path.expanduser(name)
    return path if os.path.isabs(path) else os.path.relpath(path, base)


def _data(found: Diagnosis) -> dict[str, Any]:
    """How the rows are read, and how many are held out."""
    keys: dict[str, Any] = {}
    if found.proposal:
        asked = found.proposal
        keys = {"data.form": asked.form, "data.columns": asked.columns, "data.roles": asked.roles}
    different = found.best.num_in_order - found.best.repeats.num_exact
    if different >= FEWEST_TO_HOLD_OUT:
        keys["data.held_out"] = float(f"{min(HELD_OUT, MOST_HELD_OUT / different):.2g}")
    return {key: value for key, value in keys.items() if value}


def _batch(found: Diagnosis, model: ModelSpec, longest: int, devices: int) -> dict[str, Any]:
    """How long and how many sequences are, and for how long they are trained on."""
    num_rows = found.best.num_in_order
    keys: dict[str, Any] = {"method": "full", "batch.seq_len": min(Batch().seq_len, longest), "batch.micro_batch": 1}
    if found.best.lengths:
        keys["batch.seq_len"] = seq_len = min(longest, -(-found.percentile(99) // GRAIN) * GRAIN)
        if found.percentile(100) > seq_len and "text" not in found.best.forms.values():
            keys["data.too_long"] = "drop"
        lengths = np.clip(np.sort(np.frombuffer(found.best.lengths, np.uint32).astype(np.int64))[::-1], 1, seq_len)
        packed = int(first_fit_decreasing(lengths, seq_len).max()) + 1
        if model.is_described and packed <= (1 - WORTH_PACKING) * num_rows:
            keys["batch.packing"], num_rows = True, packed
    each = max(1, min(Batch().global_batch, num_rows) // devices)
    return keys | {"batch.global_batch": each * devices, "training.epochs": EPOCHS[found.best.num_in_order >= MANY_ROWS]}


def _notes(found: Diagnosis) -> tuple[str, ...]:
    notes = []
    if not found.best.lengths:
        notes.append(f"rows were not measured, so seq_len is a guess: {found.without_model}")
    if num := found.best.repeats.num_exact:
        notes.append(f"{num:,} rows repeat another")
    if found.best.lengths and found.percentile(100) > found.percentile(99):
        notes.append(f"the longest row has {found.percentile(100):,} tokens, 99 of 100 have up to {found.percentile(99):,}")
    return tuple(notes)
