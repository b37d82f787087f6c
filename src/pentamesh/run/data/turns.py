"""Turns: a conversation as its rows spell it, as messages with roles that templates know, and everything that is wrong with it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, replace
from typing import Any

from pentamesh.errors import Problem
from pentamesh.job.job import Data
from pentamesh.run.data.kinds import kind, string_fault
from pentamesh.run.data.names import Names, mistaken
from pentamesh.run.data.parts import joined
from pentamesh.run.data.tools import Function, read_calls

__all__ = ["MESSAGES", "REASONING", "SHAREGPT", "Conversation", "Message", "Spelling", "Turn", "answers", "read_turns"]

Message = dict[str, Any]

# What a result of a tool is called, by whoever shows it to the model.
TOOL_ROLES = dict.fromkeys(("tool", "tools", "ipython", "observation", "function"), "tool")
# The turn of sharegpt whose value is a call, or a list of calls.
CALLING = "function_call"
REASONING = ("reasoning_content", "thinking", "reasoning")
# What a turn may say beside its role and content.
FIELDS = ("tool_calls", "function_call", *REASONING, "train", "weight", "tool_call_id", "name")


@dataclass(frozen=True)
class Conversation:
    """Messages for the chat template, the tools that are offered in it, and which of the messages are trained.

    A message has a role of ours and a content; one of the assistant may have `tool_calls`, with arguments as objects, and `reasoning_content`.
    """

    messages: list[Message]
    trained: tuple[int, ...]
    tools: list[Function] = field(default_factory=list)


@dataclass(frozen=True)
class Turn:
    """A message, and whether it is trained where its row says that itself."""

    message: Message
    train: bool | None = None


def answers(messages: list[Message], num_given: int = 0) -> tuple[int, ...]:
    """The turns of the assistant that come after the first `num_given` messages."""
    return tuple(i for i, message in enumerate(messages) if i >= num_given and message["role"] == "assistant")


@dataclass(frozen=True)
class Spelling:
    """How rows spell a conversation: the field it lies in, the keys of a turn, the role that each name means, and what else is renamed."""

    field: str
    role: str
    content: str
    roles: dict[str, str]
    names: Names

    def at(self, field: str) -> Spelling:
        """The same in another field."""
        return replace(self, field=field)

    def called(self, data: Data) -> Spelling:
        """The same with the names that the files of a job use, and the roles that these have."""
        names, place = Names.of_turns(data.columns), Names.of_rows(data.columns)[self.field]
        return Spelling(place, names[self.role], names[self.content], {**self.roles, **data.roles}, names)

    @property
    def known(self) -> dict[str, str]:
        """Of every field of a turn what the files call it; `thoughts` has a name that templates read."""
        fields = {self.names[key]: self.names[key] for key in FIELDS}
        return {"thoughts": self.names["reasoning_content"]} | fields | {self.role: self.role, self.content: self.content}

    @property
    def example(self) -> str:
        user, assistant = (next(name for name, role in self.roles.items() if role == wanted) for wanted in ("user", "assistant"))
        turns = (f'{{"{self.role}": "{name}", "{self.content}": "..."}}' for name in (user, assistant))
        return f'"{self.field}": [{", ".join(turns)}]'


MESSAGES = Spelling("messages", "role", "content", {role: role for role in ("system", "user", "assistant")} | TOOL_ROLES, Names())
SHAREGPT = Spelling(
    "conversations",
    "from",
    "value",
    {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant", CALLING: "assistant"} | TOOL_ROLES,
    Names(),
)
OTHER_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "ai": "assistant", "developer": "system"}


def read_turns(turns: Any, spelling: Spelling, where: str) -> tuple[list[Turn], list[Problem]]:
    """The turns of a conversation, and everything that keeps it from being trained on."""
    field = spelling.field
    if not isinstance(turns, list):
        return [], [Problem(f"`{field}` is {kind(turns)}, not a list", where, f"a row looks like {{{spelling.example}}}")]
    if not turns:
        return [], [Problem(f"`{field}` is empty", where)]
    read = [_turn(turn, spelling.at(f"{field}[{i}]"), where) for i, turn in enumerate(turns)]
    faults = [fault for _, found in read for fault in found]
    return [] if faults else [turn for turn, _ in read], faults


def _turn(turn: Any, spelling: Spelling, where: str) -> tuple[Turn, list[Problem]]:
    """A turn, and what is wrong with it; what else it says stays in its message, since templates may read it."""
    if not isinstance(turn, dict):
        example = f'a turn has a "{spelling.role}" and a "{spelling.content}"'
        return Turn({}), [Problem(f"`{spelling.field}` is {kind(turn)}, not an object", where, example)]
    if near := mistaken(turn, spelling.known):
        return Turn({}), [Problem(f"`{spelling.field}.{key}` is not read", where, f"did you mean `{meant}`?") for key, meant in near.items()]
    if spelling.role not in turn:
        renamed = f"data.columns says so; the turn has {', '.join(map(str, turn)) or 'nothing'}" if spelling.role in spelling.names.values() else ""
        hint = renamed or _other_spelling(turn) or f"roles: {', '.join(spelling.roles)}"
        return Turn({}), [Problem(f"`{spelling.field}` has no `{spelling.role}`", where, hint)]
    name = turn[spelling.role]
    role = spelling.roles.get(name) if isinstance(name, str) else None
    if name != CALLING and spelling.content in turn:
        text, fault = joined(turn[spelling.content], f"{spelling.field}.{spelling.content}")
        if fault:
            return Turn({}), [Problem(fault, where)]
        turn = {**turn, spelling.content: text}
    rest = spelling.names.ours({key: value for key, value in turn.items() if value is not None and key not in (spelling.role, spelling.content)})
    calls, faults = _calls(turn, rest, role, spelling, where)
    reasoned, reasoning_fault = _reasoning(rest, role, spelling)
    train, mark_fault = _mark(rest, role, spelling)
    wrong = (reasoning_fault, mark_fault, _content_fault(turn, role, spelling, calling=bool(calls or faults)))
    if role is None:
        faults.append(_role_fault(name, spelling, where))
    content = (turn.get(spelling.content) if name != CALLING else None) or ""
    return Turn(rest | {"role": role, "content": content} | calls | reasoned, train), faults + [Problem(what, where) for what in wrong if what]


def _mark(rest: Message, role: str | None, spelling: Spelling) -> tuple[bool | None, str]:
    """What a turn says of itself, taken from the `rest` of its fields: a weight of 1 is what any turn has. And what is wrong with it."""
    train, weight = rest.pop("train", None), rest.pop("weight", None)
    places = {key: f"`{spelling.field}.{spelling.names[key]}`" for key in ("train", "weight")}
    if not isinstance(train, bool | None):
        return None, f"{places['train']} is {kind(train)}, not true or false"
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        return None, f"{places['weight']} is {weight!r}: a turn is trained or not, by 1 or 0"
    if train and weight == 0:
        return None, f"{places['train']} is true and {places['weight']} is 0"
    if train and role == "tool":
        return None, f"{places['train']} is true: what tools say is never trained"
    return (False if weight == 0 else train), ""


def _calls(turn: Message, rest: Message, role: str | None, spelling: Spelling, where: str) -> tuple[Message, list[Problem]]:
    """The tool calls of a turn, which are taken from the `rest` of its fields."""
    named = {spelling.names[key]: value for key in ("tool_calls", "function_call") if (value := rest.pop(key, None))}
    if turn[spelling.role] == CALLING:
        named = {spelling.content: turn.get(spelling.content)} | named
    if not named:
        return {}, []
    places = [f"`{spelling.field}.{key}`" for key in named]
    if len(named) > 1:
        return {}, [Problem(f"{' and '.join(places)} are both given", where, "keep one of them")]
    if role not in (None, "assistant"):
        return {}, [Problem(f"{places[0]} is given, and the role is {turn[spelling.role]}", where, "only the assistant calls tools")]
    ((key, value),) = named.items()
    calls, faults = read_calls(value, f"{spelling.field}.{key}", where)
    return {"tool_calls": calls} if calls else {}, faults


def _reasoning(rest: Message, role: str | None, spelling: Spelling) -> tuple[Message, str]:
    """What the assistant thought before its answer, under one name, taken from the `rest` of a turn's fields; and what is wrong with it."""
    given = {key: rest.pop(key) for key in REASONING if key in rest}
    given = {key: value for key, value in given.items() if value and not (isinstance(value, str) and value.isspace())}
    places = [f"{spelling.field}.{spelling.names[key]}" for key in given]
    for place, value in zip(places, given.values(), strict=True):
        if fault := string_fault(value, place):
            return {}, fault
    if given and role not in (None, "assistant"):
        return {}, f"`{places[0]}` is given, and only the assistant reasons"
    if len(set(given.values())) > 1:
        return {}, f"{' and '.join(f'`{place}`' for place in places)} are both given and differ"
    return ({"reasoning_content": next(iter(given.values()))} if given else {}), ""


