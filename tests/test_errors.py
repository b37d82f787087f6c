"""The exception tree is the one that is drawn, and what a user reads names every problem."""

from __future__ import annotations

import pickle
import re

import pytest

import pentamesh.errors as errors
from pentamesh.errors import DoesNotFit, Drift, InputError, PentameshError, Problem, RunFailed


def test_exit_codes() -> None:
    assert {e.__name__: e.exit_code for e in (InputError, DoesNotFit, Drift, RunFailed)} == {
        "InputError": 2,
        "DoesNotFit": 3,
        "Drift": 4,
        "RunFailed": 5,
    }


def test_tree_is_as_drawn() -> None:
    drawn = {name: int(code) for name, code in re.findall(r"^ +(?:[|`]-- )?(\w+) +(\d)  ", errors.__doc__ or "", re.MULTILINE)}
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, PentameshError)]
    assert drawn == {c.__name__: c.exit_code for c in classes}
    assert {c.__bases__[0] for c in classes if c is not PentameshError} == {PentameshError}
    assert {c.__name__ for c in classes} | {"Problem", "reason", "unexpected"} == set(errors.__all__)


def test_all_problems_are_read_at_once() -> None:
    error = InputError(
        Problem("tensor = 16 does not divide kv_heads = 8", "job.yaml:14 layout.tensor", "use tensor = 8, 4, 2 or 1"), Problem("no rows")
    )
    assert str(error) == (
        "error: tensor = 16 does not divide kv_heads = 8\n  where  job.yaml:14 layout.tensor\nhint: use tensor = 8, 4, 2 or 1\nerror: no rows"
    )


@pytest.mark.parametrize("kind", [InputError, DoesNotFit, Drift, RunFailed])
def test_a_sentence_is_a_problem_and_survives_a_process_boundary(kind: type[PentameshError]) -> None:
    error = kind("rank 3 stopped", where="step 7", hint="start it again")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert again.problems == error.problems == (Problem("rank 3 stopped", "step 7", "start it again"),)
