"""Dropout: what a config drops at random, which no other layout would draw alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["dropping"]


def dropping(config: Mapping[str, Any], shares: Mapping[str, float]) -> str:
    """What keeps the trainer from a config that drops activations, empty where it drops none; `shares` are the keys and what a missing one means."""
    found = [key for key, share in shares.items() if config.get(key, share)]
    return f"it drops activations at random ({', '.join(found)}), by other draws on every layout" if found else ""
