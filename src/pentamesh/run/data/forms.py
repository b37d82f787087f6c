"""Forms: what a row must look like to be trained on, what its content is then, and what is wrong with one that does not.

messages           {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
sharegpt           {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}, with or without a "system"
alpaca             {"instruction": "...", "input": "...", "output": "..."}: a question, its input on the next lines, and the answer
prompt_completion  {"prompt": "...", "completion": "..."} as plain text without a template, or as two lists of messages
text               {"text": "..."}, or a .txt file
tokens             {"input_ids": [...], "labels": [...], "attention_mask": [...]}, the latter two where there are some

Whatever the form, a row becomes a Conversation, a Pair, a text or Ids; nothing behind this file knows how it was spelled.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

from pentamesh.errors import InputError, Problem
from pentamesh.job.job import Data
from pentamesh.run.data.ids import Ids, read_ids
from pentamesh.run.data.kinds import kind, string_fault
from pentamesh.run.data.names import Names, mistaken
from pentamesh.run.data.rows import Place, Problems, Row, read_rows
from pentamesh.run.data.tools import Function, read_tools
from pentamesh.run.data.trained import conversation
from pentamesh.run.data.turns import MESSAGES, SHAREGPT, Conversation, Turn, read_turns

__all__ = ["FORMS", "Content", "Form", "Given", "Pair", "Sample", "checked_rows", "content_of", "form_of", "looks_like"]

Form = Literal["messages", "sharegpt", "alpaca", "prompt_completion", "text", "tokens"]


@dataclass(frozen=True)
class Pair:
    """A text as it stands, trained from where the completion begins."""

    prompt: str
    completion: str


Content = Conversation | Pair | str | Ids


@dataclass(frozen=True)
class Sample:
    """One row that is in order: where it stands, and its content."""

    where: str
    content: Content


@dataclass(frozen=True)
class Given:
    """A row with its fields under our names, the names that its file has for them, and what the job says of rows."""

    value: dict[str, Any]
    where: str
    names: Names = field(default_factory=Names)
    data: Data = field(default_factory=Data)

    def faults(self, *found: str) -> list[Problem]:
        """The faults among `found` that are not empty, as problems of this row."""
        return [Problem(fault, self.where) for fault in found if fault]

    def text_fault(self, key: str) -> str:
        """What keeps a field from being text, or nothing."""
        return string_fault(self.value[key], self.names[key])

    def filled_fault(self, key: str) -> str:
        """What keeps a field from being text that is not blank, or nothing."""
        return self.text_fault(key) or ("" if self.value[key].strip() else f"`{self.names[key]}` is empty")


@dataclass(frozen=True)
class Shape:
    """A form: the keys that give it away, those that may stand beside them, a row of it, and how its content is read."""

    keys: tuple[str, ...]
    beside: tuple[str, ...]
    example: str
    read: Callable[[Given], Content | list[Problem]]


# A key that gives away a form which is not trained yet, and the name people know that form by.
OTHER_FORMS = {"chosen": "preference"}


def form_of(places: tuple[Place, ...], asked: Literal["auto"] | Form, columns: Mapping[Any, str] | None = None) -> Form:
    """The form of the rows: the one asked for, or that of the first row. Raises InputError where it is none that trains."""
    if asked != "auto":
        return asked
    first, names = next(read_rows(places)), Names.of_rows(columns or {})
    if isinstance(first, Problem):
        raise InputError(first)
    if not isinstance(first.value, dict):
        raise InputError(_not_an_object(first, "messages"))
    if found := looks_like(names.ours(first.value)):
        return found
    raise InputError(_missing(first, "messages", names))


def checked_rows(places: tuple[Place, ...], form: Form, problems: Problems, limit: int | None = None, data: Data | None = None) -> Iterator[Sample]:
    """The content of the first `limit` rows that are in order, read as `data` says; what is wrong with the others goes to `problems`."""
    data = data or Data()
    for row in islice(read_rows(places), limit):
        found = [row] if isinstance(row, Problem) else content_of(row, form, data)
        if isinstance(found, list):
            problems.add(*found)
        else:
            yield Sample(row.where, found)


def content_of(row: Row, form: Form, data: Data) -> Content | list[Problem]:
    """What is trained on of `row`, or everything that keeps it from being trained on in this form."""
    if not isinstance(row.value, dict):
        return [_not_an_object(row, form)]
    names = Names.of_rows(data.columns)
    given = Given(names.ours(row.value), row.where, names, data)
    if any(key not in given.value for key in FORMS[form].keys):
        return [_missing(row, form, names)]
    found = FORMS[form].read(given)
    tools, faults = _tools(given, turns=not isinstance(found, Pair | str | Ids))
    known = {names[key]: names[key] for key in FORMS[form].keys + FORMS[form].beside}
    faults += [Problem(f"`{key}` is not read", row.where, f"did you mean `{meant}`?") for key, meant in mistaken(row.value, known).items()]
    if isinstance(found, list) or faults:
        return (found if isinstance(found, list) else []) + faults
    if isinstance(found, Conversation):
        return replace(found, tools=tools)
    return list(_without_turns(given, bool(tools))) or found


def _tools(row: Given, *, turns: bool) -> tuple[list[Function], list[Problem]]:
    """The tools of a row; beside turns `functions` are the same under another name."""
    tools, faults = read_tools(row.value.get("tools"), row.names["tools"], row.where)
    if not turns or "tools" in row.names:
        return tools, faults
    functions, more = read_tools(row.value.get("functions"), "functions", row.where)
    if tools and functions and tools != functions:
        more.append(Problem("`tools` and `functions` are both given and differ", row.where, "keep one of them"))
    return tools or functions, faults + more


def _without_turns(row: Given, tools: bool) -> Iterator[Problem]:
    """What a row or its job says of turns, where the row has none."""
    if tools:
        what = f"`{row.names['tools']}` are given, and the row has no turns that call them"
        yield Problem(what, row.where, "take them out, or write the row as messages")
    for key in ("system", "train_on", "turns", "roles"):
        if getattr(row.data, key) != Data.model_fields[key].default:
            yield Problem(f"data.{key} is given, and the row has no turns", row.where, f"leave {key} out, or write the row as messages")


def looks_like(value: dict[str, Any]) -> Form | None:
    """The form that the keys of a row, under our names, give away."""
    if any(key in value for key in OTHER_FORMS):
        return None  # what else it looks like may be a part of it: that has to be asked for
    return next((form for form, shape in FORMS.items() if all(key in value for key in shape.keys)), None)


def _not_an_object(row: Row, form: Form) -> Problem:
    return Problem(f"the row is {kind(row.value)}, not an object", row.where, f"a row looks like {FORMS[form].example}")


def _missing(row: Row, form: Form, names: Names) -> Problem:
    """A row without the keys of its form, or with those of one that comes later."""
    value = names.ours(row.value)
    if other := next((name for key, name in OTHER_FORMS.items() if key in value), None):
        hint = f"to train what else is in the row, set data.form: {', '.join(FORMS)}"
        return Problem(f"rows of the {other} form: that form comes later", row.where, hint)
    lacking = next(key for key in FORMS[form].keys if key not in value)
    what = f"no `{names[lacking]}` in the row; its keys: {', '.join(list(row.value)[:8]) or 'none'}"
    if looks := looks_like(value):
        return Problem(what, row.where, f"it looks like the {looks} form: the rows of a source have one form, here {form}")
    if claimed := next((ours for ours, theirs in names.items() if theirs == names[lacking] and ours != lacking), None):
        return _claimed(row, claimed, lacking, names)
    if close := difflib.get_close_matches(names[lacking], row.value, n=1):
        return Problem(what, row.where, f"did you mean {close[0]!r}?")
    other_name = f"data.columns.{lacking} = {names[lacking]} is not what the file calls it"
    return Problem(what, row.where, other_name if lacking in names else f"a row looks like {FORMS[form].example}, or data.columns names its keys")


def _claimed(row: Row, ours: str, lacking: str, names: Names) -> Problem:
    """A row of no form, since data.columns gives the field that would have made it one another name of ours."""
    keys = next((shape.keys for shape in FORMS.values() if ours in shape.keys), ())
    rest = next(names[key] for key in (*keys, lacking) if key not in names.ours(row.value))
    hint = f"leave {ours} out of data.columns" + ("" if rest == names[lacking] else f", or say there what the file calls `{rest}`")
    return Problem(f"our `{ours}` is called `{names[ours]}` here by data.columns, and there is no `{rest}` in the row", row.where, hint)


def _text(row: Given) -> Content | list[Problem]:
    return row.faults(row.filled_fault("text")) or row.value["text"]


def _tokens(row: Given) -> Content | list[Problem]:
    found = read_ids(row.value, row.names)
    return row.faults(found) if isinstance(found, str) else found


def _messages(row: Given) -> Content | list[Problem]:
    turns, faults = read_turns(row.value["messages"], MESSAGES.called(row.data), row.where)
    return faults or conversation(turns, row.data, row.where)


def _sharegpt(row: Given) -> Content | list[Problem]:
    said, faults = _system(row)
    turns, more = read_turns(row.value["conversations"], SHAREGPT.called(row.data), row.where)
    return faults + more or conversation([*said, *turns], row.data, row.where)


def _alpaca(row: Given) -> Content | list[Problem]:
    said, faults = _system(row)
    given = row.value.get("input")
    faults += row.faults(row.filled_fault("instruction"), row.filled_fault("output"), "" if given is None else row.text_fault("input"))
    if row.value.get("history"):
        faults.append(Problem("`history` is given, which the alpaca form does not train", row.where, "write the turns as messages"))
    if faults:
        return faults
    question = f"{row.value['instruction']}\n{given}" if given else row.value["instruction"]
    turns = [Turn({"role": role, "content": content}) for role, content in (("user", question), ("assistant", row.value["output"]))]
    return conversation([*said, *turns], row.data, row.where)


def _prompt_completion(row: Given) -> Content | list[Problem]:
    prompt, completion = row.value["prompt"], row.value["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        given, faults = read_turns(prompt, MESSAGES.at("prompt").called(row.data), row.where)
        answer, more = read_turns(completion, MESSAGES.at("completion").called(row.data), row.where)
        return faults + more or conversation([*given, *answer], row.data, row.where, num_given=len(given))
    if isinstance(prompt, list) or isinstance(completion, list):
        what = f"`{row.names['prompt']}` is {kind(prompt)} and `{row.names['completion']}` is {kind(completion)}"
        return [Problem(what, row.where, "both are text, or both are lists of messages")]
    return row.faults(row.text_fault("prompt"), row.filled_fault("completion")) or Pair(prompt, completion)


def _system(row: Given) -> tuple[list[Turn], list[Problem]]:
    """The system turn that stands beside a conversation, where there is one."""
    said = row.value.get("system")
    return ([Turn({"role": "system", "content": said})], row.faults(row.text_fault("system"))) if said else ([], [])


# In the order in which a row is tried: a row of tokens may have the messages that they were made of beside them, one of messages a text.
FORMS: dict[Form, Shape] = {
    "tokens": Shape(("input_ids",), ("labels", "attention_mask"), '{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}', _tokens),
    "messages": Shape(("messages",), ("tools", "functions"), f"{{{MESSAGES.example}}}", _messages),
    "sharegpt": Shape(("conversations",), ("system", "tools", "functions"), f"{{{SHAREGPT.example}}}", _sharegpt),
    "alpaca": Shape(
        ("instruction", "output"),
        ("input", "system", "history", "tools", "functions"),
        '{"instruction": "...", "input": "...", "output": "..."}',
        _alpaca,
    ),
    "prompt_completion": Shape(("prompt", "completion"), ("tools", "functions"), '{"prompt": "...", "completion": "..."}', _prompt_completion),
    "text": Shape(("text",), (), '{"text": "..."}', _text),
}
