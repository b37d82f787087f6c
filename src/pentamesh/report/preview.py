"""Preview: what the model will read of a job's data and which of it is trained, for a terminal.

Trained tokens are green where there is colour and stand between ⟦ and ⟧ everywhere, so that nothing is lost without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from pentamesh.units import format_count, visible

__all__ = ["preview", "totals", "turn_counts"]

OPEN, CLOSE = "⟦", "⟧"
MAX_CHARS = 1200  # of one piece: a screen
BAR_WIDTH = 30


def preview(found: dict[str, Any]) -> Group:
    """The rows of a `pentamesh.data_preview` with trained tokens marked, and its counts and lengths; rich or `Console.print` takes it."""
    return Group(*map(_row, found["rows"]), _totals(found), Text(), *_histogram(found["lengths"]))


def _row(row: dict[str, Any]) -> Panel:
    text = Text()
    for piece in row["pieces"]:
        text.append(
            f"{OPEN}{_short(piece['text'])}{CLOSE}" if piece["trained"] else _short(piece["text"]), "bold green" if piece["trained"] else "dim"
        )
    return Panel(text, title=Text(row["where"]), subtitle=Text(turn_counts(row)), title_align="left", subtitle_align="left")


def turn_counts(row: dict[str, Any]) -> str:
    """How many tokens a row has and how many are trained, by turn where it has turns."""
    counts = f"{row['num_tokens']:,} tokens, {row['num_trained']:,} trained"
    if row["form"] in ("text", "prompt_completion"):
        return counts
    turns = [f"{piece['num_tokens']:,}" for piece in row["pieces"] if piece["trained"]]
    return f"{counts} (by turn: {', '.join(turns)})"


def _short(text: str) -> str:
    """The text, its middle left out where it is longer than a screen, and control characters made visible."""
    if len(text) > MAX_CHARS:
        half = MAX_CHARS // 2
        text = f"{text[:half]} ... {len(text) - 2 * half:,} characters ... {text[-half:]}"
    return visible(text)


def _totals(found: dict[str, Any]) -> Text:
    named = [(f"{OPEN}{name}{CLOSE}" if name == "trained" else name, said) for name, said in totals(found)]
    return Text("\n".join(f"{name:<11}{said}" for name, said in named))


def totals(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What is said of all rows that were measured, each under its name."""
    tokens, trained, lengths = found["num_tokens"], found["num_trained"], found["lengths"]
    padding, repeated = found["padding"], found["repeated"]
    rows = f"{'' if found['all_measured'] else 'the first '}{found['num_measured']:,} rows"
    return [
        ("trained", f"{format_count(trained)} of {format_count(tokens)} tokens ({trained / max(tokens, 1):.0%}) in {rows}"),
        ("length", f"min {lengths['min']:,}, median {lengths['median']:,}, 95% {lengths['p95']:,}, max {lengths['max']:,} tokens"),
        ("too long", _too_long(found)),
        ("dropped", _dropped(found)),
        ("repeated", f"{repeated['exact']:,} rows exactly, {repeated['but_for_case_and_white_space']:,} more but for case and white space"),
        ("padding", f"{padding['alone']:.0%} of what is computed; with packing {padding['packed']:.0%}, in {padding['num_packed']:,} rows"),
        *(("source", _source(source)) for source in found["sources"] if len(found["sources"]) > 1),
    ]


def _dropped(found: dict[str, Any]) -> str:
    """What training leaves out; a row that is too long is only dropped where the job says so."""
    dropped = {why: num for why, num in found["dropped"].items() if why != "too_long" or found["too_long"] == "drop"}
    return ", ".join(f"{num:,} rows: {why.replace('_', ' ')}" for why, num in sorted(dropped.items())) or "none"


def _source(source: dict[str, Any]) -> str:
    rows = f"{'' if source['all_measured'] else 'the first '}{source['num_measured']:,} rows"
    counts = f"{format_count(source['num_tokens'])} tokens, {format_count(source['num_trained'])} trained"
    return f"{source['name']} ({source['form']}, weight {source['weight']:g}): {rows}, {counts}"


def _too_long(found: dict[str, Any]) -> str:
    num, seq_len = found["num_too_long"], found["seq_len"]
    if all(source["form"] == "text" for source in found["sources"]):
        return f"none: documents are cut to seq_len {seq_len:,}"
    if not num:
        return f"none: all fit seq_len {seq_len:,}"
    fate = {
        "error": f"training stops: set batch.seq_len: {found['lengths']['max']} or data.too_long",
        "drop": "dropped",
        "truncate": "truncated",
        "split": "split",
    }
    return f"{num:,} rows exceed seq_len {seq_len:,} ({fate[found['too_long']]})"


def _histogram(lengths: dict[str, Any]) -> Iterator[Text]:
    most = max(count for _, _, count in lengths["bins"])
    width = len(f"{lengths['bins'][-1][1]:,}")
    for low, high, count in lengths["bins"]:
        bar = "█" * -(-count * BAR_WIDTH // most)
        yield Text(f"{low:>{width},} to {high:>{width},}  {bar:<{BAR_WIDTH}} {count:,}")
