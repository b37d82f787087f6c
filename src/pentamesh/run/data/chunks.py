"""Chunks: the training rows of a job a number at a time, each made to samples in a folder of its own, pass after pass over the data."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING

from pentamesh.errors import InputError
from pentamesh.job.job import Job
from pentamesh.run.data.alike import row_key
from pentamesh.run.data.encode import encoder
from pentamesh.run.data.prepare import facts, fill
from pentamesh.run.data.problems import Problems
from pentamesh.run.data.record import Chunk
from pentamesh.run.data.samples import MANIFEST, SampleWriter
from pentamesh.run.data.source import Source, source
from pentamesh.run.data.split import Placed, held_keys, placed
from pentamesh.run.data.tally import Tally
from pentamesh.run.data.workers import Result, encoded_by, encoded_here

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["chunk_folder", "chunks"]


def chunk_folder(folder: Path, number: int) -> Path:
    """Where the samples of a chunk lie."""
    return folder / f"{number:08d}"


def chunks(job: Job, tokenizer: PreTrainedTokenizerBase, folder: Path, known: Sequence[Chunk], start: int) -> Iterator[Chunk]:
    """The chunks of a run from number `start` on, each written below `folder` before it is given; one without samples is not written.

    Raises: InputError, with the faults of the rows of a chunk, and where rows are not those of the chunks that are `known` already.
    """
    with Problems() as problems:
        asked = source(job, Path())
        held = held_keys(asked, job.training.seed, problems)
    reader = _Reader(job, tokenizer, replace(asked, held_out=None), held, folder, {chunk.index: chunk for chunk in known})
    epoch, index = (known[start - 1].epoch, known[start - 1].index + 1) if start else (0, 0)
    number = start
    while True:
        num_rows = index  # a pass that was begun before has given rows
        for chunk in reader.epoch(number, epoch, index):
            num_rows += chunk.rows
            number += 1
            yield chunk
        if not num_rows:
            raise InputError("none of the rows is left to train on", where="data.train", hint="`pentamesh data preview` shows what they hold")
        epoch, index = epoch + 1, 0


@dataclass(frozen=True)
class _Reader:
    """Reads the rows of a source as often as it is asked to. `seen` are the chunks of any pass by their index: they are the same in each."""

    job: Job
    tokenizer: PreTrainedTokenizerBase
    asked: Source
    held: frozenset[int]
    folder: Path
    seen: dict[int, Chunk] = field(default_factory=dict)

    def epoch(self, number: int, epoch: int, start: int) -> Iterator[Chunk]:
        """The chunks of one pass from index `start` on, the first of which has this number in the run."""
        problems = Problems()
        rows = placed(self.asked, self.held, self.job.training.seed, problems)
        for index in range(start):
            self._pass_over(index, rows)
        with closing(self._encode(rows)) as encoded:
            for index in count(start):
                with problems:
                    head = next(encoded, None)
                if head is None:
                    return
                these = chain([head], islice(encoded, self.job.data.shuffle_rows - 1))
                yield self._kept(Chunk(number + index - start, epoch, index, *self._written(number + index - start, these, problems)))

    def _pass_over(self, index: int, rows: Iterator[Placed]) -> None:
        """Read the rows of a chunk that was trained on, without tokenising them."""
        digest = hashlib.blake2b(digest_size=8)
        for row in islice(rows, self.job.data.shuffle_rows):
            digest.update(self._key(row))
        if index in self.seen and digest.hexdigest() != self.seen[index].digest:
            raise self._others(index)

    def _written(self, number: int, rows: Iterable[tuple[Placed, Result | None]], problems: Problems) -> tuple[int, str]:
        """How many rows of the run a chunk gives, and the digest of what it was made of."""
        job, folder, digest = self.job, chunk_folder(self.folder, number), hashlib.blake2b(digest_size=8)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

        def hashed() -> Iterator[tuple[Placed, Result | None]]:
            for row, encoded in rows:
                digest.update(self._key(row))
                yield row, encoded

        writer = SampleWriter(folder, "train", [Tally(origin.name, origin.form) for origin in self.asked.train])
        with problems:
            fill({"train": writer}, job, hashed(), problems)
        split = writer.close(job.batch.seq_len if job.batch.packing else None)
        if not split["samples"]:
            shutil.rmtree(folder)
            return 0, digest.hexdigest()
        report = facts(job, self.tokenizer) | {"splits": {"train": split}}
        (folder / MANIFEST).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        return split.get("packs", split["samples"]), digest.hexdigest()

    def _kept(self, chunk: Chunk) -> Chunk:
        """Raises InputError where another pass over the data saw other rows in its place."""
        seen = self.seen.setdefault(chunk.index, chunk)
        if (seen.digest, seen.rows) != (chunk.digest, chunk.rows):
            raise self._others(chunk.index)
        return chunk

    def _others(self, index: int) -> InputError:
        first = index * self.job.data.shuffle_rows
        what = f"rows {first + 1:,} to {first + self.job.data.shuffle_rows:,} are not those that the run has read there before"
        return InputError(what, where="data.train", hint="put the data back as it was, or start anew in another logging.folder")

    def _key(self, row: Placed) -> bytes:
        return row_key(row.row, self.job.training.seed).to_bytes(8, "little")

    def _encode(self, rows: Iterator[Placed]) -> Generator[tuple[Placed, Result | None]]:
        """One process keeps up with most runs; `data.workers` asks for more."""
        if (num := self.job.data.workers or 1) > 1:
            return encoded_by(num, rows, self.tokenizer)
        return encoded_here(rows, {origin.form: encoder(self.tokenizer, origin.form) for origin in self.asked.train})
