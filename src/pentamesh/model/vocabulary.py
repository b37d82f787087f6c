"""Vocabulary: the tokens that a model's files say it has, and the model with room for more."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pentamesh.errors import InputError, Problem
from pentamesh.model.declared import declared
from pentamesh.model.dims import TensorSpec
from pentamesh.model.spec import ModelSpec
from pentamesh.model.spelling import spellings_of

__all__ = ["WHERE", "Vocabulary", "existing", "grown", "vocabulary"]

WHERE = "model.new_tokens"


class Vocabulary(NamedTuple):
    """Tokens by how they are spelled, as far as that can be read here, the id of the next that is added, and how a text may be spelled."""

    ids: Mapping[str, int]
    next_id: int
    spellings: tuple[Callable[[str], str], ...] = (str,)

    def id_of(self, text: str) -> int | None:
        """The id of the token that stands for `text`, if there is one."""
        return next((self.ids[spelled] for spell in self.spellings if (spelled := spell(text)) in self.ids), None)


def vocabulary(files: Path | None) -> Vocabulary | None:
    """What a model folder's tokenizer.json and the files beside it, or a GGUF file, say; None where there is neither. Raises InputError.

    The next id is behind the tokens that were learned, those that were added, and those that are when they are loaded.
    Source: huggingface/tokenizers, AddedVocabulary::add_tokens.
    """
    if files is not None and files.is_file():
        from pentamesh.model.gguf import read_gguf  # few plans read one

        tokens = read_gguf(files).metadata.get("tokenizer.ggml.tokens")  # of a long list, how long it is
        return None if tokens is None else Vocabulary({}, tokens if isinstance(tokens, int) else len(tokens))
    path = files / "tokenizer.json" if files is not None else None
    if path is None or not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        learned = found["model"]["vocab"]
        ids = dict(learned) if isinstance(learned, dict) else {token: place for place, (token, *_) in enumerate(learned)}
        added = {token["content"]: token["id"] for token in found.get("added_tokens") or ()}
        spellings = spellings_of(found)
        next_id = max(len(ids), max(added.values(), default=-1) + 1)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"its tokens cannot be read ({type(error).__name__}: {error})", where=str(path), hint="download the folder again") from error
    ids |= added
    absent = [token for token in dict.fromkeys(declared(path.parent)) if token not in ids]
    return Vocabulary(ids | {token: next_id + place for place, token in enumerate(absent)}, next_id + len(absent), spellings)


def existing(tokens: Sequence[str], id_of: Callable[[str], int | None]) -> Iterator[Problem]:
    """A problem for each of `tokens` that the vocabulary has already, by `id_of`."""
    for token in tokens:
        if (found := id_of(token)) is not None:
            yield Problem(f"{token!r} is a token of this model already (id {found})", WHERE, "leave it out: it needs no row of its own")


def grown(model: ModelSpec, tokens: Sequence[str], known: Vocabulary | None) -> ModelSpec:
    """The model with a row for each of `tokens` in its embedding and head: rows behind its tokens that no token has are taken first.

    Raises InputError for tokens that it has, and for a model whose dims have no names.
    """
    if not tokens:
        return model
    if not model.is_described:
        raise InputError(f"new tokens need a model of a described family, and {model.name} is of none", where=WHERE, hint="leave them out")
    if known is not None and (problems := [*existing(tokens, known.id_of)]):
        raise InputError(*problems)
    first = known.next_id if known is not None else model.vocab
    rows = max(model.vocab, first + len(tokens))
    tensors = tuple(_with_rows(t, rows) for t in model.tensors)
    notes = (*model.notes, _said(model, len(tokens), first, rows, is_known=known is not None))
    return replace(model, vocab=rows, tensors=tensors, config=model.config | {"vocab_size": rows}, notes=notes)


def _with_rows(tensor: TensorSpec, rows: int) -> TensorSpec:
    dims = tuple(replace(dim, size=rows) if dim.name == "vocab" else dim for dim in tensor.dims)
    return tensor if dims == tensor.dims else replace(tensor, dims=dims)


def _said(model: ModelSpec, count: int, first: int, rows: int, *, is_known: bool) -> str:
    added = f"{count} new token{'s' if count > 1 else ''}"
    if not is_known:
        return f"{added}: its tokenizer is not on this machine, so that its vocabulary is planned as full, and grows from {model.vocab:,} to {rows:,}"
    grows = f"its vocabulary grows from {model.vocab:,} to {rows:,}" if rows > model.vocab else f"its vocabulary of {rows:,} has rows to spare"
    return f"{added} from id {first:,}: {grows}"
