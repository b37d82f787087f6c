"""Rows: what a run is trained and evaluated on, prepared before it begins or streamed while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pentamesh.checkpoint.together import first
from pentamesh.job.job import Job
from pentamesh.run.data.held_out import prepare_held_out
from pentamesh.run.data.pace import Pace
from pentamesh.run.data.prepare import prepare, settings
from pentamesh.run.data.samples import Samples, open_prepared
from pentamesh.run.data.stream import Stream
from pentamesh.run.data.supply import Supply
from pentamesh.run.folder import RunFolder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Rows", "rows"]

Tokenizer = Callable[[], "PreTrainedTokenizerBase"]
Checked = Callable[[Samples], Samples]


@dataclass(frozen=True)
class Rows:
    """Training rows, held-out ones where there are some, and the digest of what decides them: what a place in them means.

    Of prepared rows the digest is of their samples; of streamed ones of the settings, and each chunk is compared when it is read again.
    """

    train: Samples | Stream
    held_out: Samples | None
    digest: str

    def close(self) -> None:
        """End what was begun for steps to come."""
        if isinstance(self.train, Stream):
            self.train.close()


def rows(job: Job, tokenizer: Tokenizer, folder: RunFolder, checked: Checked) -> Rows:
    """The rows of a job, which the first rank prepares and every rank maps. Collective. `checked` makes samples fit the model, or raises.

    Raises: InputError, with the faults of all rows that were read.
    """
    return (_streamed if job.data.streaming else _prepared)(job, tokenizer, folder, checked)


def _prepared(job: Job, tokenizer: Tokenizer, folder: RunFolder, checked: Checked) -> Rows:
    def work() -> None:
        prepare(job, tokenizer(), Path(), folder.data, progress=Pace())

    first("preparing the data", work)
    found = open_prepared(folder.data)
    return Rows(checked(found.train), found.held_out and checked(found.held_out), found.train_digest)


def _streamed(job: Job, tokenizer: Tokenizer, folder: RunFolder, checked: Checked) -> Rows:
    def work() -> tuple[bool, str]:
        words = tokenizer()
        return prepare_held_out(job, words, Path(), folder.data, progress=Pace()) is not None, settings(job, words)

    is_held_out, digest = first("preparing the held-out rows", work)
    step = job.batch.global_batch if job.batch.group_by_length else None
    stream = Stream(Supply(job, tokenizer, folder.stream, digest), checked, job.training.seed, step)
    return Rows(stream, checked(open_prepared(folder.data).train) if is_held_out else None, digest)
