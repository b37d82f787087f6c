"""Doctor: what is wrong with the rows of a job or a file, how often and where first, and which keys of the job would read them.

Every row is judged by what training reads it with. Memory is 20 bytes a row: two keys to find repeated rows, and a length.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from pentamesh.errors import InputError, Problem
from pentamesh.run.data.alike import Repeats
from pentamesh.run.data.forms import Form, form_of
from pentamesh.run.data.judge import Judged, Length, Subject, form_found, judged
from pentamesh.run.data.problems import MAX_PLACES
from pentamesh.run.data.propose import proposed
from pentamesh.run.data.shapes import Shapes

if TYPE_CHECKING:
    from pentamesh.run.data.encode import Encode

__all__ = ["SCHEMA", "VERSION", "Diagnosis", "EncoderOf", "Fault", "Findings", "diagnose", "examined"]

SCHEMA, VERSION = "pentamesh.data_doctor", 1
# Kinds of faults that are told apart; more does not help whoever reads them.
MAX_KINDS = 50
# Of a sentence about a row, which may name a value of it.
MAX_SENTENCE = 400
# What of a sentence says where in the row, not what.
PLACE_IN_ROW = re.compile(r"\[\d+\]|(?<=byte )\d+|(?<=character )\d+")

EncoderOf = Callable[[Form], "Encode"]


@dataclass(frozen=True)
class Spot:
    """A place of a fault: file and row, and the field where the fault is of one."""

    where: str
    field: str


@dataclass
class Fault:
    """One kind of fault, in the sentence that training gives for the first row that has it, and the first places of so many."""

    what: str
    hint: str
    num_rows: int = 0
    places: list[Spot] = field(default_factory=list)


@dataclass
class Findings:
    """What all rows of some subjects are found to be."""

    forms: dict[str, Form | None]
    num_rows: int = 0
    num_in_order: int = 0
    faults: dict[str, Fault] = field(default_factory=dict)
    repeats: Repeats = field(default_factory=Repeats)
    lengths: array[int] = field(default_factory=lambda: array("I"))
    too_long: Fault = field(default_factory=lambda: Fault("", ""))
    untrained: Fault = field(default_factory=lambda: Fault("", ""))

    def add(self, row: Judged, subject: Subject) -> None:
        self.num_rows += row.is_row
        for kind, problem in {_kind(problem): problem for problem in row.faults}.items():
            self._fault(kind, problem, row.where)
        if row.sample is None:
            return
        self.num_in_order += 1
        if row.num_tokens:
            self.lengths.append(row.num_tokens)
        for happened, tally in ((row.exceeds, self.too_long), (row.dropped == "nothing_to_train", self.untrained)):
            if happened:
                _note(tally, Spot(row.where, ""))
        if subject.is_train:
            self.repeats.add(row.sample)

    @property
    def told(self) -> tuple[Fault, ...]:
        """The faults, those of all rows and the most frequent first."""
        return tuple(sorted(self.faults.values(), key=lambda fault: (fault.num_rows > 0, -fault.num_rows)))

    def _fault(self, kind: str, problem: Problem, where: str) -> None:
        if kind not in self.faults and len(self.faults) >= MAX_KINDS:
            kind, problem = "", Problem("faults of other kinds", hint="mend those above, and look again")
        fault = self.faults.setdefault(kind, Fault(_short(problem.what), problem.hint))
        _note(fault, Spot(problem.where or where, _field(problem.what)))


def _note(fault: Fault, spot: Spot) -> None:
    fault.num_rows += 1
    if len(fault.places) < MAX_PLACES:
        fault.places.append(spot)


def _kind(problem: Problem) -> str:
    return PLACE_IN_ROW.sub("", _short(problem.what))


def _short(text: str) -> str:
    return text if len(text) <= MAX_SENTENCE else text[:MAX_SENTENCE] + " ..."


def _field(what: str) -> str:
    """The field that a sentence about a row begins with."""
    found = re.match(r"(?:no )?`([^`]{1,80})`", what)
    return found[1] if found else ""


@dataclass(frozen=True)
class Proposal:
    """Keys of `data` that would read more rows: as YAML to paste, and how many rows are in order with them and what is wrong with the others."""

    form: str
    columns: dict[str, str]
    roles: dict[str, str]
    num_in_order: int
    faults: tuple[Fault, ...]
    yaml: str


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with some rows; `best` are the findings with the proposal where there is one, and `subjects` are read with it."""

    subjects: tuple[Subject, ...]
    length: Length
    given: Findings
    best: Findings
    proposal: Proposal | None
    model: str
    without_model: str

    def to_json(self) -> dict[str, Any]:
        """The JSON contract of `pentamesh data doctor --json`. What is not a fault is counted with the proposal applied, where there is one."""
        best = self.best
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "sources": [{"name": s.name, "files": [str(p) for p in s.places], "form": self.given.forms[s.name]} for s in self.subjects],
            "num_rows": self.given.num_rows,
            "num_in_order": self.given.num_in_order,
            "is_well": self.is_well,
            "faults": [asdict(fault) for fault in self.given.told],
            "repeated": {"exact": best.repeats.num_exact, "but_for_case_and_white_space": best.repeats.num_folded},
            "nothing_to_train": _spots(best.untrained),
            "model": self.model or None,
            "without_model": self.without_model,
            "lengths": self._lengths(),
            "written": None,
            "proposal": asdict(self.proposal) if self.proposal else None,
        }

    def _lengths(self) -> dict[str, Any] | None:
        if not self.best.lengths:
            return None
        return asdict(self.length) | {
            "median": self.percentile(50),
            "p99": self.percentile(99),
            "max": self.percentile(100),
            "exceed": _spots(self.best.too_long),
        }

    def percentile(self, share: float) -> int:
        """Of the lengths of rows, in tokens that the model reads; that of a row."""
        return int(np.percentile(np.frombuffer(self.best.lengths, np.uint32), share, method="inverted_cdf"))

    @property
    def is_well(self) -> bool:
        """Whether training would take every row."""
        return not self.given.faults and not (self.length.too_long == "error" and self.best.too_long.num_rows)


