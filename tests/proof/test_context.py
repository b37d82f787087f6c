"""Context parallel in its three ways beside every data strategy and tensor parallel: the numbers of one process, the predicted collectives, the boxes
of `split`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from pentamesh.job.division import ContextWay
from pentamesh.layout.mesh import Mesh, Shard
from pentamesh.run.verify import Trial, errors, fake_outcome, outcome
from pentamesh.run.worlds import run_world
from tests.proof.test_frozen import FROZEN
from tests.proof.toys import MANY_HEADS, TOYS, ZERO, agree, alone, check_ledgers, check_rounding, reduced, trial_on

# What attention moves over context ranks, forward.
KINDS: dict[ContextWay, str] = {"ring": "send", "all_gather": "all_gather", "ulysses": "all_to_all"}
MESHES: dict[str, tuple[Mesh, Shard, bool, dict[str, Any]]] = {
    "cp2": (Mesh(cp=2), "none", False, {}),
    "cp4": (Mesh(cp=4), "none", False, {}),
    "cp2 alone, sharded": (Mesh(cp=2), "parameters", False, {}),
    "cp2 x tp2": (Mesh(cp=2, tp=2), "none", False, {}),
    "cp2 x tp2, sequence": (Mesh(cp=2, tp=2), "none", True, {}),
    "ddp2 x cp2": (Mesh(dp_replicate=2, cp=2), "none", False, {}),
    "zero1 2 x cp2": (Mesh(dp_shard=2, cp=2), "optimizer", False, ZERO["zero1"]),
    "zero2 2 x cp2": (Mesh(dp_shard=2, cp=2), "gradients", False, ZERO["zero2"]),
    "full shard 2 x cp2": (Mesh(dp_shard=2, cp=2), "parameters", False, {"reduce": "each"}),
    "full shard 2 x cp2 x tp2, sequence": (Mesh(dp_shard=2, cp=2, tp=2), "parameters", True, {}),
    "hybrid 2 x 2 x cp2": (Mesh(dp_replicate=2, dp_shard=2, cp=2), "parameters", False, {"reduce": "node"}),
}
EVERYWHERE = ("cp2", "full shard 2 x cp2", "cp2 x tp2, sequence")
FAMILIES = ("llama", "llama-untied", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "glm4", "gpt2")


class Case(NamedTuple):
    """A toy on a mesh, how its attention crosses context ranks, what the policy adds, how many samples a row holds, and what is frozen."""

    toy: str
    how: ContextWay
    mesh: str
    policy: tuple[tuple[str, Any], ...] = ()
    in_a_row: int = 1
    freeze: str = ""

    @property
    def trial(self) -> Trial:
        mesh, shard, sequence, policy = MESHES[self.mesh]
        found = trial_on(self.config, mesh, shard, sequence, self.how, **policy, **dict(self.policy))
        frozen = FROZEN[self.freeze] if self.freeze else ()
        return replace(found, in_a_row=self.in_a_row, longest=24 if self.in_a_row == 1 else 16, freeze=frozen)

    @property
    def config(self) -> dict[str, Any]:
        """With as many key heads as Ulysses exchanges over."""
        config, mesh = TOYS[self.toy], MESHES[self.mesh][0]
        few = self.how == "ulysses" and mesh.cp * mesh.tp > 2 and self.toy != "gpt2"
        return config | {"num_key_value_heads": 4} if few else config

    def __str__(self) -> str:
        added = [str(value) for _, value in self.policy] + ["packed"] * (self.in_a_row > 1) + [self.freeze] * bool(self.freeze)
        return ", ".join([self.toy, self.how, self.mesh, *added])


def check(wanted: Trial, record_proof: Any, title: str) -> None:
    outcomes = run_world(outcome, wanted.layout.mesh.num_ranks, wanted)
    agree(outcomes)
    worst = errors(outcomes[0], alone(wanted))
    assert max(worst.values()) < 1e-10, worst
    compared = check_ledgers(wanted, range(wanted.layout.mesh.num_ranks), outcomes)
    assert (KINDS[wanted.layout.context], "forward") in {(row.kind, row.phase) for row in outcomes[0].ledger if row.axes == ("cp",)}
    record_proof(title, runs=1, collectives=compared, worst_relative_error=max(worst.values()))


CASES = [Case("llama", how, mesh) for how in KINDS for mesh in MESHES]
CASES += [Case("llama", how, mesh, (("recompute", again),)) for how in KINDS for mesh in EVERYWHERE for again in ("selective", "full")]
OTHERS = [Case(toy, how, mesh) for toy in FAMILIES[1:] for how in KINDS for mesh in EVERYWHERE if (toy, mesh) != ("gpt2", "cp2 x tp2, sequence")]
OTHERS += [Case("one key head", how, mesh) for how in ("ring", "all_gather") for mesh in EVERYWHERE]
OTHERS += [Case("gemma2", how, mesh, (("recompute", again),)) for how in KINDS for mesh in EVERYWHERE for again in ("selective", "full")]
PACKED = [Case(toy, how, mesh, in_a_row=3) for toy in ("llama", "gemma3") for how in KINDS for mesh in MESHES]
PACKED += [Case(toy, how, "full shard 2 x cp2", in_a_row=3) for toy in FAMILIES if toy not in ("llama", "gemma3") for how in KINDS]


def kept(case: Case) -> bool:
    """A ring on every mesh and strategy, every way on a few, and recomputed both ways once each; of the other families a way and a mesh each."""
    ways, where = list(KINDS), list(EVERYWHERE)
    if case.in_a_row > 1:
        return (case.toy == "gemma3" and case.mesh == "cp2 x tp2, sequence") or (case.toy == "llama" and case.mesh in ("cp4", "full shard 2 x cp2"))
    if case.policy:
        return case.toy == "llama" and (case.mesh, case.policy[0][1]) in (("cp2", "selective"), ("full shard 2 x cp2", "full"))
    if case.toy == "llama":
        return case.how == "ring" or case.mesh in (*EVERYWHERE, "cp4")
    number = [*FAMILIES, "one key head"].index(case.toy)
    return (case.how, case.mesh) == (ways[number % 3], where[number // 3 % 3])


@pytest.mark.parametrize("case", reduced([*CASES, *OTHERS], kept), ids=str)
def test_on_gloo(case: Case, record_proof) -> None:
    check(case.trial, record_proof, "context parallel equal to one process, float64")


@pytest.mark.parametrize("case", reduced(PACKED, kept), ids=str)
def test_packed(case: Case, record_proof) -> None:
    """Samples of uneven length, which begin and end anywhere on the ranks, give what rows of their own give on one process."""
    check(case.trial, record_proof, "packed rows over context ranks equal to rows of their own, float64")


CHOICES = ("attention below, and more", "up to one projection", "all but the last block", "all but the head", "the embedding")
PARTLY = [
    Case("llama-untied", how, mesh, (("recompute", again),), freeze=choice)
    for choice in CHOICES
    for how in KINDS
    for mesh in ("cp2", "cp2 alone, sharded")
    for again in ("none", "selective", "full")
]


def kept_frozen(case: Case) -> bool:
    return case.freeze in CHOICES[:2] and (case.mesh, dict(case.policy)["recompute"]) in (("cp2", "full"), ("cp2 alone, sharded", "none"))


@pytest.mark.parametrize("case", reduced(PARTLY, kept_frozen), ids=str)
def test_frozen(case: Case, record_proof) -> None:
    """Where no gradient goes back through attention nothing of it is passed on again."""
    check(case.trial, record_proof, "frozen over context ranks equal to one process, float64")


@pytest.mark.parametrize("how", KINDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_precisions(precision: str, how: ContextWay) -> None:
    check_rounding(replace(Case("llama", how, "full shard 2 x cp2").trial, precision=precision))


LARGE = [
    (Mesh(dp_shard=4, cp=4), "parameters", False, range(16)),
    (Mesh(dp_shard=2, cp=4, tp=2), "optimizer", True, (0, 7, 9, 15)),
    (Mesh(dp_replicate=2, dp_shard=4, cp=4, tp=2), "parameters", True, (0, 9, 37, 63)),
    (Mesh(dp_shard=3, cp=2), "parameters", False, range(6)),
]


@pytest.mark.parametrize("case", LARGE, ids=lambda c: f"{c[0]}, {c[1]}")
@pytest.mark.parametrize("how", KINDS)
@pytest.mark.parametrize("toy", reduced(["llama", "qwen3", "gemma3", "phi3"], lambda toy: toy == "llama"))
def test_on_fake_groups(toy: str, how: ContextWay, case: tuple[Mesh, Shard, bool, Sequence[int]], record_proof) -> None:
    """Every rank of a ring, or some of all; otherwise the first, one in the middle and the last, whose parts of an uneven cut are the smallest."""
    mesh, shard, sequence, ranks = case
    ranks = ranks if (toy, how) == ("llama", "ring") else (0, mesh.num_ranks // 2, mesh.num_ranks - 1)
    own = ZERO["zero1"] if shard == "optimizer" else {}
    # Of rows this long every rank has tokens to train on: peers are made up, and so are no counts of theirs.
    wanted = replace(trial_on(TOYS[toy] | MANY_HEADS, mesh, shard, sequence, how, **own), num_steps=2, longest=64)
    outcomes = [run_world(fake_outcome, 1, wanted, rank)[0] for rank in ranks]
    compared = check_ledgers(wanted, ranks, outcomes)
    tensors = sum(found.num_tensors_checked for found in outcomes)
    record_proof("split and moves of sharding x context on fake groups", tensors=tensors, ranks=len(ranks), layouts=1, collectives=compared)
