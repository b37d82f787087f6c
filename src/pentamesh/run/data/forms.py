"""Forms: what a row must look like to be trained on, what its content is then, and what is wrong with one that does not.

messages           {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
sharegpt           {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}, with or without a "system"
alpaca             {"instruction": "...", "input": "...", "output": "..."}: a question, its input on the next lines, and the answer
prompt_completion  {"prompt": "...", "completion": "..."} as plain text without a template, or as two lists of messages
text               {"text": "..."}, or a .txt file

Whatever the form, a row becomes a Conversation, a Pair or a text; nothing behind this file knows how it was spelled.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from pentamesh.errors import InputError, Problem
from pentamesh.run.data.rows import Place, Problems, Row, read_rows
from pentamesh.run.data.turns import MESSAGES, SHAREGPT, Message, kind, read_turns, string_fault

__all__ = ["FORMS", "Content", "Conversation", "Form", "Pair", "Sample", "checked_rows", "form_of"]

Form = Literal["messages", "sharegpt", "alpaca", "prompt_completion", "text"]


@dataclass(frozen=True)
class Conversation:
    """Turns for the chat template; the assistant's are trained, without those among the first `num_given`."""

    messages: list[Message]
    num_given: int = 0


@dataclass(frozen=True)
class Pair:
    """A text as it stands, trained from where the completion begins."""

    prompt: str
    completion: str


Content = Conversation | Pair | str


@dataclass(frozen=True)
class Sample:
    """One row that is in order: where it stands, and its content."""

    where: str
    content: Content


@dataclass(frozen=True)
class Shape:
    """A form: the keys that give it away, a row of it, and how its content is read."""

    keys: tuple[str, ...]
    example: str
    read: Callable[[dict[str, Any], str], Content | list[Problem]]


# A key that gives away a form which is not trained yet, and the name people know that form by.
OTHER_FORMS = {"chosen": "preference", "input_ids": "pre-tokenised"}


def form_of(places: tuple[Place, ...], asked: Literal["auto"] | Form) -> Form:
    """The form of the rows: the one asked for, or that of the first row. Raises InputError where it is none that trains."""
    if asked != "auto":
        return asked
    first = next(read_rows(places))
    if isinstance(first, Problem):
        raise InputError(first)
    if not isinstance(first.value, dict):
        raise InputError(_not_an_object(first, "messages"))
    if found := _looks_like(first.value):
        return found
    raise InputError(_missing(first, "messages"))


def checked_rows(places: tuple[Place, ...], form: Form, problems: Problems, limit: int | None = None) -> Iterator[Sample]:
    """The content of the first `limit` rows that are in order; what is wrong with the others goes to `problems`."""
    for row in islice(read_rows(places), limit):
        found = [row] if isinstance(row, Problem) else _content(row, form)
        if isinstance(found, list):
            problems.add(*found)
        else:
            yield Sample(row.where, found)


def _content(row: Row, form: Form) -> Content | list[Problem]:
    """What is trained on of `row`, or everything that keeps it from being trained on in this form."""
    if not isinstance(row.value, dict):
        return [_not_an_object(row, form)]
    if any(key not in row.value for key in FORMS[form].keys):
        return [_missing(row, form)]
    tools = [Problem("`tools` are given, and training on tools comes later", row.where, "take them out")] if row.value.get("tools") else []
    found = FORMS[form].read(row.value, row.where)
    return tools + found if isinstance(found, list) else tools or found


def _looks_like(value: dict[str, Any]) -> Form | None:
    if any(key in value for key in OTHER_FORMS):
        return None  # what else it looks like may be a part of it: that has to be asked for
    return next((form for form, shape in FORMS.items() if all(key in value for key in shape.keys)), None)


def _not_an_object(row: Row, form: Form) -> Problem:
    return Problem(f"the row is {kind(row.value)}, not an object", row.where, f"a row looks like {FORMS[form].example}")


