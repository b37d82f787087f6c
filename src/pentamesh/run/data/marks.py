"""Marks: whether a template's `{% generation %}` stands around what the assistant writes, and around nothing that others do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from pentamesh.errors import InputError, Problem
from pentamesh.run.data.shown import told_apart
from pentamesh.run.data.spans import Span
from pentamesh.run.data.turns import Conversation, answers

__all__ = ["misplaced"]

HINT = "mend {% generation %} in the chat template, or take it out: data.train_on and data.turns say which turns are trained"


def misplaced(talk: Conversation, marked: Callable[[Conversation], tuple[str, list[Span]]]) -> list[Problem]:
    """Contents of answers outside of all that the template marks, and others inside. `marked` gives the text and the spans that are marked."""
    turns = answers(talk.messages)
    apart, said = told_apart(replace(talk, trained=turns))
    try:
        text, spans = marked(apart)
    except InputError:  # a template that looks into what is said
        return []
    return list(_faults(text, spans, {what: mark for mark, what in said.items()}, apart, turns))


def _faults(text: str, spans: list[Span], marks: dict[str, str], talk: Conversation, turns: tuple[int, ...]) -> Iterator[Problem]:
    for i, message in enumerate(talk.messages):
        mark = marks.get(f"messages[{i}].content")
        if mark is None or mark not in text:
            continue
        inside = any(mark in text[start:stop] for start, stop in spans)
        if inside != (i in turns):
            verb = "marks" if inside else "does not mark"
            yield Problem(f"the chat template {verb} messages[{i}] of the role {message['role']} as what the assistant writes", hint=HINT)
