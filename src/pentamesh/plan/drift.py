"""Drift of the model: what a plan says of it, beside what lies there now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pentamesh.errors import Drift, Problem
from pentamesh.model.spec import ModelSpec

__all__ = ["check_model", "model_facts"]

# What decides a model's tensors, or follows from them.
DECISIVE = ("hidden", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn", "vocab", "tied", "num_parameters")
# What a config.json says of other things than what is computed: files, tokens, how and by what it was written.
BESIDE = (
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)


def model_facts(model: ModelSpec) -> dict[str, Any]:
    """What a plan tells about its model: every number but the tensors, and what its config.json says of the computation, if it was read."""
    kept = ("name", "family", "hidden", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn", "vocab", "tied", "max_positions")
    return {key: getattr(model, key) for key in kept} | {
        "num_parameters": model.num_parameters,
        "trained_parameters": model.num_trained_parameters,
        "active_parameters": model.active_parameters,
        "notes": list(model.notes),
        "config": None if model.is_assumed else {key: value for key, value in sorted(model.config.items()) if key not in BESIDE},
    }


def check_model(before: Mapping[str, Any], now: Mapping[str, Any], where: str, hint: str) -> None:
    """Compare the facts of a model in a plan with those of what lies there. Raises Drift with everything that differs.

    A plan that was made from the catalogue answers for sizes alone.
    """
    if found := [Problem(f"{key} is {_shown(new)}, and {_shown(old)} in the plan", where, hint) for key, old, new in _differing(before, now)]:
        raise Drift(*found)


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    yield from ((key, before.get(key), now.get(key)) for key in DECISIVE if before.get(key) != now.get(key))
    old, new = before.get("config"), now.get("config")
    if old is not None and new is not None:
        yield from ((f"config.json: {key}", old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key))


def _shown(value: Any) -> str:
    return "not given" if value is None else f"{value:,}" if type(value) is int else str(value)
