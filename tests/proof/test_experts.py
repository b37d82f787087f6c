"""Expert parallel beside every strategy and axis, and the families that have experts: the numbers of one process, the predicted collectives, the
boxes of `split`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from pentamesh.job.division import ContextWay
from pentamesh.layout.mesh import Mesh, Shard
from pentamesh.run.verify import Trial, errors, fake_outcome, outcome
from pentamesh.run.worlds import run_world
from tests.proof.toys import TOYS, ZERO, agree, alone, check_ledgers, check_rounding, reduced, trial_on

FAMILIES = ("mixtral", "qwen3-moe", "gpt-oss", "deepseek-v2", "deepseek-v3")
MESHES: dict[str, tuple[Mesh, Shard, bool, dict[str, Any]]] = {
    "ddp 2": (Mesh(dp_replicate=2), "none", False, {}),
    "full shard 2": (Mesh(dp_shard=2), "parameters", False, {"reduce": "each"}),
    "tp2, sequence": (Mesh(tp=2), "none", True, {}),
    "cp2": (Mesh(cp=2), "none", False, {}),
    "full shard 2 x tp2, sequence": (Mesh(dp_shard=2, tp=2), "parameters", True, {}),
    "ep2": (Mesh(dp_shard=2, ep=2), "parameters", False, {}),
    "ep2, zero1": (Mesh(dp_shard=2, ep=2), "optimizer", False, ZERO["zero1"]),
    "ep2, zero2": (Mesh(dp_shard=2, ep=2), "gradients", False, ZERO["zero2"]),
    "ep2 of 4": (Mesh(dp_shard=4, ep=2), "parameters", False, {"reduce": "each"}),
    "ep4": (Mesh(dp_shard=4, ep=4), "parameters", False, {"reshard": False, "keep_gathered": True}),
    "ep2 of 4, zero2": (Mesh(dp_shard=4, ep=2), "gradients", False, ZERO["zero2"]),
    "hybrid 2 x 2, ep2": (Mesh(dp_replicate=2, dp_shard=2, ep=2), "parameters", False, {"reduce": "node"}),
    "hybrid 2 x 4, ep2": (Mesh(dp_replicate=2, dp_shard=4, ep=2), "parameters", False, {"reduce": "node"}),
    "tp2, sequence, ep2": (Mesh(tp=2, ep=2), "parameters", True, {}),
    "dp2 x tp2, sequence, ep2": (Mesh(dp_shard=2, tp=2, ep=2), "parameters", True, {}),
    "dp2 x tp2, sequence, ep4, zero1": (Mesh(dp_shard=2, tp=2, ep=4), "optimizer", True, ZERO["zero1"]),
    "cp2, ep2": (Mesh(cp=2, ep=2), "parameters", False, {}),
    "dp2 x cp2, ep2": (Mesh(dp_shard=2, cp=2, ep=2), "parameters", False, {}),
    "dp2 x cp2 x tp2, sequence, ep4": (Mesh(dp_shard=2, cp=2, tp=2, ep=4), "parameters", True, {}),
}
WITHOUT = ("ddp 2", "full shard 2", "tp2, sequence", "cp2", "full shard 2 x tp2, sequence")
EVERYWHERE = ("ep2", "ep2 of 4", "dp2 x tp2, sequence, ep4, zero1", "dp2 x cp2, ep2", "hybrid 2 x 2, ep2")
# Where gradients end, on the way through a sparse layer or before it.
BELOW = ("*embed_tokens*", "model.layers.[01].*", "model.layers.2.[!m]*")
FROZEN: dict[str, tuple[str, ...]] = {
    "experts": ("*experts*",),
    "routers": ("*mlp.{router}.*",),
    "all below a router": BELOW,
    "all below experts": (*BELOW, "*mlp.{router}.*"),
    "all below one projection": (*BELOW, "*mlp.{router}.*", "*gate_up_proj*"),
    "all below a bias": (*BELOW, "*mlp.{router}.*", "*gate_up_proj*", "*down_proj"),
    "all below shared experts": (*BELOW, "*mlp.{router}.*", "model.layers.2.mlp.experts.*"),
    "all beside experts": (*BELOW, "*shared_experts*"),
}


class Case(NamedTuple):
    """A family on a mesh, what of its blocks is computed again, how many samples a row holds, what is frozen, and how keys travel."""

    toy: str
    mesh: str
    recompute: str = "none"
    in_a_row: int = 1
    freeze: str = ""
    how: ContextWay = "ring"

    @property
    def trial(self) -> Trial:
        mesh, shard, sequence, policy = MESHES[self.mesh]
        found = trial_on(TOYS[self.toy], mesh, shard, sequence, self.how, recompute=self.recompute, **policy)
        router = "router" if self.toy == "gpt-oss" else "gate"
        frozen = tuple(pattern.replace("{router}", router) for pattern in FROZEN[self.freeze]) if self.freeze else ()
        return replace(found, in_a_row=self.in_a_row, longest=24 if self.in_a_row == 1 else 16, freeze=frozen)

    def __str__(self) -> str:
        added = (self.recompute * (self.recompute != "none"), "packed" * (self.in_a_row > 1), self.freeze, self.how * (self.how != "ring"))
        return ", ".join([self.toy, self.mesh, *filter(None, added)])


def check(wanted: Trial, record_proof: Any, title: str) -> None:
    outcomes = run_world(outcome, wanted.layout.mesh.num_ranks, wanted)
    agree(outcomes)
    worst = errors(outcomes[0], alone(wanted))
    assert max(worst.values()) < 1e-10, worst
    compared = check_ledgers(wanted, range(wanted.layout.mesh.num_ranks), outcomes)
    record_proof(title, runs=1, collectives=compared, worst_relative_error=max(worst.values()))


CASES = [Case(toy, mesh) for toy in FAMILIES for mesh in MESHES]
CASES += [Case(toy, mesh, recompute) for toy in FAMILIES for mesh in EVERYWHERE for recompute in ("selective", "full")]
CASES += [Case(toy, "dp2 x cp2, ep2", how=how) for toy in FAMILIES for how in ("all_gather", "ulysses")]
PACKED = [Case(toy, mesh, in_a_row=3) for toy in FAMILIES for mesh in EVERYWHERE]


def kept(case: Case) -> bool:
    """One family on every mesh that parts experts, another recomputed; of the others each with the axes in turn."""
    number = FAMILIES.index(case.toy)
    if case.how != "ring":
        return (case.toy, case.how) in (("gpt-oss", "ulysses"), ("deepseek-v3", "ulysses"), ("deepseek-v2", "all_gather"))
    if case.recompute != "none":
        return (case.toy, case.mesh) in (("deepseek-v3", "dp2 x tp2, sequence, ep4, zero1"), ("gpt-oss", "ep2 of 4"), ("qwen3-moe", "ep2"))
    if case.mesh in WITHOUT:
        return case.mesh == "tp2, sequence" or case.mesh == (*WITHOUT, *WITHOUT)[number]
    alike = ("ep2, zero1", "dp2 x tp2, sequence, ep2", "hybrid 2 x 4, ep2")
    return (case.toy == "mixtral" and case.mesh not in alike) or case.mesh in (
        EVERYWHERE[number % 5],
        EVERYWHERE[(number + 1) % 5],
    )


@pytest.mark.parametrize("case", reduced(CASES, kept), ids=str)
def test_on_gloo(case: Case, record_proof) -> None:
    check(case.trial, record_proof, "expert parallel equal to one process, float64")


@pytest.mark.parametrize("case", reduced(PACKED, lambda case: EVERYWHERE.index(case.mesh) == FAMILIES.index(case.toy)), ids=str)
def test_packed(case: Case, record_proof) -> None:
    check(case.trial, record_proof, "packed rows and parted experts equal to rows of their own, float64")


ONLY = {"all below a bias": ("gpt-oss",), "all below shared experts": ("deepseek-v3",), "all beside experts": ("deepseek-v3",)}
PARTLY = [
    Case(toy, mesh, recompute, freeze=choice)
    for choice in FROZEN
    for toy in (ONLY.get(choice) or ("mixtral", "gpt-oss", "deepseek-v3"))
    for mesh in ("ep2", "dp2 x tp2, sequence, ep4, zero1")
    for recompute in ("none", "selective", "full")
]


def kept_frozen(case: Case) -> bool:
    only = case.freeze in ("all below a bias", "all below shared experts")
    if case.mesh != "ep2":
        # Shared experts read what routed ones read: of a gradient that begins in these they have none.
        return case.toy == "deepseek-v3" and case.freeze in ("all below a router", "all beside experts") and case.recompute == "full"
    return (case.toy == "mixtral" and case.recompute != "selective") or (only and case.recompute == "full")


@pytest.mark.parametrize("case", reduced(PARTLY, kept_frozen), ids=str)
def test_frozen(case: Case, record_proof) -> None:
    """Where no gradient goes back to the stream no row's goes home, and where none goes to a router none of their weights."""
    check(case.trial, record_proof, "frozen beside parted experts equal to one process, float64")


