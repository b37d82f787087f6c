"""Chat: a conversation through the model's own template, and which of its tokens are trained.

A template that marks `{% generation %}` says itself what the assistant writes; for any other, `spans` finds it by rendering.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from pentamesh.errors import InputError, Problem
from pentamesh.run.data.marks import misplaced
from pentamesh.run.data.shown import lost_thoughts, shape, unseen
from pentamesh.run.data.spans import PLACE, Ends, Rendered, Span
from pentamesh.run.data.tokens import Encoded
from pentamesh.run.data.turns import REASONING, Conversation, Message, answers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ADD_GENERATION", "Chat", "encode_chat"]

ADD_GENERATION = "mark the assistant's part of the template with {% generation %} ... {% endgeneration %}"
# A call as a template meets it, to see whether it wants the arguments as an object or as text. Ids of nine letters: Mistral asks for them.
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": {"k": "v"}}}


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> Encoded:
    """The tokens of one conversation, those of the assistant's answers and of their end-of-turn tokens marked as trained.

    Raises: InputError, when the tokenizer has no usable template or the template refuses the conversation.
    """
    return Chat.of(tokenizer).encode(Conversation(messages, answers(messages)))


@dataclass(frozen=True)
class Chat:
    """A tokenizer's chat template, ready to encode.

    marks   the template says itself, by `{% generation %}`, what the assistant writes
    faults  of conversations of each shape, what the template does not show of them, or marks wrongly
    """

    tokenizer: Any
    template: str
    marks: bool
    ends: Ends
    faults: dict[tuple[object, ...], list[Problem]] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Chat:
        """Raises: InputError, when there is no template or the tokenizer cannot say which characters a token stands for."""
        if not tokenizer.is_fast:
            raise InputError("the tokenizer has no tokenizer.json: tokens cannot be traced to their turns", where="model.name")
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:
            hint = "take an instruct model, give data.chat_template, or train on `text` rows"
            raise InputError("the model has no chat template, so `messages` cannot be rendered", where="model.name", hint=hint) from error
        backend: Any = tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        return cls(tokenizer, template, bool(re.search(r"\{%-?\s*generation\s*-?%\}", template)), _ends(tokenizer))

    def encode(self, talk: Conversation) -> Encoded:
        """The tokens of a conversation, tokenised once as a whole; a token is trained when it reaches into a trained span."""
        text, spans = self.spans(talk)
        found = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        ids = np.array(found.ids, np.int32)
        starts, stops = np.fromiter(chain.from_iterable(found.offsets), np.int64, 2 * len(ids)).reshape(-1, 2).T
        trained = np.zeros(len(ids), bool)
        for start, stop in spans:
            trained |= (stops > start) & (starts < stop)
        return Encoded(ids, trained)

    def spans(self, talk: Conversation) -> tuple[str, list[Span]]:
        """The rendered conversation and, turn by turn, the characters that are trained.

        Raises InputError where the template refuses the conversation, does not show all of it, or shows a turn so that it cannot be found.
        """
        text, spans = self._marked(talk) if self.marks else (self._render(talk), [])
        turns, last = answers(talk.messages), len(talk.messages) - 1
        spans = sorted([*spans, *self._found(talk, text, set(talk.trained) - set(turns) if self.marks else talk.trained)])
        if spans and self._ends_no_turn and last in turns and last in talk.trained:
            text += self.tokenizer.eos_token
            spans[-1] = (spans[-1][0], len(text))
        key = shape(talk)
        if key not in self.faults:
            self.faults[key] = [*unseen(talk, self._render), *(misplaced(talk, self._marked) if self.marks else [])]
        if lost := [*self.faults[key], *lost_thoughts(talk, text)]:
            raise InputError(*lost)
        return text, spans

    def _found(self, talk: Conversation, text: str, turns: Iterable[int]) -> Iterator[Span]:
        shown = Rendered(
            talk.messages, text, lambda messages, prompt: self._render(replace(talk, messages=messages), prompt), self._prompt, self.ends
        )
        for i in turns:
            if (span := shown.span(i)) is None:
                raise InputError(f"the chat template renders messages[{i}] differently inside the conversation than alone", hint=ADD_GENERATION)
            yield span

    def _marked(self, talk: Conversation) -> tuple[str, list[Span]]:
        """The text, and its spans that are trained as the template marks them."""
        try:
            texts, marked = render_jinja_template(
                [self._spelled(talk.messages)],
                tools=talk.tools or None,  # pyright: ignore[reportArgumentType]
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:
            raise _refused(error) from error
        marks: Any = marked[0]  # declared as text by transformers
        spans, turns = [self.ends.after(texts[0], start, stop) for start, stop in marks], answers(talk.messages)
        if set(turns) <= set(talk.trained):
            return texts[0], spans
        if len(spans) != len(turns):
            raise InputError(f"the chat template marks {len(spans)} spans for {len(turns)} answers, so those that are not trained cannot be told")
        return texts[0], [span for i, span in zip(turns, spans, strict=True) if i in talk.trained]

    def _render(self, talk: Conversation, prompt: bool = False) -> str:
        tools: Any = talk.tools or None
        try:
            template = self.tokenizer.get_chat_template(None, tools)  # of several, there may be one for tools
            texts, _ = render_jinja_template(
                [self._spelled(talk.messages)],
                tools=tools,
                chat_template=template,
                add_generation_prompt=prompt,
                **self.tokenizer.special_tokens_map,
            )
            return texts[0]
        except Exception as error:  # a template is a foreign program: it may raise anything
            raise _refused(error) from error

    def _spelled(self, messages: list[Message]) -> list[Message]:
        """The messages with thoughts under the name that the template reads, and arguments as it takes them."""
        return [self._spelled_message(m) if "tool_calls" in m or "reasoning_content" in m else m for m in messages]

    def _spelled_message(self, message: Message) -> Message:
        found = dict(message)
        if "reasoning_content" in found:
            found[self._thoughts] = found.pop("reasoning_content")
        if "tool_calls" in found and self._arguments_as_text:
            found["tool_calls"] = [_with_text(call) for call in found["tool_calls"]]
        return found

    @cached_property
    def _thoughts(self) -> str:
        """The field in which the template looks for thoughts."""
        return next((name for name in REASONING if re.search(rf"\b{name}\b", self.template)), REASONING[0])

    @cached_property
    def _prompt(self) -> str:
        """What the template puts before any answer that the model is to write, where it does."""
        question = Conversation([{"role": "user", "content": "x"}], ())
        try:
            bare, prompted = self._render(question), self._render(question, prompt=True)
        except InputError:
            return ""
        return prompted.removeprefix(bare) if prompted.startswith(bare) else ""

    @cached_property
    def _ends_no_turn(self) -> bool:
        """Whether nothing says that the last turn has ended, and there is an end of text to say it."""
        try:
            text = self._render(Conversation([{"role": "user", "content": "x"}, {"role": "assistant", "content": PLACE}], ()))
        except InputError:
            return False
        return bool(self.tokenizer.eos_token) and text.rstrip().endswith(PLACE)

    @cached_property
    def _arguments_as_text(self) -> bool:
        """Whether the template refuses arguments that are an object, or prints one as Python does, and takes them as text (DeepSeek)."""
        return not self._takes(CALL) and self._takes(_with_text(CALL))

    def _takes(self, call: dict[str, Any]) -> bool:
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception:  # of a foreign program
            return False
        return "{'k'" not in text


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _ends(tokenizer: Any) -> Ends:
    added = tokenizer.added_tokens_decoder.values()
    special = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)

    def longest_first(tokens: set[str]) -> tuple[str, ...]:
        return tuple(sorted((token for token in tokens if token.strip()), key=len, reverse=True))

    return Ends(longest_first(special), longest_first(special | {str(token) for token in added}))


def _refused(error: Exception) -> InputError:
    if isinstance(error, RecursionError | SyntaxError):  # of Python, which Jinja compiles to
        hint = "write it with fewer blocks and brackets within each other, or take it from the model's publisher"
        return InputError(f"the chat template is nested too deeply: {error}", hint=hint)
    # What a template raises itself (`raise_exception`) is of this very class; its own faults are of others, derived from it or not.
    meant = type(error) is TemplateError
    hint = "change the roles or their order, or give data.chat_template" if meant else "mend the chat template, or take it from the model's publisher"
    return InputError(f"the chat template refuses the conversation: {type(error).__name__}: {error}", hint=hint)
