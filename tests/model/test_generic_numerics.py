"""A model of no described family trains on the data axes as on one process: float64, 1e-10, and by the predicted collectives."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest

from pentamesh.layout.policy import Policy
from pentamesh.model.facts import read_facts
from pentamesh.model.families import generic
from pentamesh.model.frozen import frozen
from pentamesh.model.spec import ModelSpec
from pentamesh.run.ledger import differences
from pentamesh.run.trace import traced
from pentamesh.run.verify import Trial, compare, outcome, predicted_ledger
from pentamesh.run.worlds import run_world
from tests.model.undescribed import TOYS
from tests.proof.toys import layout


@dataclass(frozen=True)
class Undescribed(Trial):
    """A trial of a model that is known by its facts alone."""

    @property
    def model(self) -> ModelSpec:
        return frozen(generic.describe(read_facts(json.dumps(traced(self.config)), "toy"), self.config, "toy"), self.freeze)


def trial(toy: str, strategy: str, grad_accum: int) -> Undescribed:
    return Undescribed(TOYS[toy], layout(strategy, 4), Policy(2, grad_accum), global_batch=8 * grad_accum)


CASES = [("olmo3", "ddp", 4), ("olmo3", "full_shard", 4), ("granite", "full_shard", 1), ("glm", "hybrid_shard", 4), ("phi", "ddp", 1)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_float64(case: tuple[str, str, int]) -> None:
    assert not trial(*case).model.untrainable
    errors = compare(trial(*case))
    assert max(errors.values()) < 1e-10, errors


@pytest.mark.parametrize("freeze", [(), ("*embed*", "*.0.*", "*norm*")], ids=["all trained", "lower frozen"])
@pytest.mark.parametrize("toy", ["olmo3", "granite"])
def test_full_shard_moves_what_is_predicted(toy: str, freeze: tuple[str, ...]) -> None:
    wanted = replace(trial(toy, "full_shard", 4), num_steps=4, freeze=freeze)
    for rank, found in enumerate(run_world(outcome, 4, wanted)):
        assert not found.split_errors
        assert not differences(predicted_ledger(wanted, found, rank), found.ledger)
