"""Propose: which `data.columns` and `data.roles` would read rows that call things otherwise, from what is in them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pentamesh.job.job import Data
from pentamesh.run.data.shapes import Shapes, Talk
from pentamesh.run.data.turns import MESSAGES, OTHER_ROLES, SHAREGPT, Spelling

__all__ = ["proposed"]

# What people call our fields, the likeliest first.
FIELDS: dict[str, tuple[str, ...]] = {
    "role": ("role", "from", "speaker", "author", "sender", "who", "participant", "user", "name", "type"),
    "content": ("content", "value", "text", "message", "utterance", "body", "msg", "said"),
    "instruction": ("instruction", "question", "query", "prompt", "ask", "problem", "task", "user", "human", "request", "input"),
    "input": ("input", "context", "passage", "background"),
    "output": ("output", "answer", "response", "reply", "completion", "assistant", "solution", "target", "label"),
    "text": ("text", "content", "document", "article", "body", "passage", "raw", "story", "code"),
    "input_ids": ("input_ids", "tokens", "token_ids", "ids"),
}
# What people call those who speak, beside what the forms know.
SPEAKERS: dict[str, tuple[str, ...]] = {
    "user": ("user", "human", "customer", "client", "prompter", "person", "patient", "student", "visitor", "caller", "question", "q", "you", "me"),
    "assistant": (
        "assistant",
        "agent",
        "bot",
        "gpt",
        "model",
        "ai",
        "chatbot",
        "support",
        "operator",
        "doctor",
        "teacher",
        "answer",
        "a",
        "response",
    ),
    "system": ("system", "sys", "developer", "context", "instruction"),
    "tool": ("tool", "tool_response", "tool_result", "api", "function_response"),
}
# A role field has at most so many values; another text field of turns has more.
MAX_ROLES = 12
# Of the rows or turns, the share that a field must be in.
MOST = 0.5


def proposed(shapes: Shapes, data: Data) -> dict[str, Any] | None:
    """The `form`, `columns` and `roles` that would read most rows, beside what `data` says already; None where the rows do not show any."""
    if any("\0" in name or not name for name in shapes.names) or "chosen" in shapes.texts or "chosen" in shapes.talks or not shapes.num_rows:
        return None
    found = _talk(shapes, data) or _texts(shapes) or _numbers(shapes)
    if found is None:
        return None
    form, columns, roles = found
    kept = {ours: theirs for ours, theirs in data.columns.items() if theirs in shapes.names - set(columns.values())}
    return {"form": form, "columns": {**kept, **columns}, "roles": {**data.roles, **roles}}


Found = tuple[str, dict[str, str], dict[str, str]]


def _talk(shapes: Shapes, data: Data) -> Found | None:
    likely = [(talk.num_rows, name) for name, talk in shapes.talks.items() if _pair(talk)]
    if not likely:
        return None
    name = next((n for n in ("messages", "conversations") if any(n == other for _, other in likely)), max(likely)[1])
    talk = shapes.talks[name]
    role, content = _pair(talk) or ("", "")
    spelling = SHAREGPT if (role, content) == (SHAREGPT.role, SHAREGPT.content) else MESSAGES
    named = {spelling.field: name, spelling.role: role, spelling.content: content}
    columns = {ours: theirs for ours, theirs in named.items() if ours != theirs}
    return ("sharegpt" if spelling is SHAREGPT else "messages", columns, _roles(talk, role, spelling, data.roles))


def _pair(talk: Talk) -> tuple[str, str] | None:
    """The keys of turns that say who speaks, and what."""
    common = [key for key, n in talk.texts.items() if n >= MOST * max(talk.texts.values())]
    speakers = [key for key in common if len(talk.said[key]) <= MAX_ROLES and "..." not in talk.said[key]]
    contents = [key for key in common if key not in speakers[:1] or len(common) > 1]
    role = _named("role", speakers) or min(speakers, key=lambda key: len(talk.said[key]), default=None)
    contents = [key for key in contents if key != role]
    content = _named("content", contents) or max(contents, key=lambda key: talk.chars[key], default=None)
    return (role, content) if role and content else None


def _roles(talk: Talk, key: str, spelling: Spelling, given: Mapping[str, Any]) -> dict[str, str]:
    """The role of each speaker that the form does not know: by what it is called, else by who begins."""
    unknown = [name for name in talk.said[key] if name not in spelling.roles and name not in given and name.strip()]
    found = {name: role for name in unknown if (role := _role(name))}
    taken = {role for name in talk.said[key] if (role := found.get(name) or spelling.roles.get(name) or given.get(name))}
    rest = [name for name in unknown if name not in found]
    missing = [role for role in ("user", "assistant") if role not in taken]
    if len(rest) == len(missing):
        opening = talk.first[key]
        found |= dict(zip(sorted(rest, key=lambda name: -opening[name]), missing, strict=True))
    return {name: found[name] for name in unknown if name in found}


def _role(name: str) -> str | None:
    lowered = name.strip().lower()
    known = {spelled: role for role, names in SPEAKERS.items() for spelled in names} | OTHER_ROLES | SHAREGPT.roles | MESSAGES.roles
    if lowered in known:
        return known[lowered]
    # A short name is close to too many others.
    close = difflib.get_close_matches(lowered, [other for other in known if len(other) > 3], n=1, cutoff=0.8)
    return known[close[0]] if close else None


def _texts(shapes: Shapes) -> Found | None:
    common = [key for key, n in shapes.texts.items() if n >= MOST * shapes.num_rows]
    question = _named("instruction", common)
    answer = _named("output", [key for key in common if key != question])
    if question and answer:
        more = _named("input", [key for key in common if key not in (question, answer)])
        named = {"instruction": question, "output": answer} | ({"input": more} if more else {})
        return "alpaca", {ours: theirs for ours, theirs in named.items() if ours != theirs}, {}
    text = _named("text", common) or (common[0] if len(common) == 1 else None)
    return ("text", {"text": text} if text != "text" else {}, {}) if text else None


def _numbers(shapes: Shapes) -> Found | None:
    ids = _named("input_ids", [key for key, n in shapes.numbers.items() if n >= MOST * shapes.num_rows])
    return ("tokens", {"input_ids": ids} if ids != "input_ids" else {}, {}) if ids else None


def _named(ours: str, names: Iterable[str]) -> str | None:
    """Of the names of fields the one that is likeliest to mean ours."""
    lowered = {name.lower().replace("-", "_"): name for name in names}
    for known in FIELDS[ours]:
        if known in lowered:
            return lowered[known]
    for known in FIELDS[ours]:
        if len(known) > 3 and (close := difflib.get_close_matches(known, lowered, n=1, cutoff=0.8)):
            return lowered[close[0]]
    return None