def _spots(fault: Fault) -> dict[str, Any]:
    return {"num_rows": fault.num_rows, "places": [asdict(spot) for spot in fault.places]}


def diagnose(
    subjects: Sequence[Subject], length: Length, encoder_of: EncoderOf | None = None, *, model: str = "", without_model: str = ""
) -> Diagnosis:
    """What is wrong with all rows of `subjects`, and the keys that would read more of them."""
    shapes = Shapes()
    given = _found(subjects, length, encoder_of, shapes)
    proposal, best, read = None, given, tuple(subjects)
    if given.faults and (keys := proposed(shapes, subjects[0].data)):
        alone = sum(s.is_train for s in subjects) == 1
        changed = tuple(replace(s, data=s.data.model_copy(update=_changed(keys)), form=keys["form"] if alone else s.form) for s in subjects)
        found = _found(changed, length, encoder_of)
        if found.num_in_order > given.num_in_order:
            proposal, best, read = (
                Proposal(**keys, num_in_order=found.num_in_order, faults=found.told, yaml=_yaml(keys, changed[0] if alone else None)),
                found,
                changed,
            )
    return Diagnosis(read, length, given, best, proposal, model, without_model)


def _changed(keys: dict[str, Any]) -> dict[str, Any]:
    return {"columns": keys["columns"], "roles": keys["roles"]}


def _yaml(keys: dict[str, Any], subject: Subject | None) -> str:
    """The keys to paste; the form is among them where a single source would not be taken for it."""
    said = {key: value for key, value in _changed(keys).items() if value}
    try:
        unasked = subject is None or form_of(subject.places, "auto", keys["columns"]) == keys["form"]
    except InputError:
        unasked = False
    said = said if unasked and said else {"form": keys["form"]} | said
    return yaml.safe_dump({"data": said}, default_flow_style=None, sort_keys=False, allow_unicode=True, width=10_000)


def _forms(subjects: Sequence[Subject]) -> dict[str, Form | None]:
    """The form of each subject; held-out rows have that of all training rows, where these have one."""
    found: dict[str, Form | None] = {subject.name: form_found(subject) for subject in subjects}
    trained = {found[subject.name] for subject in subjects if subject.is_train}
    if len(trained) == 1:
        found.update((subject.name, found[subjects[0].name]) for subject in subjects if not subject.is_train)
    return found


def _found(subjects: Sequence[Subject], length: Length, encoder_of: EncoderOf | None, shapes: Shapes | None = None) -> Findings:
    found = Findings(_forms(subjects))
    for subject, row in examined(subjects, length, encoder_of, found):
        found.add(row, subject)
        if shapes is not None and row.row is not None:
            shapes.add(row.row.value)
    return found


def examined(subjects: Sequence[Subject], length: Length, encoder_of: EncoderOf | None, found: Findings) -> Iterator[tuple[Subject, Judged]]:
    """Every row of the subjects, judged in the form that was found of each. What keeps a tokenizer from being used at all is a fault by itself."""
    usable = cache(encoder_of) if encoder_of else None
    for subject in subjects:
        form: Form = found.forms[subject.name] or "messages"
        encode = None
        try:
            encode = usable(form) if usable else None
        except InputError as error:
            for problem in error.problems:
                found.faults.setdefault(problem.what, Fault(problem.what, problem.hint, 0, [Spot(problem.where, "")]))
        yield from ((subject, row) for row in judged(subject, form, length, encode))
