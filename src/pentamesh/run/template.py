"""Template: the chat template that a job brings along, as text, whether it names a file or holds the text itself."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pentamesh.errors import InputError, reason
from pentamesh.job.read import resolve

__all__ = ["read_template"]

KEY = "data.chat_template"
# What a template says something with; a path has none of them.
MARKS = ("{{", "{%", "{#")


class _Generation(Extension):
    """The block in which a template marks what the assistant writes. Source: transformers, chat_template_utils.AssistantTracker."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def read_template(asked: str, base: Path) -> str:
    """The text of the template that `data.chat_template` is or names, relative to `base`. Raises InputError where it is none."""
    if any(mark in asked for mark in MARKS):
        _check(asked, "")
        return asked
    path = resolve(asked, base)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"there is no file {path}", where=KEY, hint=_similar(path)) from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder, not a chat template", where=KEY, hint=_within(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {reason(error)}", where=KEY, hint="give a Jinja template as UTF-8 text") from None
    if not any(mark in text for mark in MARKS):
        raise InputError(
            f"{path} holds no template: it shows no message", where=KEY, hint="a template loops over `messages`: {% for m in messages %}"
        )
    _check(text, f"{path}:")
    return text


def _check(text: str, file: str) -> None:
    found: Any = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    try:
        found.compile(text)
    except TemplateSyntaxError as error:
        place = f"{file}{error.lineno}" if file else f"line {error.lineno} of {KEY}"
        raise InputError(f"the chat template is not Jinja: {error.message}", where=place, hint="mend it there") from None
    except (RecursionError, MemoryError, SyntaxError) as error:  # of Python, which Jinja compiles to
        hint = "write it with fewer blocks and brackets within each other, or with macros"
        raise InputError(f"the chat template is nested too deeply: {reason(error)}", where=file.removesuffix(":") or KEY, hint=hint) from None


def _within(folder: Path) -> str:
    found = sorted(folder.glob("*.jinja"))
    return f"did you mean {found[0]}?" if found else "give a Jinja file, such as the chat_template.jinja of a model's folder"


def _similar(path: Path) -> str:
    names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=3)
    return f"did you mean {' or '.join(close)}?" if close else "give a file beside the job file, or the text of the template itself"
