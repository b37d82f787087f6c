"""Resumed: the plan of a run that goes on from checkpoints, which may be for other ranks and layouts, and what it may not change."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pentamesh.checkpoint.manifest import Manifest
from pentamesh.checkpoint.names import published
from pentamesh.errors import InputError, Problem
from pentamesh.job.job import Job
from pentamesh.job.precision import PRECISIONS, Precision
from pentamesh.model.frozen import frozen
from pentamesh.model.read import read_model
from pentamesh.plan.drift import check_model
from pentamesh.plan.plan import Plan
from pentamesh.run.folder import RunFolder
from pentamesh.units import format_path

__all__ = ["resumed"]


def resumed(folder: RunFolder, plan: Plan, *, resume: bool) -> Plan:
    """The plan with its parent where an earlier one is continued, on as many processes or others; what changed is printed.

    Raises InputError for a folder with checkpoints that it is not asked to `resume`, and for state in them that is not this plan's; Drift for
    another model.
    """
    if not published(folder.checkpoints):
        return plan
    if not resume:
        raise InputError(
            f"{folder.kept_in or format_path(folder.path)} already holds checkpoints of a run",
            where="checkpoint.folder" if folder.kept_in else "logging.folder",
            hint="continue it with --resume, or choose another folder",
        )
    anew = f"or start anew in another logging.folder from `pentamesh export {format_path(folder.path)}`"
    if problem := _other_precision(folder, plan.precision, anew):
        raise InputError(problem)
    try:
        earlier = Plan.read(folder.plan)
    except InputError as error:
        print(f"what changed since the checkpoint cannot be told: {error.problems[0].what}", file=sys.stderr)  # noqa: T201
        return plan
    check_model(earlier.model, plan.model, f"{plan.job.model.name}, the model of the checkpoint", f"put the model back as it was, {anew}")
    if problems := [*_other_state(earlier.job, plan.job, anew)]:
        raise InputError(*problems)
    if earlier.fingerprint == plan.fingerprint:
        return replace(plan, parent=earlier.parent)
    before, now = earlier.layout.mesh.num_ranks, plan.layout.mesh.num_ranks
    ranks = f", from {before} to {now} processes" if before != now else ""
    changes = "\n".join(_changes(earlier.to_json(), plan.to_json()))
    print(f"the plan changed since the checkpoint{ranks}:\n{changes}", file=sys.stderr)  # noqa: T201
    return replace(plan, parent=earlier.fingerprint)


def _other_precision(folder: RunFolder, now: Precision, anew: str) -> Problem | None:
    """What keeps a checkpoint from being gone on with in this precision, by what its own manifest says: weights or moments of another dtype."""
    for checkpoint in published(folder.checkpoints):
        with suppress(InputError):
            was = PRECISIONS.get(str(Manifest.read(checkpoint).facts.get("precision")), now)
            if (was.weight, was.state) == (now.weight, now.state):
                return None
            works = [p.name for p in PRECISIONS.values() if (p.weight, p.state) == (was.weight, was.state)]
            what = f"{checkpoint.name} keeps weights and optimizer state in {was.weight} ({was.name}), and {now.name} keeps them in {now.weight}"
            return Problem(what, "precision", f"set precision to {' or '.join(works)}, {anew}")
    return None


def _other_state(earlier: Job, job: Job, anew: str) -> Iterator[Problem]:
    """What makes the state in a checkpoint that of other parameters or tokens, in a model of the same sizes."""
    was, now = earlier.training.freeze, job.training.freeze
    if was != now and _trained(job, was) != _trained(job, now):
        what = f"what is frozen is not what it was ({', '.join(was) or 'nothing'}): the checkpoint has optimizer state of what was trained"
        yield Problem(what, "training.freeze", f"put freeze back, {anew}")
    if (tokens := earlier.model.new_tokens) != job.model.new_tokens:
        said = ", ".join(map(repr, tokens)) or "none"
        what = f"the new tokens are not those that were, in their order ({said}): the checkpoint has their rows in that order"
        yield Problem(what, "model.new_tokens", f"put new_tokens back, {anew}")


def _trained(job: Job, freeze: Sequence[str]) -> set[str]:
    """Names of what would be trained of a job's model if it froze by these patterns."""
    model = frozen(read_model(job.model.name, revision=job.model.revision), freeze)
    return {t.name for t in model.parameters if t.trained}


def _changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """One line for every decision that differs between two plans."""
    found = []
    for part in ("job", "layout", "policy", "precision"):
        old, new = _flat(before[part]), _flat(after[part])
        found += [f"  {part}.{key}: {old.get(key)} -> {new.get(key)}" for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    return found


def _flat(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
