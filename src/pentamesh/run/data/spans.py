"""Spans: where the turns of a conversation stand in its rendered text, found by rendering it with one of them changed.

A turn of the assistant is what the model would have to write after the generation prompt: thoughts and tool calls that the template shows, the
answer, and the token that ends the turn. The header before it and the white space behind it come from the template.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pentamesh.errors import InputError
from pentamesh.run.data.turns import Message

__all__ = ["PLACE", "Ends", "Rendered", "Span"]

Span = tuple[int, int]  # characters of the rendered text, from and up to

# Stands in for an answer: private-use characters, so that no template trims, splits or interprets it.
PLACE = "\ue0f0\ue0f1\ue0f2"


@dataclass(frozen=True)
class Ends:
    """The tokens that may end a turn, longest first: the special ones, and all that were added to the vocabulary."""

    special: tuple[str, ...]
    added: tuple[str, ...]

    def after(self, text: str, start: int, stop: int) -> Span:
        """A span up to its end-of-turn token: without the white space behind that, or with the one that follows.

        A template that ends no turn has the next role's token there, which is what stops the model (GLM).
        """
        body = text[start:stop].rstrip()
        for tokens in (self.special, self.added):
            if body.endswith(tokens):
                return start, start + len(body)
            if end := _at(text, stop, tokens):
                return start, stop + len(end)
        return start, stop


def _at(text: str, position: int, tokens: Sequence[str]) -> str:
    """The token that stands in `text` at `position`, or nothing."""
    return next((token for token in tokens if text.startswith(token, position)), "")


def _shared(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _plain(message: Message) -> Message:
    """The message with the place for its answer and nothing else that the assistant writes."""
    return {key: value for key, value in message.items() if key not in ("tool_calls", "reasoning_content")} | {"content": PLACE}


def _changed(message: Message) -> Message:
    """The message with another text where it says something of its own: in the name of its first tool call, or in its content."""
    if not (calls := message.get("tool_calls")):
        return {**message, "content": PLACE}
    other = {**calls[0], "function": {**calls[0]["function"], "name": PLACE}}
    return {**message, "tool_calls": [other, *calls[1:]]}


@dataclass(frozen=True)
class Rendered:
    """A conversation and its text; `render` gives that of other messages, with the generation prompt if asked, or raises InputError."""

    messages: list[Message]
    text: str
    render: Callable[[list[Message], bool], str]
    prompt: str
    ends: Ends

    def span(self, i: int) -> Span | None:
        """The characters that message `i` has to produce, or None where the template shows it in a way that cannot be told from the rest."""
        if self.messages[i]["role"] != "assistant":
            return self._by_place(i)
        return self._by_prefix(i) or self._by_place(i)

    def _tried(self, messages: list[Message], prompt: bool = False) -> str | None:
        """Some templates refuse half a conversation, and none takes an empty one."""
        try:
            return self.render(messages, prompt)
        except InputError:
            return None

    def _by_prefix(self, i: int) -> Span | None:
        """As the turn stands at the end of the conversation up to it, where it stands in the whole one too, maybe moved by what others show."""
        turn = self.text if i == len(self.messages) - 1 else self._tried(self.messages[: i + 1])
        if turn is None or (start := self._start(i, turn)) is None:
            return None
        if self.text.startswith(turn):
            return self.ends.after(self.text, start, len(turn))
        other = [*self.messages[:i], _changed(self.messages[i])]
        alone, within = self._tried(other), self._tried([*other, *self.messages[i + 1 :]])
        if alone is None or within is None:
            return None
        moved = _shared(within, self.text) - _shared(alone, turn)
        found = self.text[max(0, start + moved) : len(turn) + moved]
        return self.ends.after(self.text, start + moved, len(turn) + moved) if found == turn[start:] else None

    def _start(self, i: int, turn: str) -> int | None:
        """Where the assistant begins to write in `turn`: behind the generation prompt, or behind what the template puts before any answer."""
        prompted = self._tried(self.messages[:i], prompt=True)
        if prompted is None:
            return None
        before = "" if self.prompt and prompted.endswith(self.prompt) else self._tried(self.messages[:i])
        if before is None or before != prompted:
            return len(prompted) if before is not None and turn.startswith(prompted) else None
        framed = self._tried([*self.messages[:i], _plain(self.messages[i])]) or ""
        if PLACE not in framed or not framed.startswith(before) or not turn.startswith(before):
            return None
        return _shared(framed[: framed.index(PLACE)], turn)

    def _by_place(self, i: int) -> Span | None:
        """Where an answer alone stands when it leaves the rest of the text as it is, up to the token that ends the turn.

        For templates that show a turn differently once others follow (Qwen3), and turns that others write.
        """
        framed = self._tried([*self.messages[:i], _plain(self.messages[i]), *self.messages[i + 1 :]]) or ""
        before, place, after = framed.partition(PLACE)
        stop = len(self.text) - len(after)
        if not place or PLACE in after or not self.text.endswith(after):
            return None
        behind = stop + len(after) - len(after.lstrip())
        end = _at(self.text, behind, self.ends.added)
        start = self._behind_header(i, before, end)
        return None if start is None or start > stop else (start, behind + len(end) if end else stop)

    def _behind_header(self, i: int, before: str, end: str) -> int | None:
        """Where the turn begins that has `before` before its answer: behind the generation prompt, if it is this turn's, or right there."""
        position = before.rfind(self.prompt) + len(self.prompt) if self.prompt and self.messages[i]["role"] == "assistant" else 0
        between = before[position:]
        if position >= len(self.prompt) > 0 and not (end in between if end else between.strip()) and self.text.startswith(before[:position]):
            return position
        if self.text.startswith(before):
            return len(before)
        more = any(self.messages[i].get(key) for key in ("tool_calls", "reasoning_content"))
        return _shared(self.text, before) if more else None