def _other_spelling(turn: Message) -> str:
    for other, form in ((SHAREGPT, "sharegpt"), (MESSAGES, "messages")):
        if other.role in turn:
            return f"`{other.role}` and `{other.content}` are the {form} form: name the field `{other.field}`"
    return ""


def _content_fault(turn: Message, role: str | None, spelling: Spelling, *, calling: bool) -> str:
    """What keeps the content from being read; beside tool calls there need be none."""
    field, content = f"{spelling.field}.{spelling.content}", turn.get(spelling.content)
    if calling and (content is None or turn[spelling.role] == CALLING):
        return ""
    if spelling.content not in turn:
        return f"`{spelling.field}` has no `{spelling.content}`"
    if fault := string_fault(content, field):
        return fault
    silent = role == "assistant" and not calling and not turn[spelling.content].strip()
    return f"`{field}` is empty: the assistant would learn to say nothing" if silent else ""


def _role_fault(role: Any, spelling: Spelling, where: str) -> Problem:
    what, name = f"`{spelling.field}.{spelling.role}` is {role!r}", str(role).lower()
    meant = OTHER_ROLES.get(name) if spelling.roles.get(name) is None else name
    known = meant if meant in spelling.roles else next(iter(difflib.get_close_matches(name, spelling.roles, n=1)), None)
    return Problem(what, where, f"did you mean {known!r}?" if known else f"roles: {', '.join(spelling.roles)}; data.roles says what others mean")
