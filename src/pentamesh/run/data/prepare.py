"""Prepare: from the files of a job to samples on disk, done once a job.

Two passes: the first reads every row, names every fault and finds what is held out; the second tokenises. The folder appears at once, whole,
under a fingerprint of everything that decides its content; it is reused while that stays the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentamesh.errors import InputError, Problem
from pentamesh.job.job import Job
from pentamesh.run.data.encode import Encode, encoder
from pentamesh.run.data.forms import Form
from pentamesh.run.data.problems import MAX_PLACES, Problems, listed
from pentamesh.run.data.rows import files_of
from pentamesh.run.data.samples import MANIFEST, SCHEMA, VERSION, Prepared, SampleWriter, check_replaceable, open_prepared
from pentamesh.run.data.source import Source, source
from pentamesh.run.data.split import Placed, placed, survey
from pentamesh.run.data.tally import Tally
from pentamesh.run.data.tokens import Encoded, cut_to
from pentamesh.run.data.workers import encoded_by, encoded_here, num_workers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Encoding", "Progress", "facts", "fill", "prepare", "prepared", "settings"]

Progress = Callable[[int], None]
Encoding = Callable[[Iterator[Placed]], Generator[tuple[Placed, Encoded | list[Problem] | None]]]


def prepare(job: Job, tokenizer: PreTrainedTokenizerBase, base: Path, folder: Path, *, progress: Progress | None = None) -> Prepared:
    """The job's data as samples in `folder`, made now or found there; `progress` hears the number of rows that are tokenised.

    Raises: InputError, with the faults of all rows at once.
    """
    return prepared(job, tokenizer, source(job, base), folder, progress=progress)


def prepared(job: Job, tokenizer: PreTrainedTokenizerBase, asked: Source, folder: Path, *, progress: Progress | None = None) -> Prepared:
    """The same, of the rows of a source."""
    fingerprint = _fingerprint(job, tokenizer, asked)
    if (folder / MANIFEST).is_file():
        try:
            if (found := open_prepared(folder)).report["fingerprint"] == fingerprint:
                return found
        except InputError:
            pass  # torn or of another version: made again below
    for ours in (folder, _partial(folder)):
        check_replaceable(ours)
    encoders: dict[Form, Encode] = {origin.form: encoder(tokenizer, origin.form) for origin in asked.origins}
    found = survey(asked, job.training.seed)
    num = num_workers(job.data.workers, found.num_chars)
    encode: Encoding = (lambda rows: encoded_by(num, rows, tokenizer)) if num > 1 else lambda rows: encoded_here(rows, encoders)
    partial = _empty(_partial(folder))
    try:
        splits = _write(job, asked, encode, found.held, partial, progress)
        report = facts(job, tokenizer) | {"fingerprint": fingerprint, "repeated_rows": found.num_repeated, "splits": splits}
        (partial / MANIFEST).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return open_prepared(folder)


def facts(job: Job, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What the manifest says of any prepared data of a job."""
    pad_id = tokenizer.pad_token_id if isinstance(tokenizer.pad_token_id, int) else 0
    return {"schema": SCHEMA, "version": VERSION, "seq_len": job.batch.seq_len, "too_long": job.data.too_long, "pad_id": pad_id}


def _partial(folder: Path) -> Path:
    return folder.with_name(folder.name + ".partial")


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _fingerprint(job: Job, tokenizer: PreTrainedTokenizerBase, asked: Source) -> str:
    """Sixteen hex digits of everything that decides the samples. Files count by name, size and time of change."""
    named = (file for origin in asked.origins for place in origin.places for file in files_of(place))
    files = [(str(file.absolute()), stat.st_size, stat.st_mtime_ns) for file in named for stat in [file.stat()]]
    rows = [files, [origin.form for origin in asked.origins], job.data.model_dump(mode="json", include={"train", "held_out"})]
    return hashlib.sha256(json.dumps([settings(job, tokenizer), rows], sort_keys=True).encode()).hexdigest()[:16]


