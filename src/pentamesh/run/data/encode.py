"""Encode: from the content of a row to its tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from pentamesh.errors import InputError, Problem
from pentamesh.run.data.chat import ADD_GENERATION, Chat
from pentamesh.run.data.forms import Form, Pair, Sample
from pentamesh.run.data.ids import Ids
from pentamesh.run.data.tokens import Encoded, encode_pair, encode_text
from pentamesh.run.data.turns import Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Encode", "encoder"]

Encode = Callable[[Sample], Encoded | list[Problem]]


def encoder(tokenizer: PreTrainedTokenizerBase, form: Form) -> Encode:
    """The function that gives a row's tokens, or what keeps the template from rendering it.

    Raises: InputError, when the tokenizer has no chat template and the rows are conversations.
    """
    chat = cache(lambda: Chat.of(tokenizer))
    if form not in ("text", "prompt_completion", "tokens"):
        chat()

    def encode(row: Sample) -> Encoded | list[Problem]:
        if isinstance(row.content, str):
            return encode_text(tokenizer, row.content)
        if isinstance(row.content, Pair):
            return encode_pair(tokenizer, row.content.prompt, row.content.completion)
        if isinstance(row.content, Ids):
            return Encoded(np.array(row.content.ids, np.int32), np.array(row.content.trained, bool))
        return _conversation(chat, row.content, row.where)

    return encode


def _conversation(chat: Callable[[], Chat], content: Conversation, where: str) -> Encoded | list[Problem]:
    try:
        encoded = chat().encode(content)
    except InputError as error:
        return [replace(problem, where=where) for problem in error.problems]
    if content.trained and not encoded.num_trained:
        return [Problem("the chat template leaves no token of the conversation to train", where, ADD_GENERATION)]
    return encoded
