"""Forms: what a row must look like to be trained on, and what is wrong with one that does not.

messages   {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
text       {"text": "..."}, or a .txt file
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pentamesh.errors import InputError, Problem
from pentamesh.run.data.rows import Problems, Row, read_rows

__all__ = ["ROLES", "Form", "checked_rows", "faults", "form_of"]

Form = Literal["messages", "text"]
ROLES = ("system", "user", "assistant")

# A key that gives another form away, and the name people know that form by.
OTHER_FORMS = {
    "instruction": "alpaca",
    "conversations": "sharegpt",
    "chosen": "preference",
    "completion": "completion",
    "input_ids": "pre-tokenised",
}
EXAMPLES = {"text": '{"text": "..."}', "messages": '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'}
OTHER_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "ai": "assistant", "developer": "system"}
# Fields that would change what is trained; ignoring them would train something else in silence.
UNHEARD = {"tool_calls": "tool calls", "weight": "weights of single turns"}


def form_of(files: tuple[Path, ...], asked: Literal["auto", "messages", "text"]) -> Form:
    """The form of the rows of `files`: the one asked for, or that of the first row. Raises InputError where it is none that trains."""
    if asked != "auto":
        return asked
    first = next(read_rows(files))
    if isinstance(first, Problem):
        raise InputError(first)
    if not isinstance(first.value, dict):
        raise InputError(_not_an_object(first))
    for form in ("messages", "text"):
        if form in first.value:
            return form
    raise InputError(_missing(first, "messages"))


def checked_rows(files: tuple[Path, ...], form: Form, problems: Problems, limit: int | None = None) -> Iterator[Row]:
    """The first `limit` rows of `files` that are in order; what is wrong with the others goes to `problems`."""
    for row in islice(read_rows(files), limit):
        found = [row] if isinstance(row, Problem) else faults(row, form)
        problems.add(*found)
        if isinstance(row, Row) and not found:
            yield row


def faults(row: Row, form: Form) -> list[Problem]:
    """Everything that keeps `row` from being trained on in this form."""
    if not isinstance(row.value, dict):
        return [_not_an_object(row)]
    if form not in row.value:
        return [_missing(row, form)]
    if form == "text":
        return _text_faults(row)
    tools = [Problem("`tools` are given, and training on tools comes later", row.where, "take them out")] if row.value.get("tools") else []
    return tools + _conversation_faults(row.value["messages"], row.where)


def _not_an_object(row: Row) -> Problem:
    return Problem(f"the row is {_kind(row.value)}, not an object", row.where, f"a row looks like {EXAMPLES['messages']}")


def _missing(row: Row, form: Form) -> Problem:
    other = next((name for key, name in OTHER_FORMS.items() if key in row.value), None)
    if other:
        return Problem(f"rows of the {other} form: that form comes later", row.where, f"convert to messages: {EXAMPLES['messages']}")
    close = difflib.get_close_matches(form, row.value, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"a row looks like {EXAMPLES[form]}"
    return Problem(f"no `{form}` in the row; its keys: {', '.join(list(row.value)[:8]) or 'none'}", row.where, hint)


def _text_faults(row: Row) -> list[Problem]:
    text = row.value["text"]
    fault = _string_fault(text, "text") or ("`text` is empty" if not text.strip() else "")
    return [Problem(fault, row.where)] if fault else []


def _conversation_faults(messages: Any, where: str) -> list[Problem]:
    if not isinstance(messages, list):
        return [Problem(f"`messages` is {_kind(messages)}, not a list", where, f"a row looks like {EXAMPLES['messages']}")]
    if not messages:
        return [Problem("`messages` is empty", where)]
    found = [fault for i, message in enumerate(messages) for fault in _message_faults(message, f"messages[{i}]", where)]
    if not found and all(message["role"] != "assistant" for message in messages):
        return [Problem("no assistant turn: nothing to train", where, "take the row out, or give it an answer")]
    return found


def _message_faults(message: Any, field: str, where: str) -> list[Problem]:
    if not isinstance(message, dict):
        return [Problem(f"`{field}` is {_kind(message)}, not an object", where, 'a message has a "role" and a "content"')]
    if "role" not in message:
        other = "the sharegpt form comes later: turn `from` and `value` into `role` and `content`"
        return [Problem(f"`{field}` has no `role`", where, other if "from" in message else f"roles: {', '.join(ROLES)}")]
    found = [Problem(f"`{field}.{key}`: {name} come later", where) for key, name in UNHEARD.items() if message.get(key) not in (None, [], 1)]
    if message["role"] not in ROLES:
        found.append(_role_fault(message["role"], field, where))
    if fault := _content_fault(message, field):
        found.append(Problem(fault, where))
    return found


def _content_fault(message: dict[str, Any], field: str) -> str:
    if "content" not in message:
        return f"`{field}` has no `content`"
    if fault := _string_fault(message["content"], f"{field}.content"):
        return fault
    silent = message["role"] == "assistant" and not message["content"].strip()
    return f"`{field}.content` is empty: the assistant would learn to say nothing" if silent else ""


def _role_fault(role: Any, field: str, where: str) -> Problem:
    name = str(role).lower()
    known = OTHER_ROLES.get(name) or next(iter(difflib.get_close_matches(name, ROLES, n=1)), None)
    return Problem(f"`{field}.role` is {role!r}", where, f"did you mean {known!r}?" if known else f"roles: {', '.join(ROLES)}")


def _string_fault(value: Any, field: str) -> str:
    if not isinstance(value, str):
        return f"`{field}` is {_kind(value)}, not a string"
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair; no tokenizer takes it
        return f"`{field}` has half of a surrogate pair at character {error.start}"
    return ""


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names[type(value)]
