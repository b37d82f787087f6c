"""Chat: a conversation through the model's own template, and which of its tokens the assistant has to produce.

What is trained of a turn is what the model would have to write after the generation prompt: the answer and its end-of-turn token. The
header before it and the white space behind it come from the template. A template that marks `{% generation %}` says so itself; for any other
the turn is found by rendering.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from pentamesh.errors import InputError
from pentamesh.run.data.tokens import Encoded
from pentamesh.run.data.turns import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Chat", "encode_chat"]

Span = tuple[int, int]  # characters of the rendered text, from and up to

# Stands in for an answer: private-use characters, so that no template trims, splits or interprets it.
PLACE = "\ue0f0\ue0f1\ue0f2"
ADD_GENERATION = "mark the assistant's part of the template with {% generation %} ... {% endgeneration %}"


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> Encoded:
    """The tokens of one conversation, those of the assistant's answers and of their end-of-turn tokens marked as trained.

    Raises: InputError, when the tokenizer has no usable template or the template refuses the conversation.
    """
    return Chat.of(tokenizer).encode(messages)


@dataclass(frozen=True)
class Chat:
    """A tokenizer's chat template, ready to encode.

    marks   the template says itself, by `{% generation %}`, what the assistant writes
    ends    the added tokens, any of which may end a turn; longest first
    """

    tokenizer: Any
    template: str
    marks: bool
    ends: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Chat:
        """Raises: InputError, when there is no template or the tokenizer cannot say which characters a token stands for."""
        if not tokenizer.is_fast:
            raise InputError("the tokenizer has no tokenizer.json: tokens cannot be traced to their turns", where="model.name")
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:
            hint = "take an instruct model, put a `chat_template` into its tokenizer_config.json, or train on `text` rows"
            raise InputError("the model has no chat template, so `messages` cannot be rendered", where="model.name", hint=hint) from error
        added = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
        ends = tuple(sorted((token for token in added if token.strip()), key=len, reverse=True))
        return cls(tokenizer, template, bool(re.search(r"\{%-?\s*generation\s*-?%\}", template)), ends)

    def encode(self, messages: list[Message], num_given: int = 0) -> Encoded:
        """The tokens of `messages`, tokenised once as a whole; a token is trained when it reaches into a trained span.

        Turns among the first `num_given` messages are read and not trained.
        """
        text, spans = self.spans(messages, num_given)
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts, stops = np.array(found["offset_mapping"], np.int64).reshape(-1, 2).T
        trained = np.zeros(len(starts), bool)
        for start, stop in spans:
            trained |= (stops > start) & (starts < stop)
        return Encoded(np.array(found["input_ids"], np.int32), trained)

    def spans(self, messages: list[Message], num_given: int = 0) -> tuple[str, list[Span]]:
        """The rendered conversation and, turn by turn, the characters that are trained."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        trained = [i for i in turns if i >= num_given]
        if self.marks:
            text, spans = self._marked(messages)
            if len(trained) < len(turns) != len(spans):
                raise InputError(f"the chat template marks {len(spans)} spans for {len(turns)} answers, so the given ones cannot be told")
            return text, spans[len(turns) - len(trained) :]
        text = self._render(messages)
        return text, [self._span(text, messages, i) for i in trained]

    def _marked(self, messages: list[Message]) -> tuple[str, list[Span]]:
        try:
            texts, marked = render_jinja_template(
                [messages], chat_template=self.template, return_assistant_tokens_mask=True, **self.tokenizer.special_tokens_map
            )
        except Exception as error:
            raise _refused(error) from error
        spans: Any = marked[0]  # declared as text by transformers
        return texts[0], [self._ended(texts[0], start, stop) for start, stop in spans]

    def _render(self, messages: list[Message], prompt: bool = False) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        except Exception as error:  # a template is a foreign program: it may raise anything
            raise _refused(error) from error

    def _span(self, text: str, messages: list[Message], i: int) -> Span:
        span = self._by_prefix(text, messages, i) or self._by_place(text, messages, i)
        if span is None:
            raise InputError(f"the chat template renders messages[{i}] differently inside the conversation than alone", hint=ADD_GENERATION)
        return span

    def _by_prefix(self, text: str, messages: list[Message], i: int) -> Span | None:
        """From the end of the generation prompt to the end of the turn, where both are beginnings of the whole text."""
        try:
            bare, prompt, turn = self._render(messages[:i]), self._render(messages[:i], prompt=True), self._render(messages[: i + 1])
        except InputError:  # some templates refuse half a conversation, and none takes an empty one
            return None
        if prompt == bare or not turn.startswith(prompt) or not text.startswith(turn):
            return None
        return self._ended(text, len(prompt), len(turn))

    def _by_place(self, text: str, messages: list[Message], i: int) -> Span | None:
        """Where the answer stands when another one leaves the rest of the text as it is, up to the token that ends the turn.

        For templates without a generation prompt (Mistral), and those that show a turn differently once others follow (Qwen3).
        """
        framed = self._render([*messages[:i], {**messages[i], "content": PLACE}, *messages[i + 1 :]])
        before, place, after = framed.partition(PLACE)
        start, stop = len(before), len(text) - len(after)
        if not place or PLACE in after or start > stop or not text.startswith(before) or not text.endswith(after):
            return None
        behind = stop + len(after) - len(after.lstrip())
        end = self._end_at(text, behind)
        return start, behind + len(end) if end else stop

    def _ended(self, text: str, start: int, stop: int) -> Span:
        """The span up to its end-of-turn token: without the white space behind it, or with the one that a mark has left out."""
        body = text[start:stop].rstrip()
        if body.endswith(self.ends):
            return start, start + len(body)
        return start, stop + len(self._end_at(text, stop)) if self.marks else stop

    def _end_at(self, text: str, position: int) -> str:
        return next((token for token in self.ends if text.startswith(token, position)), "")


def _refused(error: Exception) -> InputError:
    # What a template raises itself (`raise_exception`) is of this very class; its own faults are of others, derived from it or not.
    meant = type(error) is TemplateError
    hint = "change the roles or their order" if meant else "mend the chat template, or take it from the model's publisher"
    return InputError(f"the chat template refuses the conversation: {type(error).__name__}: {error}", hint=hint)
