"""Held out: the held-out rows of a job as samples, without its training rows where these are streamed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pentamesh.errors import InputError
from pentamesh.job.job import Job
from pentamesh.run.data.prepare import Progress, prepare, prepared
from pentamesh.run.data.samples import Samples
from pentamesh.run.data.source import Source, source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["prepare_held_out"]


def prepare_held_out(job: Job, tokenizer: PreTrainedTokenizerBase, base: Path, folder: Path, *, progress: Progress | None = None) -> Samples | None:
    """The held-out samples of a job, in `folder`: beside the training ones or, of a stream, in the place of these.

    Raises: InputError, with the faults of all rows that are read.
    """
    if not job.data.streaming:
        return prepare(job, tokenizer, base, folder, progress=progress).held_out
    asked = source(job, base)
    if asked.held_out is None:
        return None
    alone = job.model_copy(update={"batch": job.batch.model_copy(update={"packing": False})})
    try:
        return prepared(alone, tokenizer, Source((asked.held_out,), None, None, None), folder, progress=progress).train
    except InputError as error:  # what is told of training rows is of these
        told = [replace(problem, where="data.held_out") if problem.where == "data.train" else problem for problem in error.problems]
        raise InputError(*told) from error
