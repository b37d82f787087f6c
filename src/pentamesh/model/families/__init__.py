"""Families: which parameters an architecture has, with names for their dims. One file a family; `describe` finds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pentamesh.model.families import gpt2, llama
from pentamesh.model.spec import ModelSpec

__all__ = ["FAMILIES", "describe"]

FAMILIES: dict[str, Callable[[dict[str, Any], str], ModelSpec]] = dict.fromkeys(llama.VARIATIONS, llama.describe) | {"gpt2": gpt2.describe}


def describe(config: dict[str, Any], name: str) -> ModelSpec | None:
    """The spec of a config.json whose `model_type` belongs to a described family, else None."""
    family = FAMILIES.get(str(config.get("model_type")))
    return family(config, name) if family else None
