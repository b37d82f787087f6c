"""Declared: the tokens that files beside a tokenizer.json name, which loading adds where that file has them not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pentamesh.errors import InputError

__all__ = ["declared"]

CONFIG = "tokenizer_config.json"
# Roles that every tokenizer may name a token for, in the order in which loading adds them; those of one model come behind.
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def declared(folder: Path) -> list[str]:
    """Texts of tokens, in the order in which those that are absent are added; one may come several times. Raises InputError.

    Ignores: added_tokens.json and special_tokens_map.json where tokenizer_config.json lists what was added, as loading does.
    Source: transformers, PreTrainedTokenizerBase._from_pretrained and TokenizersBackend.__init__.
    """
    config = _read(folder / CONFIG)
    try:
        return [text for text in _texts(folder, config) if text]
    except (ValueError, TypeError, AttributeError) as error:
        raise _unreadable(folder / CONFIG, error) from error


def _texts(folder: Path, config: dict[str, Any]) -> Iterator[str]:
    if "added_tokens_decoder" in config:
        added = {int(number): _text(token) for number, token in config["added_tokens_decoder"].items()}
    else:
        added = {number: token for token, number in _read(folder / "added_tokens.json").items()}
        config = config | _read(folder / "special_tokens_map.json")
    yield from (added[number] for number in sorted(added))
    roles = dict.fromkeys((*ROLES, *(key for key in config if key.endswith("_token"))))
    yield from (_text(config.get(role)) for role in roles)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    yield from map(_text, extra.values() if isinstance(extra, dict) else extra)


def _text(token: object) -> str:
    """Of a token as a text or with its properties; of anything else (`add_bos_token: true`), none."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return dict(found.items())
    except (ValueError, AttributeError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> InputError:
    what = f"its tokens cannot be read ({type(error).__name__}: {error})"
    return InputError(what, where=str(path), hint="download the folder again")
