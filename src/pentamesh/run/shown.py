"""Shown: what a module sees under the names of its parameters while it computes - casts of them.

The module gets a class of its own with a property of that name, as torch's parametrizations do it. Nothing changes while it runs, so that blocks
which are compiled or computed again see the same; and modules that are alike share a class, so that one graph serves them all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

__all__ = ["Getter", "cast_to", "class_with", "show"]

Getter = Callable[[nn.Module], Any]


def show(module: nn.Module, getters: dict[str, Getter]) -> None:
    """Let `module` see what the getters give under these names; the registered parameters stay what they are."""
    module.__class__ = class_with(type(module), tuple((name, _property(getter)) for name, getter in getters.items()))


@cache
def cast_to(name: str, dtype: torch.dtype) -> Getter:
    """A copy in `dtype` each time that it is asked for."""
    return lambda module: module._parameters[name].to(dtype)  # pyright: ignore[reportOptionalMemberAccess]


@cache
def class_with(base: type, own: tuple[tuple[str, Any], ...]) -> type:
    """A class as `base`, under its name, with these attributes of its own; the same one each time."""
    return type(base.__name__, (base,), {"__module__": base.__module__, **dict(own)})


@cache
def _property(getter: Getter) -> property:
    return property(getter)
