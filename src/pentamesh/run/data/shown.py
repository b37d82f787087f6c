"""Shown: what of a conversation its template leaves out, found by rendering it with a mark in each thing that it says."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from pentamesh.errors import InputError, Problem
from pentamesh.run.data.tools import Function
from pentamesh.run.data.turns import Conversation, Message

__all__ = ["lost_thoughts", "shape", "told_apart", "unseen"]

OTHER_TEMPLATE = "give data.chat_template one that shows it, or take a model whose template does"
END_OF_THOUGHT = "</think>"
# The first of the private-use characters that stand for what is said, one for each.
FIRST = 0xF0000


def shape(talk: Conversation) -> tuple[object, ...]:
    """What decides which parts of a conversation a template shows: who speaks, and what there is in each turn."""
    return len(talk.tools), *(
        (m["role"], not m["content"].strip(), len(m.get("tool_calls", ())), *sorted(key for key, value in m.items() if value)) for m in talk.messages
    )


def told_apart(talk: Conversation) -> tuple[Conversation, dict[str, str]]:
    """The conversation with a mark of its own in place of each thing that it says, and of each mark what it stands for."""
    marks = map(chr, count(FIRST))
    said: dict[str, str] = {}
    messages = [_marked(message, f"messages[{i}]", marks, said) for i, message in enumerate(talk.messages)]
    tools = [_named(tool, f"tools[{i}]", marks, said) for i, tool in enumerate(talk.tools)]
    return Conversation(messages, talk.trained, tools), said


def unseen(talk: Conversation, render: Callable[[Conversation], str]) -> list[Problem]:
    """What the template never shows to the model: the run would not be what was asked. A template may show thoughts in some turns only."""
    apart, said = told_apart(talk)
    try:
        text = render(apart)
    except InputError:  # a template that looks into what is said, such as the letters of a call's name
        return []
    missing = [what for mark, what in said.items() if mark not in text]
    thoughts = [what for what in said.values() if what.endswith("reasoning_content")]
    if not all(what in missing for what in thoughts):
        missing = [what for what in missing if what not in thoughts]
    return [Problem(f"the chat template does not show `{what}`", hint=_hint(what)) for what in _gathered(missing, len(talk.tools))]


def lost_thoughts(talk: Conversation, text: str) -> list[Problem]:
    """Thoughts within the content of answers, where the template cuts them off in all turns (DeepSeek-R1)."""
    said = {i: m["content"].partition(END_OF_THOUGHT) for i, m in enumerate(talk.messages) if m["role"] == "assistant"}
    thoughts = {i: before.removeprefix("<think>").strip() for i, (before, end, _) in said.items() if end}
    if not any(thoughts.values()) or any(thought in text for thought in thoughts.values() if thought):
        return []
    first = next(i for i, thought in thoughts.items() if thought)
    return [Problem(f"the chat template does not show the thoughts in `messages[{first}].content`", hint=f"{OTHER_TEMPLATE}, or take them out")]


def _marked(message: Message, place: str, marks: map[str], said: dict[str, str]) -> Message:
    found = dict(message)
    for key in ("content", "reasoning_content"):
        if message.get(key, "").strip():
            found[key] = _mark(f"{place}.{key}", marks, said)
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_named(call, f"{place}.tool_calls[{n}]", marks, said) for n, call in enumerate(calls)]
    return found


def _named(function: Function, place: str, marks: map[str], said: dict[str, str]) -> Function:
    return {**function, "function": {**function["function"], "name": _mark(place, marks, said)}}


def _mark(what: str, marks: map[str], said: dict[str, str]) -> str:
    mark = next(marks)
    said[mark] = what
    return mark


def _gathered(missing: list[str], num_tools: int) -> list[str]:
    """All tools are one fault, and all thoughts."""
    tools = [what for what in missing if what.startswith("tools[")]
    thoughts = [what for what in missing if what.endswith("reasoning_content")]
    rest = [what for what in missing if what not in tools and what not in thoughts]
    return rest + thoughts[:1] + (["tools"] if len(tools) == num_tools > 0 else tools)


def _hint(what: str) -> str:
    if what.endswith("reasoning_content"):
        return f"{OTHER_TEMPLATE}, or write the thoughts into the content as the model does"
    if what.endswith("content"):
        return "take the text out of this turn, or the row out of the data"
    return OTHER_TEMPLATE
