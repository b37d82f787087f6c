"""What can go wrong, and the exit code each kind ends with.

    PentameshError            5   base: never raised itself
    |-- InputError            2   the job, its data or its model cannot be used as given
    |-- DoesNotFit            3   no layout fits the hardware
    |-- Drift                 4   what is there differs from what was planned
    `-- RunFailed             5   the run started and could not finish

Exit code 0 is success; 128 + n is an end by signal n (130 from the keyboard, 143 by a scheduler). An error carries *all* the problems
found at once, each as what (with numbers), where (file and line, or tensor) and a hint that would work.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import ClassVar

__all__ = ["DoesNotFit", "Drift", "InputError", "PentameshError", "Problem", "RunFailed", "reason", "unexpected"]

# Of a path that is too long for the system its beginning says enough.
PATH_SHOWN = 200
# Of what a library says of a failure, before its advice begins.
REASON_SHOWN = 160


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: what it is, where it is, and what would work."""

    what: str
    where: str = ""
    hint: str = ""

    def __str__(self) -> str:
        lines = [f"error: {self.what}"]
        if self.where:
            lines.append(f"  where  {self.where}")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


class PentameshError(Exception):
    """Base of every error that pentamesh raises on purpose; `str()` is what a user reads."""

    exit_code: ClassVar[int] = 5

    def __init__(self, *problems: Problem | str, where: str = "", hint: str = "") -> None:
        self.problems = tuple(p if isinstance(p, Problem) else Problem(p, where, hint) for p in problems)
        super().__init__(*self.problems)

    def __str__(self) -> str:
        return "\n".join(str(p) for p in self.problems)

    def __reduce__(self) -> tuple[type[PentameshError], tuple[Problem, ...]]:
        return type(self), self.problems  # an error crosses from rank to rank


class InputError(PentameshError):
    """The job file, the command line, the data or the model folder cannot be used as given."""

    exit_code = 2


class DoesNotFit(PentameshError):
    """No layout that was asked for fits the hardware."""

    exit_code = 3


class Drift(PentameshError):
    """What is there (the model, what was built of it, its collectives) is not what the plan says."""

    exit_code = 4


class RunFailed(PentameshError):
    """The run started and could not go on."""

    exit_code = 5


def reason(error: BaseException) -> str:
    """What a library says of a failure, on one line; its kind where it says nothing."""
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) <= REASON_SHOWN else said[:REASON_SHOWN] + " ..."


def unexpected(error: Exception) -> PentameshError:
    """What a user reads of an error that nobody raised on purpose; one of the system's (a name that it takes for none, a full disk) says itself."""
    if isinstance(error, OSError):
        kind = InputError if error.filename else RunFailed
        return kind(error.strerror or str(error), where=str(error.filename or "writing the output")[:PATH_SHOWN])
    at = traceback.extract_tb(error.__traceback__)[-1]
    what = f"nobody expected this: {type(error).__name__}: {error}"
    return RunFailed(what, where=f"{at.filename}:{at.lineno}", hint="PENTAMESH_TRACEBACK=1 shows the way there; please report it with that")
