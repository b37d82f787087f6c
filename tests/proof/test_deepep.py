"""Tokens that DeepEP brings meet the same experts: losses and gradients of one process, in float64, through a stand-in that speaks over gloo.

Its own kernels take bf16 and GPUs: what is proved here is what is made of what they give, and in which order each side asks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pentamesh.errors import InputError
from pentamesh.job.job import ExpertsRequest
from pentamesh.layout.mesh import Mesh
from pentamesh.run.deepep import check_deepep
from pentamesh.run.ledger import differences
from pentamesh.run.verify import Outcome, Trial, errors, outcome, predicted_ledger
from pentamesh.run.worlds import run_world
from tests.proof import deep_ep
from tests.proof.test_balance import BIAS, only
from tests.proof.toys import TOYS, agree, alone, reduced, trial_on

EXACT = 1e-10


def case(toy: str, mesh: Mesh, sequence: bool = False, in_a_row: int = 1, **policy: Any) -> Trial:
    return replace(trial_on(TOYS[toy], mesh, "parameters", sequence, dispatch="deepep", **policy), in_a_row=in_a_row)


CASES = {
    "ep2": case("mixtral", Mesh(dp_shard=2, ep=2)),
    "ep2, all computed again": case("qwen3-moe", Mesh(dp_shard=2, ep=2), recompute="full"),
    "ep2, some computed again": case("gpt-oss", Mesh(dp_shard=2, ep=2), recompute="selective", in_a_row=2),
    "ep4, shared experts": case("deepseek-v3", Mesh(dp_shard=2, cp=2, ep=4), recompute="full", **BIAS),
    "ep2 of tp2+sp": case("deepseek-v2", Mesh(dp_shard=2, tp=2, ep=2), sequence=True, balance="loss", balance_by=0.5),
}


def through(wanted: Trial, few: tuple[int, ...] = ()) -> Outcome:
    deep_ep.install()
    if few:
        only(*few)
    return outcome(wanted)


@pytest.mark.parametrize("name", reduced(CASES, lambda name: name in ("ep2, some computed again", "ep4, shared experts")))
def test_experts_are_met_as_by_all_to_alls(name: str, record_proof) -> None:
    wanted = CASES[name]
    outcomes = run_world(through, wanted.layout.mesh.num_ranks, wanted)
    agree(outcomes)
    found = errors(outcomes[0], alone(wanted))
    assert max(found.values()) < EXACT, found
    for rank, one in enumerate(outcomes):
        predicted = predicted_ledger(wanted, one, rank)
        assert not differences(predicted, one.ledger)
        assert not any(row.kind == "all_to_all" for row in predicted)
    record_proof("experts met by DeepEP's stand-in", worst_relative_gradient_error=max(found.values()))


def test_ranks_whose_experts_nobody_chooses() -> None:
    wanted, few = case("mixtral", Mesh(dp_shard=4, ep=4)), (2, 3)
    outcomes = run_world(through, 4, wanted, few)
    agree(outcomes)
    plain = replace(wanted.alone(), policy=replace(wanted.alone().policy, dispatch="all_to_all"))
    found = errors(outcomes[0], run_world(through, 1, plain, few)[0])
    assert max(found.values()) < EXACT, found


def test_what_is_not_installed_is_said() -> None:
    check_deepep(ExpertsRequest(), "job.yaml")
    with pytest.raises(InputError, match="dispatch = deepep, and the package deep_ep is not installed") as caught:
        check_deepep(ExpertsRequest(dispatch="deepep"), "job.yaml")
    assert caught.value.problems[0].where == "job.yaml experts.dispatch"
    assert "experts.dispatch: all_to_all" in caught.value.problems[0].hint