def settings(job: Job, tokenizer: PreTrainedTokenizerBase) -> str:
    """Sixteen hex digits of everything but the rows that decides the samples."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    words = [hashlib.sha256(vocabulary.encode()).hexdigest(), repr(tokenizer.chat_template), repr(tokenizer.special_tokens_map)]
    data = job.data.model_dump(mode="json", exclude={"workers", "train", "held_out"})
    decides = [VERSION, words, job.batch.seq_len, job.batch.packing, data, job.training.seed]
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


def _tallies(asked: Source, held: frozenset[int], seed: int) -> dict[str, list[Tally]]:
    """The sources of each split. Held-out rows count once, whatever they weigh in training."""
    # Of a stream of its own each, which is none of the epochs' either.
    found = {"train": [Tally(origin.name, origin.form, origin.weight, (seed, number, 1)) for number, origin in enumerate(asked.train)]}
    if held:
        found["held_out"] = [Tally(origin.name, origin.form) for origin in ((asked.held_out,) if asked.held_out else asked.train)]
    return found


@dataclass
class _TooLong:
    """The rows that do not fit, of which a few are named."""

    num_rows: int = 0
    longest: int = 0
    places: list[str] = field(default_factory=list)

    def add(self, where: str, length: int) -> None:
        self.num_rows += 1
        self.longest = max(self.longest, length)
        if len(self.places) < MAX_PLACES:
            self.places.append(f"{where} ({length:,})")

    def problem(self, seq_len: int) -> Problem:
        what = f"{self.num_rows:,} rows are longer than batch.seq_len = {seq_len:,}: the longest has {self.longest:,} tokens"
        hint = f"set batch.seq_len: {self.longest}, or data.too_long: drop, truncate or split"
        return Problem(what, listed(self.places, self.num_rows), hint)


def _write(job: Job, asked: Source, encode: Encoding, held: frozenset[int], folder: Path, progress: Progress | None) -> dict[str, dict[str, Any]]:
    """Tokenise every row into its split. Returns the manifest's entry of each; raises InputError with all faults at once."""
    seed = job.training.seed
    writers = {name: SampleWriter(folder, name, tallies) for name, tallies in _tallies(asked, held, seed).items()}
    with Problems() as problems, closing(encode(placed(asked, held, seed, problems))) as rows:
        fill(writers, job, rows, problems, progress)
    pack_to = {"train": job.batch.seq_len if job.batch.packing else None}
    return {name: _finished(name, writer, pack_to.get(name)) for name, writer in writers.items()}


def fill(
    writers: Mapping[str, SampleWriter],
    job: Job,
    rows: Iterable[tuple[Placed, Encoded | list[Problem] | None]],
    problems: Problems,
    progress: Progress | None = None,
) -> None:
    """Store every row in the writer of its split; what is wrong with those that cannot be trained goes to `problems`."""
    too_long = _TooLong()
    for num_rows, (row, encoded) in enumerate(rows, start=1):
        writer = writers[row.split]
        if isinstance(encoded, Encoded):
            cut = cut_to(encoded, row.form, job.batch.seq_len, job.data.too_long)
            writer.add(row.source, encoded, cut)
            if cut.dropped == "too_long":
                too_long.add(row.row.where, len(encoded.ids) - 1)
        elif encoded is None:
            writer.drop(row.source, row.unused)
        else:
            problems.add(*encoded)
        if progress:
            progress(num_rows)
    if too_long.num_rows and job.data.too_long == "error":
        problems.add(too_long.problem(job.batch.seq_len))


def _finished(name: str, writer: SampleWriter, pack_to: int | None) -> dict[str, Any]:
    split = writer.close(pack_to)
    if not split["samples"]:
        reasons = ", ".join(f"{reason} {n:,}" for reason, n in split["dropped"].items())
        raise InputError(f"none of {split['rows']:,} rows is left to use", where=f"data.{name}", hint=f"dropped: {reasons}")
    return split
