"""Source: where the rows of a job come from, in which form and how often, and one after the other what is trained of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentamesh.errors import InputError, Problem
from pentamesh.job.job import Data, Job, Rows
from pentamesh.job.read import is_hub_data
from pentamesh.run.data.forms import Form, Sample, checked_rows, form_of
from pentamesh.run.data.places import find_places
from pentamesh.run.data.problems import Problems
from pentamesh.run.data.rows import Place
from pentamesh.units import format_path

__all__ = ["Origin", "Source", "named", "source"]


@dataclass(frozen=True)
class Origin:
    """Places of rows that have one form, and what the job says of rows. `weight` is how often an epoch sees each, `name` what people call them."""

    name: str
    places: tuple[Place, ...]
    form: Form
    data: Data
    weight: float = 1.0

    def rows(self, problems: Problems, limit: int | None = None) -> Iterator[Sample]:
        """The content of the first `limit` rows that are in order; what is wrong with the others goes to `problems`."""
        return checked_rows(self.places, self.form, problems, limit, self.data)


@dataclass(frozen=True)
class Source:
    """Where the rows of a job come from: training rows, and either held-out ones or the share of the training rows that are held out."""

    train: tuple[Origin, ...]
    held_out: Origin | None
    share: float | None
    max_rows: int | None

    @property
    def origins(self) -> tuple[Origin, ...]:
        return (*self.train, *([self.held_out] if self.held_out else []))


def source(job: Job, base: Path) -> Source:
    """The places that `job.data` names and the forms of their rows. Raises InputError with every name that leads nowhere."""
    data = job.data
    share = None if isinstance(data.held_out, str) else data.held_out
    problems, places, train = [*_stray(data, base)], {}, []
    for key, rows in named(data, base).items():
        try:
            usual = "test" if key == "data.held_out" else "train"
            places[key] = find_places(rows, key, base, usual, streaming=data.streaming and key != "data.held_out")
            if key != "data.held_out":
                form = form_of(places[key], rows.form or "auto", data.columns)
                train.append(Origin(_name(rows.rows, base), places[key], form, data, rows.weight))
        except InputError as error:
            problems += error.problems
    if data.train is None:
        problems.append(Problem("no training data", "data.train", "give a file or glob, or a data set of the hub"))
    if share is not None and not 0 < share < 1:
        problems.append(Problem(f"a share of {share:g} cannot be held out", "data.held_out", "give a share such as 0.05, or a file"))
    problems += _twice({key: found for key, found in places.items() if key in data.sources})
    if problems:
        raise InputError(*problems)
    return Source(tuple(train), _held_out(data, places.get("data.held_out"), train, base), share, data.max_rows)


def named(data: Data, base: Path) -> dict[str, Rows]:
    """The sources of a job by the key that names them. The subset beside a file belongs to the held-out data set, where that is one."""
    found = dict(data.sources)
    if isinstance(data.held_out, str):
        held_out = Rows(rows=data.held_out, subset=data.subset, split=data.held_out_split)
        is_hub = is_hub_data(data.held_out, base)
        if is_hub and "data.train" in found and not is_hub_data(found["data.train"].rows, base):
            found["data.train"] = found["data.train"].model_copy(update={"subset": None})
        found["data.held_out"] = held_out if is_hub else held_out.model_copy(update={"subset": None})
    return found


def _stray(data: Data, base: Path) -> Iterator[Problem]:
    """A subset beside several sources can only be that of the held-out rows, and a held-out split needs such rows."""
    if data.subset and isinstance(data.train, tuple) and not (isinstance(data.held_out, str) and is_hub_data(data.held_out, base)):
        what = f"subset = {data.subset} beside a list of sources, each of which has its own"
        yield Problem(what, "data.subset", f"give it to its source: `- {{rows: org/name, subset: {data.subset}}}`")
    if data.held_out_split and not isinstance(data.held_out, str):
        what = f"held_out_split = {data.held_out_split} and data.held_out = {data.held_out}, which is no hub data set"
        yield Problem(what, "data.held_out_split", "leave it out")


def _held_out(data: Data, places: tuple[Place, ...] | None, train: list[Origin], base: Path) -> Origin | None:
    """Held-out rows have the form of all training rows, or where those have several `data.form`."""
    if places is None:
        return None
    several = len({origin.form for origin in train}) > 1
    form = form_of(places, data.form, data.columns) if several else train[0].form
    return Origin(_name(str(data.held_out), base), places, form, data)


def _name(rows: str, base: Path) -> str:
    return rows if is_hub_data(rows, base) else format_path(base / rows)


def _twice(found: dict[str, tuple[Place, ...]]) -> Iterator[Problem]:
    """Rows that two sources name: they would be trained twice without a word."""
    seen: dict[Any, str] = {}
    for key, places in found.items():
        for place in places:
            same = place.resolve() if isinstance(place, Path) else place.name
            if (first := seen.setdefault(same, key)) != key:
                yield Problem(f"{place} is named by {first} already", key, f"to train on it twice, give {first} weight: 2")
