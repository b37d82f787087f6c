"""Subjects: the rows that a job or a name stands for, as they are to be judged; a fault in the first row keeps nobody from the others."""

from __future__ import annotations

from pathlib import Path

from pentamesh.errors import InputError, Problem
from pentamesh.job.job import Data, Job
from pentamesh.job.read import is_hub_data
from pentamesh.run.data.judge import Subject
from pentamesh.run.data.places import find_files, find_places, hub_split
from pentamesh.run.data.source import named

__all__ = ["file_subject", "job_subjects"]


def job_subjects(job: Job, base: Path) -> tuple[Subject, ...]:
    """The training rows of a job, and its held-out rows where they have places of their own. Raises InputError."""
    data, problems, found = job.data, [], []
    if data.train is None:
        problems.append(Problem("no training data", "data.train", "give a file or glob, or a data set of the hub"))
    for key, rows in named(data, base).items():
        is_train = key != "data.held_out"
        try:
            places = find_places(rows, key, base, "train" if is_train else "test")
            found.append(Subject(rows.rows, places, data, rows.form or data.form, data.max_rows if is_train else None, is_train))
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(*problems)
    return tuple(found)


def file_subject(name: str, where: str) -> Subject:
    """The rows that a path, a glob or a name on the hub stands for. Raises InputError."""
    if not name.strip():
        raise InputError("the name of the data is empty", where=where, hint="give a file, a folder or a glob")
    places = (hub_split(name, None, "train", where),) if is_hub_data(name, Path()) else find_files(name, Path(), where)
    return Subject(name, places, Data())
