"""Checkpoints: what a folder of them holds and whether it is whole, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pentamesh.checkpoint.manifest import name_of
from pentamesh.errors import Problem
from pentamesh.plan.reasons import NAMES
from pentamesh.units import format_bytes, visible

__all__ = ["listed", "verified"]

COLUMNS = ("checkpoint", "saved (UTC)", "size", "layout", "ranks", "precision", "held-out", "samples", "trained tokens", "")
LEFT = {
    "partial": "is being written, or was left by a run that died; saving that step or a later one removes it",
    "removed": "is being removed, or was left by a run that died; the next save removes it",
}


def listed(found: dict[str, Any]) -> str:
    """The text of a `pentamesh.checkpoints`: a line for each, then what is unfinished and what else there is to say."""
    rows = [COLUMNS, *map(_cells, found["checkpoints"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(visible(line) for line in (*lines, *_notes(found)))


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    layout, loss = row["layout"], row["held_out_loss"]
    return (
        row["folder"],
        _text(row["saved_at"]).replace("T", " ").removesuffix("Z"),
        format_bytes(row["bytes"]),
        f"{NAMES.get(layout['strategy'], layout['strategy'])} on {layout['mesh']}" if layout else "",
        _text(row["num_ranks"]),
        _text(row["precision"]),
        f"{loss:.4f}" if loss is not None else "",
        _count(row["consumed_samples"]),
        _count(row["trained_tokens"]),
        ", ".join([*row["pointers"], *_marks(row)]),
    )


def _marks(row: dict[str, Any]) -> Iterator[str]:
    if row["problem"]:
        yield "cannot be read"
    elif "optimizer state" not in row["holds"]:
        yield "weights only"
    if row["step"] is not None and row["folder"].removesuffix(".replaced") != name_of(row["step"]):
        yield f"of step {row['step']}"
    if row["replaced"]:
        yield "replaced"


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else _text(value)


def _notes(found: dict[str, Any]) -> Iterator[str]:
    said = [f"{row['folder']}: {row['problem']}" for row in found["checkpoints"] if row["problem"]]
    said += [f"{row['folder']} was saved anew and the run died at that; a resume may still use it" for row in found["checkpoints"] if row["replaced"]]
    said += [f"{left['folder']} ({format_bytes(left['bytes'])}) {LEFT[left['kind']]}" for left in found["unfinished"]]
    said += [f"{name}.json names {at}, which is not there" for name, at in found["lost_pointers"].items()]
    if said:
        yield ""
    yield from said


def verified(found: dict[str, Any]) -> str:
    """The text of a `pentamesh.checkpoint_verification`."""
    return "\n".join(visible(line) for line in _verdicts(found))


def _verdicts(found: dict[str, Any]) -> Iterator[str]:
    for row in found["checkpoints"]:
        yield f"{row['folder']}  {'whole' if row['is_whole'] else 'NOT WHOLE'}"
        for problem in row["problems"]:
            yield from str(Problem(**problem)).splitlines()
    if found["folder"] is not None:
        yield f"--resume would go on from {found['resume_from']}" if found["resume_from"] else "--resume would have nothing to go on from"