@pytest.mark.parametrize("toy", FAMILIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_precisions(precision: str, toy: str) -> None:
    """In the first step: later ones may choose other experts for rounding's sake."""
    check_rounding(replace(Case(toy, "ep2 of 4").trial, precision=precision, num_steps=1))


LARGE = [
    (Mesh(dp_shard=16, ep=8), "parameters", False, (0, 7, 15)),
    (Mesh(dp_shard=4, cp=2, tp=2, ep=8), "optimizer", True, (0, 7, 9, 15)),
    (Mesh(dp_replicate=2, dp_shard=8, cp=2, tp=2, ep=8), "parameters", True, (0, 9, 37, 63)),
    (Mesh(dp_shard=6, ep=2), "parameters", False, range(6)),
]


@pytest.mark.parametrize("case", LARGE, ids=lambda c: f"{c[0]}, {c[1]}")
@pytest.mark.parametrize("toy", reduced(FAMILIES, lambda toy: toy in ("mixtral", "deepseek-v3")))
def test_on_fake_groups(toy: str, case: tuple[Mesh, Shard, bool, Sequence[int]], record_proof) -> None:
    """Several ranks for one family; for the others the first, one in the middle and the last."""
    mesh, shard, sequence, ranks = case
    ranks = ranks if toy == "mixtral" else (0, mesh.num_ranks // 2, mesh.num_ranks - 1)
    own = ZERO["zero1"] if shard == "optimizer" else {}
    # Of rows this long every rank has tokens to train on: peers are made up, and so are no counts of theirs.
    config = TOYS[toy] | {"moe_intermediate_size" if "moe_intermediate_size" in TOYS[toy] else "intermediate_size": 24}  # which 3 divides too
    wanted = replace(trial_on(config, mesh, shard, sequence, **own), num_steps=2, longest=64)
    outcomes = [run_world(fake_outcome, 1, wanted, rank)[0] for rank in ranks]
    compared = check_ledgers(wanted, ranks, outcomes)
    tensors = sum(found.num_tensors_checked for found in outcomes)
    record_proof("split and moves of parted experts on fake groups", tensors=tensors, ranks=len(ranks), layouts=1, collectives=compared)
