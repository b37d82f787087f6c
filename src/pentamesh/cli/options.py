"""Options that several commands have."""

# Annotations are objects here, not text: typer reads those of every command, whichever is asked for, and would compile each.
from typing import Annotated

import typer

from pentamesh.errors import InputError

__all__ = ["HELP", "AsJson", "Overrides", "known_precision"]

HELP = {"help_option_names": ["-h", "--help"]}
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Set any key of the job; repeatable.")]


def known_precision(name: str) -> str:
    """The name, where it is one that people may ask for. Raises InputError."""
    from pentamesh.job.precision import PRECISIONS

    known = [known for known in PRECISIONS if known != "fp64"]
    if name not in known:
        raise InputError(f"precision {name!r} is not known", where="--precision", hint=f"use {', '.join(known[:-1])} or {known[-1]}")
    return name
