"""The roles in which a tensor lives during a step: where it rests, where it works, where it travels."""

from __future__ import annotations

from enum import Enum

__all__ = ["STORE", "Role"]


class Role(Enum):
    """One way for a tensor to be held.

    STORE has three kinds, since a strategy may cut one and not another: WEIGHT, GRADIENT and STATE (of the optimizer), between steps.
    USE is a parameter or activation while a block computes; COMPUTED is the gradient as a block's backward leaves it, summed over nobody;
    ATTEND is an activation inside attention; CARRY is the residual stream between blocks.
    """

    __hash__ = object.__hash__  # members are single: Enum's own, of their names, is written in Python

    WEIGHT = "weight"
    GRADIENT = "gradient"
    STATE = "state"
    USE = "use"
    COMPUTED = "computed"
    ATTEND = "attend"
    CARRY = "carry"


STORE = (Role.WEIGHT, Role.GRADIENT, Role.STATE)
