"""The model of a job: what its name stands for, with room for the job's new tokens and with what it freezes marked."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from pentamesh.errors import InputError
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
    model = frozen(model, job.training.freeze)
    if asked.new_tokens:
        _check_learns(model, job.training.freeze)
    return model


def _check_learns(model: ModelSpec, patterns: Sequence[str]) -> None:
    """Raises InputError where rows of new tokens are frozen: they would stay the mean that they start from."""
    still = [t.name for t in model.tensors if not t.trained and any(dim.name == "vocab" for dim in t.dims)]
    if still:
        by = [pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in still)]
        what = f"{', '.join(by)} freezes {' and '.join(still)}, where new tokens have rows: they would all stay the mean that they start from"
        raise InputError(what, where="training.freeze", hint=f"freeze by names that leave out {' and '.join(still)}, or leave model.new_tokens out")
