"""From what people write to a Job: a YAML file, overrides and flags become one frozen value, or every problem they have at once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from glob import has_magic
from pathlib import Path
from typing import Any

from pentamesh.errors import InputError, Problem
from pentamesh.job.check import faults, sections
from pentamesh.job.combinations import Conflict, impossible, untrainable
from pentamesh.job.files import file_kind
from pentamesh.job.hardware import Hardware, read_hardware
from pentamesh.job.job import Job
from pentamesh.job.written import KeyPath, Written, read_text, read_value, read_yaml

__all__ = ["check_trainable", "is_hub_data", "job_from_flags", "read_job", "read_job_text", "resolve"]


def read_job(path: Path, overrides: Sequence[str] = ()) -> tuple[Job, dict[str, str]]:
    """The job of a file with `a.b=c` overrides applied, and those overrides as written. Raises InputError with every problem."""
    return read_job_text(read_text(path), str(path), overrides)


def read_job_text(text: str, where: str = "job.yaml", overrides: Sequence[str] = ()) -> tuple[Job, dict[str, str]]:
    """`read_job` for a text; `where` names it in errors."""
    written = read_yaml(text, where)
    said = _override(written, overrides)
    return _job(written), said


def job_from_flags(flags: Iterable[tuple[str, str, Any]]) -> Job:
    """The job that a command line describes: of each flag its spelling, the dotted key it sets, and the value.

    Raises InputError with every problem, each at its flag.
    """
    written = Written("the command line")
    for flag, dotted, value in flags:
        path = tuple(dotted.split("."))
        _put(written.tree, path, value)
        written.sources[path] = flag
    return _job(written)


def check_trainable(job: Job, where: str, base: Path | None = None) -> None:
    """Raises InputError with everything that keeps `job` from being trained: what is not given, what is only planned so far and, where the
    folder `base` is given, training rows that are not in it."""
    problems = [Problem(conflict.what, f"{where} {conflict.keys[0]}", conflict.hint) for conflict in untrainable(job)]
    if base is not None:
        names = {key: source.rows for key, source in job.data.sources.items()}
        names |= {"data.held_out": job.data.held_out} if isinstance(job.data.held_out, str) else {}
        problems += [problem for key, name in names.items() for problem in _absent(name, base, f"{where} {key}")]
    if problems:
        raise InputError(*problems)


def resolve(path: str, base: Path) -> Path:
    """Where a path of a job points: absolute and `~` paths as they are, others (`~nobody` too) from the job file's folder `base`."""
    return base / os.path.expanduser(path)


# An organisation and a name, as `datasets` takes them.
HUB_DATA = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_data(name: str, base: Path) -> bool:
    """Whether `name` can only be a data set of the hub: it is spelled like one and not like a file of rows, and no such file or folder is here."""
    target = resolve(name, base)
    spelled = HUB_DATA.fullmatch(name) is not None and not any(file_kind(name))
    return spelled and not (target.exists() or target.is_symlink() or target.parent.exists())


def _absent(name: str, base: Path, where: str) -> list[Problem]:
    target = resolve(name, base)
    if is_hub_data(name, base) or target.exists() or (has_magic(name) and any(target.parent.glob(target.name))):
        return []
    beside = sorted(p.name for p in target.parent.iterdir()) if target.parent.is_dir() else []
    hint = f"that folder has {', '.join(beside[:8]) or 'no files'}" if target.parent.is_dir() else "that folder does not exist"
    return [Problem(f"no file {name} in {target.parent}", where, hint)]


def _override(written: Written, overrides: Sequence[str]) -> dict[str, str]:
    """Put `a.b=c` overrides into what was written; returns them by key. Raises InputError."""
    said, problems = {}, []
    for override in overrides:
        dotted, equals, text = override.partition("=")
        path, where = tuple(dotted.strip().split(".")), f"--set {override}"
        if not equals or not all(path):
            problems.append(Problem(f"{override!r} sets nothing", where, "write --set optimizer.lr=1e-4"))
            continue
        try:
            value = read_value(text, where)
        except InputError as error:
            problems += error.problems
            continue
        if path == ("model",) and isinstance(value, str):
            path = ("model", "name")
        _put(written.tree, path, value)
        written.sources[path] = where
        said[dotted.strip()] = text
    if problems:
        raise InputError(*problems)
    return said


def _put(tree: dict[str, Any], path: KeyPath, value: Any) -> None:
    for key in path[:-1]:
        inner = tree.get(key)
        if key == "model" and isinstance(inner, str):
            inner = {"name": inner}
        tree[key] = inner if isinstance(inner, dict) else {}
        tree = tree[key]
    tree[path[-1]] = value


def _job(written: Written) -> Job:
    """The Job of what was written. Raises InputError: what is undeclared or of the wrong kind, and of the rest what is impossible together."""
    tree = _plain(written.tree)
    found = list(faults(Job, tree, written.at))
    wrong = [path for path, _ in found]
    job = Job.model_validate(_without(tree, wrong))
    problems = [problem for _, problem in found]
    hardware = None if any(path[0] == "hardware" for path in wrong) else _hardware(job, written, problems)
    problems += [_placed(conflict, written) for conflict in impossible(job, hardware) if not _in_doubt(conflict, wrong, written)]
    if problems:
        raise InputError(*sorted(problems, key=lambda problem: _line(problem.where)))
    return job


def _in_doubt(conflict: Conflict, wrong: Sequence[KeyPath], written: Written) -> bool:
    """Whether a conflict may vanish with other faults: one of its keys is at fault itself, or stands at its default in a section with one."""
    for key in conflict.keys:
        path = tuple(key.split("."))
        at_default = path not in written.lines and path not in written.sources
        if path in wrong or path[:1] in wrong or (at_default and any(path[0] == other[0] for other in wrong)):
            return True
    return False


def _plain(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with its shorthands written out: `model: name`, and sections without any key."""
    plain = {key: value for key, value in tree.items() if value is not None or key not in sections()}
    if isinstance(plain.get("model"), str):
        plain["model"] = {"name": plain["model"]}
    return plain


def _without(tree: dict[str, Any], paths: Sequence[KeyPath]) -> dict[str, Any]:
    """What is left to judge when the keys at fault are taken out; a model stands in where none is named."""
    kept = {key: dict(value) if isinstance(value, dict) else value for key, value in tree.items()}
    for path in paths:
        section = kept.get(path[0])
        if len(path) == 1 or path[0] == "hardware" or not isinstance(section, dict):
            kept.pop(path[0], None)
        else:
            section.pop(path[1], None)
    if not isinstance(kept.get("model"), dict) or "name" not in kept["model"]:
        kept["model"] = {"name": "unnamed"}
    return kept


def _hardware(job: Job, written: Written, problems: list[Problem]) -> Hardware | None:
    """The hardware a job names, None for this machine (asking it takes a while) and for what is wrong."""
    if job.hardware == "auto":
        return None
    try:
        return read_hardware(job.hardware, written.at(("hardware",)))
    except InputError as error:
        problems += error.problems
        return None


def _placed(conflict: Conflict, written: Written) -> Problem:
    """A conflict at the first of its keys that was written, since the others are defaults."""
    paths = [tuple(key.split(".")) for key in conflict.keys]
    given = [path for path in paths if path in written.lines or path in written.sources]
    return Problem(conflict.what, written.at((given or paths)[0]), conflict.hint)


def _line(where: str) -> int:
    number = where.split(" ")[0].rpartition(":")[2]
    return int(number) if number.isdigit() else 0
