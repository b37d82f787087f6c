"""Tokens: what the model reads and which of it is trained, for one row; and how plain text is cut to length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from pentamesh.errors import InputError
from pentamesh.run.data.forms import Form

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Cut", "Encoded", "cut_to", "encode_pair", "encode_text", "windows"]


@dataclass(frozen=True)
class Encoded:
    """The tokens of one row and, for each, whether it is a target.

    Shapes: ids [n] int32, trained [n] bool. The first token is never a target: nothing comes before it.
    """

    ids: np.ndarray
    trained: np.ndarray

    @property
    def num_trained(self) -> int:
        return int(self.trained[1:].sum())


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> Encoded:
    """One document with the special tokens its tokenizer adds, and its end-of-text token when it has one; every token is a target."""
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]  # pyright: ignore[reportAssignmentType]
    ids = _ended(tokenizer, ids)
    return Encoded(np.array(ids, np.int32), np.ones(len(ids), bool))


def encode_pair(tokenizer: PreTrainedTokenizerBase, prompt: str, completion: str) -> Encoded:
    """Prompt and completion as one text with the tokenizer's special tokens; what reaches into the completion is a target, and so is the end of text.

    Raises: InputError, where the tokenizer cannot say which characters a token stands for.
    """
    if not tokenizer.is_fast:
        raise InputError("the tokenizer has no tokenizer.json: tokens cannot be traced to their completion", where="model.name")
    found = tokenizer(prompt + completion, return_offsets_mapping=True, verbose=False)
    ids = _ended(tokenizer, found["input_ids"])  # pyright: ignore[reportArgumentType]
    trained = np.zeros(len(ids), bool)
    trained[: len(found["offset_mapping"])] = [stop > max(start, len(prompt)) for start, stop in found["offset_mapping"]]  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
    trained[-1] |= ids[-1] == tokenizer.eos_token_id
    return Encoded(np.array(ids, np.int32), trained)


def _ended(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """The tokens with the end of text behind them, where the tokenizer has one and has not put it there."""
    eos = tokenizer.eos_token_id
    return [*ids, eos] if isinstance(eos, int) and ids[-1:] != [eos] else ids


def windows(num_tokens: int, seq_len: int) -> list[tuple[int, int]]:
    """Offset and length of each window of `seq_len` + 1 tokens, overlapping by one: each token of a document but the first is predicted once."""
    return [(start, min(seq_len + 1, num_tokens - start)) for start in range(0, num_tokens - 1, seq_len)]


@dataclass(frozen=True)
class Cut:
    """The samples of one row: offset and number of tokens of each. There are none when the row is `dropped`, which says why.

    num_untrained counts pieces of a row that was cut, in which nothing is trained: they are no samples.
    """

    spans: tuple[tuple[int, int], ...] = ()
    dropped: str = ""
    truncated: bool = False
    num_untrained: int = 0


def cut_to(row: Encoded, form: Form, seq_len: int, too_long: Literal["error", "drop", "truncate", "split"]) -> Cut:
    """How a row becomes samples of at most `seq_len` tokens that the model reads, each followed by one that is only a target."""
    if not row.num_trained:
        return Cut(dropped="nothing_to_train")
    num_tokens = len(row.ids)
    exceeds = num_tokens > seq_len + 1
    if not exceeds or form == "text" or too_long == "split":
        pieces = windows(num_tokens, seq_len)
        spans = tuple((offset, n) for offset, n in pieces if row.trained[offset + 1 : offset + n].any())
        return Cut(spans, num_untrained=len(pieces) - len(spans))
    if too_long != "truncate":
        return Cut(dropped="too_long")
    kept = bool(row.trained[1 : seq_len + 1].any())
    return Cut(((0, seq_len + 1),), truncated=True) if kept else Cut(dropped="nothing_to_train")
