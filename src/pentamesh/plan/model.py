"""The model of a job: what its name stands for, with room for the job's new tokens and with what it freezes marked."""

from __future__ import annotations

from pathlib import Path

from pentamesh.job.job import Job
from pentamesh.model.frozen import frozen
from pentamesh.model.read import files_of, read_model
from pentamesh.model.spec import ModelSpec
from pentamesh.model.vocabulary import grown, vocabulary

__all__ = ["model_of"]


def model_of(job: Job, base: Path | None = None) -> ModelSpec:
    """The spec of what a job trains; the path of its model is relative to `base`. Raises InputError."""
    asked = job.model
    model = read_model(asked.name, base, asked.revision)
    if asked.new_tokens:
        model = grown(model, asked.new_tokens, vocabulary(files_of(asked.name, base, asked.revision)))
    return frozen(model, job.training.freeze)
