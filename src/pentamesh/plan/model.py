"""The model of a job: what its name stands for, as the job trains it."""

from __future__ import annotations

from pathlib import Path

from pentamesh.job.job import Job
from pentamesh.model.frozen import frozen
from pentamesh.model.read import read_model
from pentamesh.model.spec import ModelSpec

__all__ = ["as_trained", "model_of"]


def model_of(job: Job, base: Path | None = None) -> ModelSpec:
    """The spec of a job's model, whose path is relative to `base`. Raises InputError."""
    return as_trained(read_model(job.model.name, base, job.model.revision), job)


def as_trained(model: ModelSpec, job: Job) -> ModelSpec:
    """The model with what the job freezes marked. Raises InputError."""
    return frozen(model, job.training.freeze)
