"""Page: the preview of a job's data as one HTML file, which asks for nothing from elsewhere and runs no script."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from pentamesh.report.preview import totals, turn_counts
from pentamesh.units import visible

__all__ = ["page"]

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color-scheme: light dark; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #8886; border-radius: 6px; padding: .8em; }
mark { background: #2a92; color: inherit; outline: 1px solid #2a95; }
th { text-align: left; padding-right: 1.5em; vertical-align: top; }
meter { width: 24em; }
"""
# No script and nothing from elsewhere, whatever a row says.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(found: dict[str, Any]) -> str:
    """The page of a `pentamesh.data_preview`: totals, lengths, and rows with the trained tokens marked."""
    body = "\n".join([*_totals(found), *_histogram(found["lengths"]), *map(_row, found["rows"])])
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}"><title>Training data</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n<h1>Training data</h1>\n{body}\n</body></html>\n'


def _totals(found: dict[str, Any]) -> Iterator[str]:
    yield "<table>"
    yield from (f"<tr><th>{_text(name)}</th><td>{_text(said)}</td></tr>" for name, said in totals(found))
    yield "</table>"


def _histogram(lengths: dict[str, Any]) -> Iterator[str]:
    most = max(count for _, _, count in lengths["bins"])
    yield "<h2>Lengths in tokens</h2>\n<table>"
    for low, high, count in lengths["bins"]:
        yield f'<tr><th>{low:,} to {high:,}</th><td><meter max="{most}" value="{count}"></meter> {count:,}</td></tr>'
    yield "</table>"


def _row(row: dict[str, Any]) -> str:
    pieces = (f"<mark>{_text(piece['text'])}</mark>" if piece["trained"] else _text(piece["text"]) for piece in row["pieces"])
    return f"<h2>{_text(row['where'])}</h2>\n<p>{_text(turn_counts(row))}</p>\n<pre>{''.join(pieces)}</pre>"


def _text(text: str) -> str:
    return escape(visible(text))
