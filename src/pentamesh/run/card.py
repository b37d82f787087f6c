"""Card: what the README of a pushed model says of how it was trained - from the files of its run alone, and without a path of the machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from pentamesh import __version__
from pentamesh.job.job import Rows
from pentamesh.job.read import HUB_DATA
from pentamesh.plan.plan import Plan
from pentamesh.plan.reasons import NAMES
from pentamesh.run.folder import RunFolder
from pentamesh.units import format_count

__all__ = ["card"]

_METHODS = {"full": "full fine-tuning", "pretrain": "pre-training from random weights"}


def card(folder: RunFolder, step: int, repository: str) -> str:
    """The model card of the checkpoint of `step`."""
    plan = Plan.read(folder.plan)
    facts = "".join(f"| {name} | {_cell(value)} |\n" for name, value in _facts(plan, folder, step))
    front = yaml.safe_dump(_front(plan), sort_keys=False)
    return f"---\n{front}---\n\n# {repository.partition('/')[2]}\n\n{_said(plan)}\n\n| | |\n| --- | --- |\n{facts}"


def _cell(value: str) -> str:
    """A value in a table, whose columns end at a bar, between backticks too."""
    return value.replace("|", r"\|")


def _front(plan: Plan) -> dict[str, Any]:
    """What the hub reads of a card: names of things that it has itself."""
    found: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["pentamesh"]}
    if plan.job.method != "pretrain" and _is_published(plan.job.model.name):
        found["base_model"] = plan.job.model.name
    if datasets := [source.rows for source in plan.job.data.sources.values() if _is_published(source.rows)]:
        found["datasets"] = datasets
    return found


def _is_published(name: str) -> bool:
    """Whether a name of a plan, in which paths are absolute, is one of the hub."""
    return not Path(name).is_absolute() and HUB_DATA.fullmatch(name) is not None


def _name(name: str) -> str:
    """A hub id, or of a path its last part."""
    return name if _is_published(name) else Path(name).name


def _said(plan: Plan) -> str:
    base = _name(plan.job.model.name)
    how = f"The architecture of {base}, trained from random weights" if plan.job.method == "pretrain" else f"{base}, fine-tuned"
    rows = ", ".join(_name(source.rows) for source in plan.job.data.sources.values())
    return f"{how} on {rows} with Pentamesh {__version__}."


def _rows_of(source: Rows) -> str:
    weight = f"weight {source.weight:g}" if source.weight != 1 else None
    return ", ".join(filter(None, [_name(source.rows), source.subset, source.split, weight]))


def _facts(plan: Plan, folder: RunFolder, step: int) -> Iterator[tuple[str, str]]:
    job, metrics = plan.job, _rows(folder.metrics, step)
    yield "base model", _name(job.model.name) + (f" (revision {job.model.revision})" if job.model.revision else "")
    yield "method", _METHODS[job.method]
    if job.training.freeze:
        trained, whole = format_count(plan.model["trained_parameters"]), format_count(plan.model["num_parameters"])
        yield "trained", f"{trained} of {whole} parameters; frozen: {', '.join(f'`{pattern}`' for pattern in job.training.freeze)}"
    if job.model.new_tokens:
        yield "new tokens", ", ".join(f"`{token}`" for token in job.model.new_tokens)
    yield "training rows", "; ".join(map(_rows_of, job.data.sources.values()))
    held_out = job.data.held_out
    if held_out is not None:
        yield "held-out rows", _name(held_out) if isinstance(held_out, str) else f"{held_out:.2%} of the training rows"
    yield "steps", f"{step:,} of {job.batch.global_batch:,} sequences of up to {job.batch.seq_len:,} tokens"
    if metrics:
        yield "trained tokens", f"{metrics[-1]['trained_tokens']:,}"
        yield "training loss", _from_to(metrics, "loss")
    if evaluations := _rows(folder.held_out, step):
        yield "held-out loss", _from_to(evaluations, "held_out_loss")
    optimizer = job.optimizer
    yield "optimizer", f"{optimizer.name}, peak learning rate {optimizer.lr:g}, {optimizer.schedule}, {optimizer.warmup_steps:,} steps of warm-up"
    yield "precision", job.precision
    yield "seed", str(job.training.seed)
    yield "layout", f"{NAMES[plan.strategy]}, {plan.layout.mesh}, on {plan.hardware['description']}"
    yield "plan", f"`{plan.fingerprint}`"


def _from_to(rows: list[dict[str, Any]], key: str) -> str:
    """The first and the last value, each with its step."""
    found = [(row["step"], row[key]) for row in rows if row[key] is not None]
    return " to ".join(f"{value:.4f} (step {at})" for at, value in dict.fromkeys((found[0], found[-1]))) if found else "not finite"


def _rows(path: Path, step: int) -> list[dict[str, Any]]:
    """The lines up to `step` of a file of metrics."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [row for row in rows if row["step"] <= step]
