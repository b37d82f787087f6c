"""Preview: what a job's data looks like to the model, measured before anything is trained; `pentamesh.report.preview` shows it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pentamesh.job.job import Batch, Job
from pentamesh.run.data.encode import encoder
from pentamesh.run.data.forms import checked_rows
from pentamesh.run.data.order import Order, first_fit_decreasing
from pentamesh.run.data.prepare import source
from pentamesh.run.data.rows import Problems
from pentamesh.run.data.tokens import Encoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["SCHEMA", "VERSION", "Lengths", "Padding", "Piece", "PreviewData", "PreviewRow", "collect"]

SCHEMA, VERSION = "pentamesh.data_preview", 2
NUM_BINS = 10
MAX_MEASURED = 5_000  # rows: some 10 s, at 500 conversations of 760 tokens a second


@dataclass(frozen=True)
class Piece:
    """A stretch of a row that is trained as a whole, or not at all."""

    text: str
    trained: bool
    num_tokens: int


@dataclass(frozen=True)
class PreviewRow:
    """One row as the model reads it; its trained pieces are the assistant's turns."""

    where: str
    pieces: tuple[Piece, ...]
    num_tokens: int
    num_trained: int


@dataclass(frozen=True)
class Lengths:
    """Lengths of rows in tokens that the model reads; `bins` are (from, up to and including, rows)."""

    min: int
    median: int
    p95: int
    max: int
    bins: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Padding:
    """The share of computed tokens that would be padding, a sample a row and packed, and how many rows `num_packed` packing makes of the samples."""

    alone: float
    packed: float
    num_packed: int


@dataclass(frozen=True)
class PreviewData:
    """The first rows, and the counts of all that were measured."""

    files: tuple[str, ...]
    form: str
    seq_len: int
    too_long: str
    rows: tuple[PreviewRow, ...]
    num_measured: int
    all_measured: bool
    num_tokens: int
    num_trained: int
    num_too_long: int
    lengths: Lengths
    padding: Padding

    def to_json(self) -> dict[str, Any]:
        """The JSON contract of `pentamesh data preview --json`."""
        return {"schema": SCHEMA, "version": VERSION, **asdict(self)}


def collect(job: Job, tokenizer: PreTrainedTokenizerBase, base: Path, num_rows: int = 3, max_measured: int = MAX_MEASURED) -> PreviewData:
    """The first `num_rows` training rows in pieces, and the counts and lengths of the first `max_measured`.

    Raises: InputError, with the faults of all these rows at once.
    """
    asked = source(job, base)
    encode = encoder(tokenizer, asked.form)
    shown, lengths, num_trained, all_measured = [], [], 0, True
    with Problems() as problems:
        rows = checked_rows(asked.train, asked.form, problems, asked.data.max_rows, asked.data)
        for row in islice(rows, max_measured):
            encoded = encode(row)
            if not isinstance(encoded, Encoded):
                problems.add(*encoded)
                continue
            if len(shown) < num_rows:
                shown.append(PreviewRow(row.where, tuple(_pieces(tokenizer, encoded)), len(encoded.ids) - 1, encoded.num_trained))
            lengths.append(len(encoded.ids) - 1)
            num_trained += encoded.num_trained
        all_measured = next(rows, None) is None
    return PreviewData(
        files=tuple(map(str, asked.train)),
        form=asked.form,
        seq_len=job.batch.seq_len,
        too_long=job.data.too_long,
        rows=tuple(shown),
        num_measured=len(lengths),
        all_measured=all_measured,
        num_tokens=sum(lengths),
        num_trained=num_trained,
        num_too_long=sum(n > job.batch.seq_len for n in lengths) if asked.form != "text" else 0,
        lengths=_lengths(np.array(lengths)),
        padding=_padding(np.clip(lengths, 1, job.batch.seq_len), job.batch),
    )


def _pieces(tokenizer: PreTrainedTokenizerBase, row: Encoded) -> Iterator[Piece]:
    # The first token is context whatever its mark: nothing predicts it.
    trained = [False, *row.trained[1:].tolist()]
    for is_trained, stretch in groupby(zip(row.ids.tolist(), trained, strict=True), key=lambda pair: pair[1]):
        ids = [token for token, _ in stretch]
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        yield Piece(str(text), is_trained, len(ids))


def _lengths(lengths: np.ndarray) -> Lengths:
    """Source: percentiles are of the nearest rank, so that each is the length of a row."""
    low, median, p95, high = (int(q) for q in np.percentile(lengths, [0, 50, 95, 100], method="inverted_cdf"))
    width = max(1, -(-high // NUM_BINS))
    counts = np.bincount((np.maximum(lengths, 1) - 1) // width, minlength=-(-high // width))
    bins = tuple((i * width + 1, (i + 1) * width, int(n)) for i, n in enumerate(counts))
    return Lengths(low, median, p95, high, bins)


def _padding(lengths: np.ndarray, batch: Batch) -> Padding:
    packs = first_fit_decreasing(np.sort(lengths)[::-1], batch.seq_len)
    alone, packed = Order(lengths, 0, step=batch.global_batch if batch.group_by_length else None), Order(lengths, 0, packs)
    return Padding(_padded(alone, batch), _padded(packed, batch), packed.num_rows)


def _padded(order: Order, batch: Batch) -> float:
    """Of the tokens that one epoch computes, the share that pads rows to the longest of their micro-batch."""
    computed = 0
    for first in range(0, order.num_rows, batch.global_batch):
        numbers = range(first, min(first + batch.global_batch, order.num_rows))
        rows = sorted((int(order.lengths[list(order.row(number))].sum()) for number in numbers), reverse=True)
        computed += sum(longest * len(rows[at : at + batch.micro_batch]) for at, longest in enumerate(rows) if at % batch.micro_batch == 0)
    return 1 - int(order.lengths.sum()) / computed
