"""Judge: every row of some places with what training would say of it, one after the other; nothing stops at a fault."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal

from pentamesh.errors import InputError, Problem
from pentamesh.job.job import Data
from pentamesh.run.data.forms import Form, Sample, content_of, looks_like
from pentamesh.run.data.ids import Ids
from pentamesh.run.data.names import Names
from pentamesh.run.data.rows import Place, Row, read_rows
from pentamesh.run.data.tokens import Encoded, cut_to
from pentamesh.run.data.turns import Conversation

if TYPE_CHECKING:
    from pentamesh.run.data.encode import Encode

__all__ = ["Judged", "Length", "Subject", "form_found", "judged"]

# Rows that decide which form a file has.
NUM_VOTES = 1_000
# A place of a row: `file:line` or `file[index]`.
ROW = re.compile(r":\d+$|\[\d+\]$")


@dataclass(frozen=True)
class Subject:
    """Rows to be judged: their places, what the job says of rows, and how many of them it takes. `name` is what people call them."""

    name: str
    places: tuple[Place, ...]
    data: Data
    form: Form | Literal["auto"] = "auto"
    limit: int | None = None
    is_train: bool = True


@dataclass(frozen=True)
class Length:
    """The longest row that is trained whole, and what happens to a longer one."""

    seq_len: int
    too_long: Literal["error", "drop", "truncate", "split"]


@dataclass(frozen=True)
class Judged:
    """A row, as it was read where it could be, with its content where that is in order, or everything that is wrong with it.

    num_tokens  that the model reads of it; 0 where no tokenizer is at hand
    exceeds     it is longer than a sequence
    dropped     why training would leave it out: `too_long`, or `nothing_to_train`
    """

    where: str
    row: Row | None
    sample: Sample | None = None
    faults: tuple[Problem, ...] = ()
    num_tokens: int = 0
    exceeds: bool = False
    dropped: str = ""

    @property
    def is_row(self) -> bool:
        """Whether this is a row at all, and not a file without any or the end of a torn one."""
        return self.row is not None or ROW.search(self.where) is not None


def form_found(subject: Subject) -> Form | None:
    """The form that the job asks for, or that most of the first rows have; None where none has any."""
    if subject.form != "auto":
        return subject.form
    names = Names.of_rows(subject.data.columns)
    values = (row.value for row in islice(read_rows(subject.places), NUM_VOTES) if isinstance(row, Row) and isinstance(row.value, dict))
    votes: Counter[Form] = Counter(form for value in values if (form := looks_like(names.ours(value))))
    return votes.most_common(1)[0][0] if votes else None


def judged(subject: Subject, form: Form, length: Length, encode: Encode | None) -> Iterator[Judged]:
    """Every row of a subject as one of this form."""
    for row in islice(read_rows(subject.places), subject.limit):
        if isinstance(row, Problem):
            yield Judged(row.where, None, faults=(row,))
            continue
        content = content_of(row, form, subject.data)
        if isinstance(content, list):
            yield Judged(row.where, row, faults=tuple(content))
        else:
            yield _measured(row, Sample(row.where, content), form, length, encode)


def _measured(row: Row, sample: Sample, form: Form, length: Length, encode: Callable[[Sample], Encoded | list[Problem]] | None) -> Judged:
    if encode is None:
        return Judged(row.where, row, sample, dropped="nothing_to_train" if _trains_nothing(sample) else "")
    try:
        encoded = encode(sample)
    except InputError as error:  # of the tokenizer
        encoded = list(error.problems)
    if not isinstance(encoded, Encoded):
        return Judged(row.where, row, faults=tuple(encoded))
    num_tokens, cut = len(encoded.ids) - 1, cut_to(encoded, form, length.seq_len, length.too_long)
    return Judged(row.where, row, sample, (), num_tokens, num_tokens > length.seq_len and form != "text", cut.dropped)


def _trains_nothing(sample: Sample) -> bool:
    said = sample.content
    return (isinstance(said, Conversation) and not said.trained) or (isinstance(said, Ids) and not any(said.trained[1:]))
