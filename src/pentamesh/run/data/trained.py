"""Trained: which turns of a conversation are, by what the job asks of all rows and what a row says of its own turns."""

from __future__ import annotations

from itertools import dropwhile

from pentamesh.errors import Problem
from pentamesh.job.job import Data
from pentamesh.run.data.turns import Conversation, Turn

__all__ = ["conversation"]


def conversation(turns: list[Turn], data: Data, where: str, num_given: int = 0) -> Conversation | list[Problem]:
    """The turns as a conversation, of which the first `num_given` are read and not trained; none is trained where its row says so of all.

    A problem, where no turn is of a role that is trained.
    """
    turns, num_given = _told(turns, data.system, num_given)
    roles = [turn.message["role"] for turn in turns]
    asked = [i for i, role in enumerate(roles) if i >= num_given and role in data.train_on]
    if not asked and not any(turn.train for turn in turns):
        what = f"no {' or '.join(data.train_on)} turn: nothing to train"
        return [
            Problem(what, where, "take the row out, or give it an answer" if data.train_on == ("assistant",) else "data.train_on names these roles")
        ]
    chosen = asked[-1:] if data.turns == "last" else asked
    trained = tuple(i for i, turn in enumerate(turns) if (i in chosen if turn.train is None else turn.train))
    return Conversation([turn.message for turn in turns], trained)


def _told(turns: list[Turn], system: str | None, num_given: int) -> tuple[list[Turn], int]:
    """The turns behind the system turn of the job, where it has one, and how many of them are given."""
    if system is None:
        return turns, num_given
    rest = list(dropwhile(lambda turn: turn.message["role"] == "system", turns))
    return [Turn({"role": "system", "content": system}), *rest], num_given and max(1, num_given + 1 - len(turns) + len(rest))
