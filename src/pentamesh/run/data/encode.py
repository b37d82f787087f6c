"""Encode: from a checked row to its tokens, by the form of the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from pentamesh.errors import InputError, Problem
from pentamesh.run.data.chat import ADD_GENERATION, Chat
from pentamesh.run.data.forms import Form
from pentamesh.run.data.rows import Row
from pentamesh.run.data.tokens import Encoded, encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Encode", "encoder"]

Encode = Callable[[Row], Encoded | list[Problem]]


def encoder(tokenizer: PreTrainedTokenizerBase, form: Form) -> Encode:
    """The function that gives a row's tokens, or what keeps the template from rendering it.

    Raises: InputError, when the tokenizer has no chat template and the rows are conversations.
    """
    if form == "text":
        return lambda row: encode_text(tokenizer, row.value["text"])
    chat = Chat.of(tokenizer)
    return lambda row: _conversation(chat, row)


def _conversation(chat: Chat, row: Row) -> Encoded | list[Problem]:
    try:
        encoded = chat.encode(row.value["messages"])
    except InputError as error:
        return [replace(problem, where=row.where) for problem in error.problems]
    if not encoded.num_trained:
        return [Problem("the chat template leaves no token of the conversation to train", row.where, ADD_GENERATION)]
    return encoded
