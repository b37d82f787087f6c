"""Turns: a conversation as its rows spell it, as messages with roles that templates know, and everything that is wrong with it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Any

from pentamesh.errors import Problem
from pentamesh.job.job import Data
from pentamesh.run.data.names import Names

__all__ = ["MESSAGES", "ROLES", "SHAREGPT", "Message", "Spelling", "kind", "read_turns", "string_fault"]

Message = dict[str, Any]
ROLES = ("system", "user", "assistant")

# Fields that would change what is trained; ignoring them would train something else in silence.
UNHEARD = {"tool_calls": "tool calls", "weight": "weights of single turns"}
TOOL_ROLES = ("tool", "tools", "function", "function_call", "observation", "ipython")


@dataclass(frozen=True)
class Spelling:
    """How rows spell a conversation: the field it lies in, the keys of a turn, and the role that each name means."""

    field: str
    role: str
    content: str
    roles: dict[str, str]

    def at(self, field: str) -> Spelling:
        """The same in another field."""
        return replace(self, field=field)

    def called(self, data: Data) -> Spelling:
        """The same with the names that the files of a job use, and the roles that these have."""
        names, field = Names.of_turns(data.columns), Names.of_rows(data.columns)[self.field]
        return Spelling(field, names[self.role], names[self.content], {**self.roles, **data.roles})

    @property
    def example(self) -> str:
        user, assistant = (next(name for name, role in self.roles.items() if role == wanted) for wanted in ("user", "assistant"))
        turns = (f'{{"{self.role}": "{name}", "{self.content}": "..."}}' for name in (user, assistant))
        return f'"{self.field}": [{", ".join(turns)}]'


MESSAGES = Spelling("messages", "role", "content", {role: role for role in ROLES})
SHAREGPT = Spelling(
    "conversations", "from", "value", {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant"}
)
OTHER_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "ai": "assistant", "developer": "system"}


def read_turns(turns: Any, spelling: Spelling, where: str, *, answered: bool = True) -> tuple[list[Message], list[Problem]]:
    """The messages of a conversation, and everything that keeps it from being trained on; `answered` asks for a turn of the assistant."""
    field = spelling.field
    if not isinstance(turns, list):
        return [], [Problem(f"`{field}` is {kind(turns)}, not a list", where, f"a row looks like {{{spelling.example}}}")]
    if not turns:
        return [], [Problem(f"`{field}` is empty", where)]
    if found := [fault for i, turn in enumerate(turns) for fault in _turn_faults(turn, spelling.at(f"{field}[{i}]"), where)]:
        return [], found
    messages = [_message(turn, spelling) for turn in turns]
    if answered and all(message["role"] != "assistant" for message in messages):
        return [], [Problem("no assistant turn: nothing to train", where, "take the row out, or give it an answer")]
    return messages, []


def _message(turn: Message, spelling: Spelling) -> Message:
    """The turn as a message; what else it says stays, since templates may read it."""
    rest = {key: value for key, value in turn.items() if key not in (spelling.role, spelling.content)}
    return {"role": spelling.roles[turn[spelling.role]], "content": turn[spelling.content]} | rest


def _turn_faults(turn: Any, spelling: Spelling, where: str) -> list[Problem]:
    field = spelling.field
    if not isinstance(turn, dict):
        return [Problem(f"`{field}` is {kind(turn)}, not an object", where, f'a turn has a "{spelling.role}" and a "{spelling.content}"')]
    if spelling.role not in turn:
        return [Problem(f"`{field}` has no `{spelling.role}`", where, _other_spelling(turn) or f"roles: {', '.join(spelling.roles)}")]
    found = [Problem(f"`{field}.{key}`: {name} come later", where) for key, name in UNHEARD.items() if turn.get(key) not in (None, [], 1)]
    role = turn[spelling.role]
    if not isinstance(role, str) or role not in spelling.roles:
        found.append(_role_fault(role, spelling, where))
    if fault := _content_fault(turn, spelling):
        found.append(Problem(fault, where))
    return found


def _other_spelling(turn: Message) -> str:
    for other, form in ((SHAREGPT, "sharegpt"), (MESSAGES, "messages")):
        if other.role in turn:
            return f"`{other.role}` and `{other.content}` are the {form} form: name the field `{other.field}`"
    return ""


def _content_fault(turn: Message, spelling: Spelling) -> str:
    field = f"{spelling.field}.{spelling.content}"
    if spelling.content not in turn:
        return f"`{spelling.field}` has no `{spelling.content}`"
    if fault := string_fault(turn[spelling.content], field):
        return fault
    role = turn[spelling.role]
    silent = isinstance(role, str) and spelling.roles.get(role) == "assistant" and not turn[spelling.content].strip()
    return f"`{field}` is empty: the assistant would learn to say nothing" if silent else ""


def _role_fault(role: Any, spelling: Spelling, where: str) -> Problem:
    what, name = f"`{spelling.field}.{spelling.role}` is {role!r}", str(role).lower()
    if name in TOOL_ROLES:
        return Problem(what, where, f"training on tools comes later; roles: {', '.join(spelling.roles)}")
    meant = OTHER_ROLES.get(name) if spelling.roles.get(name) is None else name
    known = meant if meant in spelling.roles else next(iter(difflib.get_close_matches(name, spelling.roles, n=1)), None)
    return Problem(what, where, f"did you mean {known!r}?" if known else f"roles: {', '.join(spelling.roles)}")


def string_fault(value: Any, field: str) -> str:
    """What keeps a value from being text for a tokenizer, or nothing."""
    if not isinstance(value, str):
        return f"`{field}` is {kind(value)}, not a string"
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair; no tokenizer takes it
        return f"`{field}` has half of a surrogate pair at character {error.start}"
    return ""


def kind(value: Any) -> str:
    """The kind of a value in the words of JSON, where it has one."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value)) or f"of the type {type(value).__name__}"
