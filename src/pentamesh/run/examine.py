"""Examine: the rows of a job, by its template and lengths where its model is at hand, or of bare files; and what is written of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentamesh.errors import InputError
from pentamesh.job.job import Batch, Data, Job
from pentamesh.job.read import read_job
from pentamesh.run.data.doctor import EncoderOf, diagnose
from pentamesh.run.data.judge import Length, Subject
from pentamesh.run.data.sift import CLEAN, REJECTED, check_writable, sift
from pentamesh.run.data.subjects import file_subject, job_subjects

__all__ = ["encoder_of", "examine"]


@dataclass(frozen=True)
class _Asked:
    """Rows to examine, and by what. `without_model` says why no tokenizer is at hand."""

    subjects: tuple[Subject, ...]
    length: Length
    encode: EncoderOf | None = None
    model: str = ""
    without_model: str = ""


def examine(target: str, overrides: Sequence[str] = (), out: Path | None = None, *, force: bool = False) -> dict[str, Any]:
    """The diagnosis of a job (a .yaml file) or of files as `pentamesh.data_doctor`, and the rows sifted into the folder `out`. Raises InputError."""
    asked = _of_job(Path(target), overrides) if Path(target).suffix in (".yaml", ".yml") else _of_files(target, overrides)
    if out is not None:
        check_writable(out, asked.subjects, force=force)
    found = diagnose(asked.subjects, asked.length, asked.encode, model=asked.model, without_model=asked.without_model)
    facts = found.to_json()
    if out is not None:
        counts = sift(found, out, asked.encode)
        facts["written"] = {
            "clean": str(out / CLEAN),
            "num_clean": counts[CLEAN],
            "rejected": str(out / REJECTED),
            "num_rejected": counts[REJECTED],
            "repeated": counts["repeated"],
        }
    return facts


def _of_files(name: str, overrides: Sequence[str]) -> _Asked:
    if overrides:
        raise InputError(f"{name} is no job file, so there is no key to set", where="--set", hint="give a job file (.yaml)")
    return _Asked((file_subject(name, "JOB_OR_FILE"),), Length(Batch().seq_len, Data().too_long))


def _of_job(path: Path, overrides: Sequence[str]) -> _Asked:
    from pentamesh.run.asked import located  # imports torch, which bare files need not wait for

    job = read_job(path, overrides)[0]
    subjects, length = job_subjects(job, path.parent), Length(job.batch.seq_len, job.data.too_long)
    try:
        return _Asked(subjects, length, encoder_of(located(job, path.parent, path.stem)), job.model.name)
    except InputError as error:
        return _Asked(subjects, length, without_model=error.problems[0].what)


def encoder_of(job: Job) -> EncoderOf:
    """What encodes rows of each form for the model of a job that is `located`. Raises InputError where its tokenizer cannot be read."""
    from pentamesh.run.data.encode import encoder
    from pentamesh.run.source import model_source, tokenizer_of

    tokenizer = tokenizer_of(model_source(job.model), job.data.chat_template, job.model.new_tokens)
    return lambda form: encoder(tokenizer, form)
