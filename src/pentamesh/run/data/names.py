"""Names: what a file calls the fields of its rows and of their turns, where that is not what we call them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pentamesh.job.job import TurnField

__all__ = ["Names", "mistaken"]

TURN_FIELDS = get_args(TurnField)
EMPTY: tuple[Any, ...] = (None, "", [], {})


class Names(dict[str, str]):
    """Of our name of a field, its name in the files: as `data.columns` says, or the same."""

    def __missing__(self, ours: str) -> str:
        return ours

    @classmethod
    def of_rows(cls, columns: Mapping[Any, str]) -> Names:
        return cls((ours, theirs) for ours, theirs in columns.items() if ours not in TURN_FIELDS)

    @classmethod
    def of_turns(cls, columns: Mapping[Any, str]) -> Names:
        return cls((ours, theirs) for ours, theirs in columns.items() if ours in TURN_FIELDS)

    def ours(self, value: dict[str, Any]) -> dict[str, Any]:
        """The row or turn under our names; a field that has our name and another meaning is not in it."""
        kept = {key: inner for key, inner in value.items() if key not in self and key not in self.values()}
        return kept | {ours: value[theirs] for ours, theirs in self.items() if theirs in value}


def mistaken(value: Mapping[str, Any], known: Mapping[str, str]) -> dict[str, str]:
    """Of each field that is spelled nearly as one of the `known`, in another case or with other underscores, what that one is called."""
    near = {_bare(spelled): name for spelled, name in known.items()}
    named = known.values()
    return {key: near[_bare(key)] for key, inner in value.items() if key not in named and _bare(key) in near and inner not in EMPTY}


def _bare(name: str) -> str:
    return str(name).lower().replace("_", "")
