"""Doctor: what is wrong with training data and what would mend it, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pentamesh.units import visible

__all__ = ["doctor"]

# What training does with a row that is too long.
FATES = {
    "error": "training stops: raise batch.seq_len, or set data.too_long",
    "drop": "they are dropped",
    "truncate": "they are truncated",
    "split": "they are split",
}


def doctor(found: dict[str, Any]) -> str:
    """The text of a `pentamesh.data_doctor`."""
    return "\n".join(visible(line) for line in _lines(found))


def _lines(found: dict[str, Any]) -> Iterator[str]:
    for source in found["sources"]:
        yield f"{'source':<11}{source['name']}: {source['form'] or 'no form that is known'}"
    yield f"{'in order':<11}{found['num_in_order']:,} of {found['num_rows']:,} rows{_judged_by(found)}"
    repeated = found["repeated"]
    yield f"{'repeated':<11}{repeated['exact']:,} rows exactly, {repeated['but_for_case_and_white_space']:,} more but for case and white space"
    if (nothing := found["nothing_to_train"])["num_rows"]:
        yield f"{'untrained':<11}{nothing['num_rows']:,} rows have nothing to train: {_places(nothing)}"
    if lengths := found["lengths"]:
        yield f"{'length':<11}median {lengths['median']:,}, 99% {lengths['p99']:,}, max {lengths['max']:,} tokens"
        yield f"{'too long':<11}{_too_long(lengths)}"
    yield from _faults(found["faults"])
    if written := found["written"]:
        yield ""
        more = f", {written['repeated']:,} that repeat one left out" if written["repeated"] else ""
        in_order = "rows that are in order with the lines below" if found["proposal"] else "rows that are in order"
        yield f"{'written':<11}{written['clean']}: {written['num_clean']:,} {in_order}{more}"
        yield f"{'':<11}{written['rejected']}: {written['num_rejected']:,} rows, each with where it is and why"
    if proposal := found["proposal"]:
        yield ""
        yield f"With these lines in the job {proposal['num_in_order']:,} of {found['num_rows']:,} rows are in order:"
        yield ""
        yield from proposal["yaml"].rstrip().split("\n")
        if proposal["faults"]:
            yield from ("", "and of the others it is said:")
        yield from _faults(proposal["faults"])


def _faults(faults: list[dict[str, Any]]) -> Iterator[str]:
    for fault in faults:
        yield ""
        yield f"{_num(fault)}: {fault['what']}"
        yield f"  where  {_places(fault)}"
        if fault["hint"]:
            yield f"  hint   {fault['hint']}"


def _judged_by(found: dict[str, Any]) -> str:
    if found["model"]:
        return f", by the template and the tokens of {found['model']}"
    return f", without a model: {found['without_model']}" if found["without_model"] else ""


def _too_long(lengths: dict[str, Any]) -> str:
    exceed = lengths["exceed"]
    if not exceed["num_rows"]:
        return f"none: all fit seq_len {lengths['seq_len']:,}"
    return f"{exceed['num_rows']:,} rows exceed seq_len {lengths['seq_len']:,} ({FATES[lengths['too_long']]}): {_places(exceed)}"


def _num(fault: dict[str, Any]) -> str:
    num = fault["num_rows"]
    return f"{num:,} row{'s' * (num != 1)}" if num else "all rows"


def _places(fault: dict[str, Any]) -> str:
    spots = [f"{spot['where']} {spot['field']}".rstrip() for spot in fault["places"]]
    more = fault["num_rows"] - len(spots)
    return ", ".join(spots) + (f" and {more:,} more" if more > 0 else "")
