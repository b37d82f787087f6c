"""Problems: the faults of many rows, each kind told once with its places."""

from __future__ import annotations

from types import TracebackType

from pentamesh.errors import InputError, Problem

__all__ = ["MAX_PLACES", "MAX_PROBLEMS", "Problems", "listed"]

MAX_PROBLEMS = 20  # distinct ones: more does not help whoever reads them
MAX_PLACES = 5


class Problems:
    """Faults of many rows, the same fault told once with its places; a `with` block over it ends with InputError when there were any.

    Raises: InputError, as soon as there are more than MAX_PROBLEMS different faults.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[str, str], list[str]] = {}
        self._num_rows: dict[tuple[str, str], int] = {}

    def add(self, *problems: Problem) -> None:
        for problem in problems:
            kind = (problem.what, problem.hint)
            if kind not in self._places and len(self._places) == MAX_PROBLEMS:
                more = Problem(f"at least 1 more problem, at {problem.where}; the rest was not read")
                raise InputError(*self._told(), more)
            places = self._places.setdefault(kind, [])
            self._num_rows[kind] = self._num_rows.get(kind, 0) + 1
            if len(places) < MAX_PLACES:
                places.append(problem.where)

    def _told(self) -> list[Problem]:
        return [Problem(what, listed(places, self._num_rows[what, hint]), hint) for (what, hint), places in self._places.items()]

    def __enter__(self) -> Problems:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None and self._places:
            raise InputError(*self._told())


def listed(places: list[str], num_rows: int) -> str:
    """The first places of so many rows, and how many more there are."""
    more = num_rows - len(places)
    return ", ".join(places) + (f" and {more:,} more" if more else "")