def _missing(row: Row, form: Form) -> Problem:
    """A row without the keys of its form, or with those of one that comes later."""
    if other := next((name for key, name in OTHER_FORMS.items() if key in row.value), None):
        hint = f"to train what else is in the row, set data.form: {', '.join(FORMS)}"
        return Problem(f"rows of the {other} form: that form comes later", row.where, hint)
    lacking = [key for key in FORMS[form].keys if key not in row.value]
    what = f"no `{lacking[0]}` in the row; its keys: {', '.join(list(row.value)[:8]) or 'none'}"
    if looks := _looks_like(row.value):
        return Problem(what, row.where, f"it looks like the {looks} form: the rows of a job have one form, here {form}")
    close = difflib.get_close_matches(lacking[0], row.value, n=1)
    return Problem(what, row.where, f"did you mean {close[0]!r}?" if close else f"a row looks like {FORMS[form].example}")


def _text(value: dict[str, Any], where: str) -> Content | list[Problem]:
    fault = _text_fault(value, "text")
    return [Problem(fault, where)] if fault else value["text"]


def _messages(value: dict[str, Any], where: str) -> Content | list[Problem]:
    messages, faults = read_turns(value["messages"], MESSAGES, where)
    return faults or Conversation(messages)


def _sharegpt(value: dict[str, Any], where: str) -> Content | list[Problem]:
    said, faults = _system(value, where)
    messages, more = read_turns(value["conversations"], SHAREGPT, where)
    return faults + more or Conversation([*said, *messages])


def _alpaca(value: dict[str, Any], where: str) -> Content | list[Problem]:
    said, faults = _system(value, where)
    faults += [Problem(fault, where) for key in ("instruction", "output") if (fault := _text_fault(value, key))]
    given = value.get("input")
    if given is not None and (fault := string_fault(given, "input")):
        faults.append(Problem(fault, where))
    if value.get("history"):
        faults.append(Problem("`history` is given, which the alpaca form does not train", where, "write the turns as messages"))
    if faults:
        return faults
    question = f"{value['instruction']}\n{given}" if given else value["instruction"]
    return Conversation([*said, {"role": "user", "content": question}, {"role": "assistant", "content": value["output"]}])


def _prompt_completion(value: dict[str, Any], where: str) -> Content | list[Problem]:
    prompt, completion = value["prompt"], value["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        given, faults = read_turns(prompt, MESSAGES.at("prompt"), where, answered=False)
        answer, more = read_turns(completion, MESSAGES.at("completion"), where)
        return faults + more or Conversation([*given, *answer], num_given=len(given))
    if isinstance(prompt, list) or isinstance(completion, list):
        what = f"`prompt` is {kind(prompt)} and `completion` is {kind(completion)}"
        return [Problem(what, where, "both are text, or both are lists of messages")]
    faults = [fault for fault in (string_fault(prompt, "prompt"), _text_fault(value, "completion")) if fault]
    return [Problem(fault, where) for fault in faults] or Pair(prompt, completion)


def _system(value: dict[str, Any], where: str) -> tuple[list[Message], list[Problem]]:
    """The system turn that stands beside a conversation, where there is one."""
    said = value.get("system")
    if not said:
        return [], []
    fault = string_fault(said, "system")
    return [{"role": "system", "content": said}], [Problem(fault, where)] if fault else []


def _text_fault(value: dict[str, Any], key: str) -> str:
    return string_fault(value[key], key) or ("" if value[key].strip() else f"`{key}` is empty")


# In the order in which a row is tried: a row of messages may have a text beside them.
FORMS: dict[Form, Shape] = {
    "messages": Shape(("messages",), f"{{{MESSAGES.example}}}", _messages),
    "sharegpt": Shape(("conversations",), f"{{{SHAREGPT.example}}}", _sharegpt),
    "alpaca": Shape(("instruction", "output"), '{"instruction": "...", "input": "...", "output": "..."}', _alpaca),
    "prompt_completion": Shape(("prompt", "completion"), '{"prompt": "...", "completion": "..."}', _prompt_completion),
    "text": Shape(("text",), '{"text": "..."}', _text),
}
