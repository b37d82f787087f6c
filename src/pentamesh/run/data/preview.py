"""Preview: what a job's data looks like to the model, measured before anything is trained; `pentamesh.report.preview` shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pentamesh.job.job import Batch, Job
from pentamesh.run.data.alike import Repeats, row_key
from pentamesh.run.data.encode import encoder
from pentamesh.run.data.forms import Form, Sample
from pentamesh.run.data.order import Order, first_fit_decreasing
from pentamesh.run.data.problems import Problems
from pentamesh.run.data.source import Origin, source
from pentamesh.run.data.tokens import Encoded, cut_to

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["SCHEMA", "VERSION", "Lengths", "Padding", "Piece", "PreviewData", "PreviewRow", "PreviewSource", "Repeated", "collect"]

SCHEMA, VERSION = "pentamesh.data_preview", 3
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
    form: str
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
class Repeated:
    """How many rows repeat another exactly, and how many more but for case and white space."""

    exact: int
    but_for_case_and_white_space: int


@dataclass(frozen=True)
class PreviewSource:
    """The counts of a source, of those rows that were measured; `weight` is how often an epoch sees each."""

    name: str
    files: tuple[str, ...]
    form: str
    weight: float
    num_measured: int
    all_measured: bool
    num_tokens: int
    num_trained: int
    num_too_long: int


@dataclass(frozen=True)
class PreviewData:
    """The first rows of each source, and the counts of all that were measured; `dropped` says of rows that training leaves out why, and how many."""

    seq_len: int
    too_long: str
    rows: tuple[PreviewRow, ...]
    sources: tuple[PreviewSource, ...]
    num_measured: int
    all_measured: bool
    num_tokens: int
    num_trained: int
    num_too_long: int
    dropped: dict[str, int]
    repeated: Repeated
    lengths: Lengths
    padding: Padding

    def to_json(self) -> dict[str, Any]:
        """The JSON contract of `pentamesh data preview --json`."""
        return {"schema": SCHEMA, "version": VERSION, **asdict(self)}


def collect(job: Job, tokenizer: PreTrainedTokenizerBase, base: Path, num_rows: int = 3, max_measured: int = MAX_MEASURED) -> PreviewData:
    """The first `num_rows` training rows of each source in pieces, and the counts and lengths of the first `max_measured` over all of them.

    Raises: InputError, with the faults of all these rows at once.
    """
    asked, repeats, dropped = source(job, base), Repeats(), Counter[str]()
    with Problems() as problems:
        limit = -(-max_measured // len(asked.train))
        held = frozenset(row_key(row, 0) for row in asked.held_out.rows(problems)) if asked.held_out else frozenset()

        def hear(row: Sample, encoded: Encoded, form: Form) -> None:
            repeats.add(row)
            equal = held and row_key(row, 0) in held
            if why := "equal_to_held_out" if equal else cut_to(encoded, form, job.batch.seq_len, job.data.too_long).dropped:
                dropped[why] += 1

        found = [_measured(origin, asked.max_rows, limit, num_rows, job.batch.seq_len, tokenizer, problems, hear) for origin in asked.train]
    sources = tuple(measured for measured, _, _ in found)
    lengths = np.array([length for _, _, lengths in found for length in lengths])
    return PreviewData(
        seq_len=job.batch.seq_len,
        too_long=job.data.too_long,
        rows=tuple(row for _, rows, _ in found for row in rows),
        sources=sources,
        num_measured=sum(s.num_measured for s in sources),
        all_measured=all(s.all_measured for s in sources),
        num_tokens=sum(s.num_tokens for s in sources),
        num_trained=sum(s.num_trained for s in sources),
        num_too_long=sum(s.num_too_long for s in sources),
        dropped=dict(dropped),
        repeated=Repeated(repeats.num_exact, repeats.num_folded),
        lengths=_lengths(lengths),
        padding=_padding(np.clip(lengths, 1, job.batch.seq_len), job.batch),
    )


def _measured(
    origin: Origin,
    max_rows: int | None,
    limit: int,
    num_shown: int,
    seq_len: int,
    tokenizer: PreTrainedTokenizerBase,
    problems: Problems,
    hear: Callable[[Sample, Encoded, Form], None],
) -> tuple[PreviewSource, list[PreviewRow], list[int]]:
    """The counts of the first `limit` rows of a source, the first of them in pieces, and the length of each; `hear` is told each."""
    encode = encoder(tokenizer, origin.form)
    shown, lengths, num_trained = [], [], 0
    rows = origin.rows(problems, max_rows)
    for row in islice(rows, limit):
        encoded = encode(row)
        if not isinstance(encoded, Encoded):
            problems.add(*encoded)
            continue
        hear(row, encoded, origin.form)
        if len(shown) < num_shown:
            shown.append(PreviewRow(row.where, origin.form, tuple(_pieces(tokenizer, encoded)), len(encoded.ids) - 1, encoded.num_trained))
        lengths.append(len(encoded.ids) - 1)
        num_trained += encoded.num_trained
    counts = PreviewSource(
        name=origin.name,
        files=tuple(map(str, origin.places)),
        form=origin.form,
        weight=origin.weight,
        num_measured=len(lengths),
        all_measured=next(rows, None) is None,
        num_tokens=sum(lengths),
        num_trained=num_trained,
        num_too_long=sum(n > seq_len for n in lengths) if origin.form != "text" else 0,
    )
    return counts, shown, lengths


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
        step = order.rows(first, min(first + batch.global_batch, order.num_rows))
        rows = sorted((int(order.lengths[list(row)].sum()) for row in step), reverse=True)
        computed += sum(longest * len(rows[at : at + batch.micro_batch]) for at, longest in enumerate(rows) if at % batch.micro_batch == 0)
    return 1 - int(order.lengths.sum()) / computed
