"""What keeps experts' loads even does the same on any layout: losses, gradients and biases of one process, by the predicted collectives.

An auxiliary loss is large here, half of it on top of the loss: what it adds would be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from pentamesh.layout.mesh import DATA_AXES, Mesh, Shard
from pentamesh.model.spec import Experts
from pentamesh.run import balance, router
from pentamesh.run.verify import Outcome, Trial, errors, outcome
from pentamesh.run.worlds import run_world
from tests.proof.toys import TOYS, agree, alone, check_ledgers, reduced, trial_on

EXACT = 1e-10


def case(toy: str, mesh: Mesh, shard: Shard = "parameters", sequence: bool = False, in_a_row: int = 1, **policy: Any) -> Trial:
    chosen = {"grad_accum": 2, "balance": "loss", "balance_by": 0.5} | policy
    wanted = trial_on(TOYS[toy], mesh, shard, sequence, **chosen)
    return replace(wanted, in_a_row=in_a_row, global_batch=2 * chosen["grad_accum"] * mesh.degree(*DATA_AXES))


BIAS: dict[str, Any] = {"balance": "bias", "balance_by": 0.01}
CASES = {
    "dp2": case("mixtral", Mesh(dp_replicate=2), "none"),
    "dp2, no accumulation": case("mixtral", Mesh(dp_replicate=2), "none", grad_accum=1),
    "dp2, accumulation of 4": case("qwen3-moe", Mesh(dp_shard=2), grad_accum=4),
    "ep2": case("mixtral", Mesh(dp_shard=2, ep=2)),
    "ep2, packed": case("qwen3-moe", Mesh(dp_shard=2, ep=2), in_a_row=3, recompute="selective"),
    "cp2 ring": case("mixtral", Mesh(cp=2), "none"),
    "cp2 ring, packed": case("deepseek-v2", Mesh(cp=2), in_a_row=3, recompute="full"),
    "tp2+sp": case("deepseek-v3", Mesh(tp=2), "none", sequence=True),
    "tp2+sp, packed": case("qwen3-moe", Mesh(tp=2), "none", sequence=True, in_a_row=2, recompute="full"),
    "cp2 x tp2+sp, ep4, packed": case("gpt-oss", Mesh(cp=2, tp=2, ep=4), sequence=True, in_a_row=3),
    "hybrid 2 x 2, ep2": case("mixtral", Mesh(dp_replicate=2, dp_shard=2, ep=2)),
    "bias, ep2": case("deepseek-v3", Mesh(dp_shard=2, ep=2), **BIAS),
    "bias, dp2": case("deepseek-v3", Mesh(dp_replicate=2), "none", **BIAS),
    "bias, cp2 x tp2+sp, packed": case("deepseek-v3", Mesh(cp=2, tp=2), sequence=True, in_a_row=3, recompute="full", **BIAS),
    "bias, dp2 x cp2, ep2": case("deepseek-v3", Mesh(dp_shard=2, cp=2, ep=2), recompute="selective", **BIAS),
}
OFTEN = ("dp2", "ep2, packed", "cp2 ring, packed", "cp2 x tp2+sp, ep4, packed", "bias, cp2 x tp2+sp, packed", "bias, dp2 x cp2, ep2")


@pytest.mark.parametrize("name", reduced(CASES, lambda name: name in OFTEN))
def test_any_layout_evens_out_as_one_process_does(name: str, record_proof) -> None:
    wanted = CASES[name]
    outcomes, one = run_world(outcome, wanted.layout.mesh.num_ranks, wanted), alone(wanted)
    agree(outcomes)
    check(wanted, outcomes, one)
    compared = check_ledgers(wanted, range(len(outcomes)), outcomes)
    worst = max(errors(outcomes[0], one).values())
    record_proof("experts evened out on any layout", collectives=compared, worst_relative_gradient_error=worst)


def check(wanted: Trial, outcomes: list[Outcome], one: Outcome) -> None:
    """Everything as on one process; biases, which are whole steps up and down, to the last bit; and what is told of loads."""
    found = errors(outcomes[0], one)
    assert max(found.values()) < EXACT, found
    for buffer in wanted.model.buffers:
        mine, theirs = (outcome.parameters[buffer.name] for outcome in (outcomes[0], one))
        assert (mine == theirs).all()
        assert bool(theirs.any()) == (wanted.policy.balance == "bias")
    for rank in outcomes:
        for mine, theirs in zip(rank.loads, one.loads, strict=True):
            assert mine is not None
            assert theirs is not None
            assert mine.row() == pytest.approx(theirs.row(), rel=EXACT)


# Experts that nobody chooses, and one that all choose: ranks without a row, on which every collective has to be made all the same.


def only(*few: int) -> None:
    """In this process, which ends with its trial: every token chooses these experts."""

    def chosen(scores: torch.Tensor, _bias: object, rule: Experts) -> torch.Tensor:
        assert len(few) == rule.per_token
        return torch.tensor(few).expand(len(scores), -1).contiguous()

    router._chosen = chosen


def forced(wanted: Trial, few: tuple[int, ...]) -> Outcome:
    only(*few)
    return outcome(wanted)


IDLE = {
    "ep2, one rank has all": (case("mixtral", Mesh(dp_shard=2, ep=2), recompute="full"), (0, 3)),
    "ep2, the other": (case("mixtral", Mesh(dp_shard=2, ep=2)), (7, 4)),
    "ep4, one rank has all": (case("mixtral", Mesh(dp_shard=4, ep=4), recompute="selective"), (2, 3)),
    "ep4, two ranks have some": (case("qwen3-moe", Mesh(dp_shard=4, ep=4)), (0, 6, 7)),
    "ep4, biases": (case("deepseek-v3", Mesh(dp_shard=2, cp=2, ep=4), **BIAS), (4, 5, 1)),
}


@pytest.mark.parametrize("name", reduced(IDLE, lambda name: name in ("ep2, one rank has all", "ep4, one rank has all", "ep4, biases")))
def test_ranks_whose_experts_nobody_chooses(name: str, record_proof) -> None:
    wanted, few = IDLE[name]
    outcomes = run_world(forced, wanted.layout.mesh.num_ranks, wanted, few)
    plain = replace(wanted.alone(), policy=replace(wanted.alone().policy, recompute="none"))
    one = run_world(forced, 1, plain, few)[0]
    agree(outcomes)
    check(wanted, outcomes, one)
    compared = check_ledgers(wanted, range(len(outcomes)), outcomes)
    experts = wanted.model.experts
    assert experts is not None
    assert [loads.idle for loads in one.loads if loads] == [1 - len(few) / experts.count] * 3
    assert [loads.worst for loads in one.loads if loads] == [experts.count / len(few)] * 3
    record_proof("experts evened out on any layout", collectives=compared, worst_relative_gradient_error=max(errors(outcomes[0], one).values()))


# Each rule broken in turn.


def counts_of_its_own_part() -> None:
    own = balance.row_axes
    balance.row_axes = lambda layout: () if own(layout) else own(layout)


def weighs_by_its_own_tokens() -> None:
    own = balance.Balance.counting

    def counting(self: Any, micro: Any, factor: float) -> Any:
        self.begin(micro.num_tokens)
        return own(self, micro, factor)

    balance.Balance.counting = counting


def samples_are_rows() -> None:
    """What stands in a row is one sample."""
    own = balance._samples

    def joined(micro: Any, world: Any) -> Any:
        rows = torch.arange(len(micro.samples)).unsqueeze(1)
        found = torch.where(micro.samples < len(micro.sizes), rows, len(rows))
        return own(replace(micro, samples=found, sizes=(found < len(rows)).sum(1)), world)

    balance._samples = joined


def padding_counts() -> None:
    own = balance._samples

    def all_of_them(micro: Any, world: Any) -> Any:
        samples, sizes = own(micro, world)
        return samples.clamp(max=len(sizes) - 1), sizes

    balance._samples = all_of_them


def counts_again() -> None:
    """Backward chooses anew, and counts what it chose."""
    router.Choices.repeated = lambda self: router.Choices().kept()


def averaged_by_ddp() -> None:
    own = balance.Balance.counting
    balance.Balance.counting = lambda self, micro, factor: own(self, micro, 1.0)


def moves_by_its_own_tokens() -> None:
    balance.load_axes = lambda _: ()


def shares_are_scores() -> None:
    router._shares = lambda scores, _: scores


def biases_stay() -> None:
    balance.Balance.move = lambda self: None


DP, TP, CP = Mesh(dp_shard=2), Mesh(tp=2), Mesh(cp=2)
MUTATIONS: dict[str, tuple[Callable[[], None], str, Trial]] = {
    "context ranks count their own part of a sample": (counts_of_its_own_part, "gradient", case("mixtral", CP)),
    "tensor ranks do": (counts_of_its_own_part, "gradient", case("qwen3-moe", TP, sequence=True)),
    "samples weigh by the tokens of a micro-batch": (weighs_by_its_own_tokens, "gradient", case("mixtral", DP)),
    "samples of a row are one": (samples_are_rows, "gradient", case("mixtral", DP, in_a_row=3)),
    "what pads rows counts": (padding_counts, "gradient", case("mixtral", DP)),
    "DDP averages what is added": (averaged_by_ddp, "gradient", case("mixtral", Mesh(dp_replicate=2), "none")),
    "sigmoids are shares as they are": (shares_are_scores, "gradient", case("deepseek-v3", DP)),
    "what is computed again counts again": (counts_again, "aux loss", case("mixtral", DP, recompute="full")),
    "biases follow a rank's own tokens": (moves_by_its_own_tokens, "parameter", case("deepseek-v3", DP, **BIAS)),
    "biases stay": (biases_stay, "parameter", case("deepseek-v3", DP, **BIAS)),
}


def mutated(name: str) -> Outcome:
    breaks, _, wanted = MUTATIONS[name]
    breaks()
    return outcome(wanted)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_rule_is_seen(name: str, record_proof) -> None:
    _, shows_in, wanted = MUTATIONS[name]
    found, one = run_world(mutated, wanted.layout.mesh.num_ranks, name)[0], alone(wanted)
    seen = errors(found, one)
    for mine, theirs in zip(found.loads, one.loads, strict=True):
        if mine and theirs and mine.aux_loss and theirs.aux_loss:
            seen["aux loss"] = max(seen.get("aux loss", 0.0), abs(mine.aux_loss - theirs.aux_loss))
    assert seen[shows_in] > 1e-4, seen
    record_proof("rules broken and seen", mutations=1)
