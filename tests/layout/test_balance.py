"""What keeps experts even: the job's word, else the config's; what a model has no place for is refused with its name, all of it at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pentamesh.errors import InputError
from pentamesh.job.hardware import read_hardware
from pentamesh.job.job import ExpertsRequest, Job
from pentamesh.layout.balance import balance, unbalanced
from pentamesh.model.families import describe
from pentamesh.model.spec import ModelSpec
from pentamesh.plan.search import plan
from tests.proof.toys import TOYS

ASKS = {"output_router_logits": True}


def model_of(toy: str, **config: Any) -> ModelSpec:
    model = describe(TOYS[toy] | config, toy)
    assert model is not None
    return model


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, float]]] = {
    "nobody asks": ({}, {}, ("none", 0.0)),
    "a weight alone asks for nothing": ({"router_aux_loss_coef": 0.02}, {}, ("none", 0.0)),
    "the config asks": (ASKS | {"router_aux_loss_coef": 0.02}, {}, ("loss", 0.02)),
    "the config asks and says no weight": (ASKS, {}, ("loss", 0.001)),
    "the config asks and says null": (ASKS | {"router_aux_loss_coef": None}, {}, ("loss", 0.001)),
    "a loss that weighs nothing is none": (ASKS | {"router_aux_loss_coef": 0.0}, {}, ("none", 0.0)),
    "the job asks for what the config weighs nothing": ({"router_aux_loss_coef": 0}, {"balance": "loss"}, ("loss", 0.001)),
    "the job weighs what the config does not": (ASKS | {"router_aux_loss_coef": 0}, {"loss_weight": 0.5}, ("loss", 0.5)),
    "the job's weight goes before": (ASKS | {"router_aux_loss_coef": 0.02}, {"loss_weight": 0.5}, ("loss", 0.5)),
    "the job asks": ({"router_aux_loss_coef": 0.02}, {"balance": "loss"}, ("loss", 0.02)),
    "the job forbids": (ASKS, {"balance": "none"}, ("none", 0.0)),
    "biases": ({}, {"balance": "bias"}, ("bias", 0.001)),
    "biases, their step": (ASKS, {"balance": "bias", "bias_step": 0.01}, ("bias", 0.01)),
}


@pytest.mark.parametrize("name", CASES)
def test_what_keeps_loads_even(name: str) -> None:
    config, asked, wanted = CASES[name]
    assert balance(ExpertsRequest(**asked), model_of("deepseek-v3", **config)) == wanted


def test_a_dense_model_is_asked_nothing() -> None:
    for config in (ASKS, {"router_aux_loss_coef": "x"}):
        assert balance(ExpertsRequest(), model_of("llama", **config)) == ("none", 0.0)
    assert not list(unbalanced(ExpertsRequest(), model_of("llama", **ASKS)))


def test_what_a_dense_model_says_of_its_loss_is_not_read() -> None:
    said = model_of("llama", router_aux_loss_coef="a")
    assert balance(ExpertsRequest(), said) == ("none", 0.0)
    assert [problem.what for problem in unbalanced(ExpertsRequest(balance="loss"), said)] == ["balance = loss, but llama has no experts"]


REFUSED: dict[str, tuple[str, dict[str, Any], list[tuple[str, str, str]]]] = {
    "no experts": (
        "llama",
        {"balance": "loss", "loss_weight": 0.1},
        [
            ("balance = loss, but llama has no experts", "experts.balance", "leave the section `experts` out"),
            ("loss_weight = 0.1, but llama has no experts", "experts.loss_weight", "leave the section `experts` out"),
        ],
    ),
    "no place for a bias": (
        "mixtral",
        {"balance": "bias"},
        [
            (
                "balance = bias, and the files of mixtral (mixtral) have no place for a bias that enters the choice of experts alone",
                "experts.balance",
                "use balance: loss; models of the family deepseek_v3 have one",
            )
        ],
    ),
    "a weight, and the config asks for no loss": (
        "mixtral",
        {"loss_weight": 0.1},
        [
            (
                "loss_weight = 0.1, and the config.json of mixtral does not say output_router_logits: no loss is added",
                "experts.loss_weight",
                "add experts.balance: loss, or leave loss_weight out",
            )
        ],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_model_cannot_is_refused(name: str) -> None:
    toy, asked, wanted = REFUSED[name]
    found = list(unbalanced(ExpertsRequest(**asked), model_of(toy)))
    assert [(p.what, p.where, p.hint) for p in found] == wanted


def test_experts_nobody_described_are_not_kept_even() -> None:
    unknown = replace(model_of("mixtral"), family="generic", experts=None)
    (found,) = unbalanced(ExpertsRequest(balance="loss"), unknown)
    assert found.what == "balance = loss, but nobody has described what experts mixtral has"


def planned(toy: str, config: dict[str, Any] | None = None, **asked: Any) -> Any:
    job = Job.model_validate({"model": {"name": toy}, "batch": {"global_batch": 6, "seq_len": 64}, "precision": "fp32"} | asked)
    return plan(job, model_of(toy, **config or {}), read_hardware("2xCPU"))


def test_a_plan_says_how() -> None:
    """In its policy, and as the last but one of its reasons; the layout's faults stand beside the balance's."""
    losing, still = planned("mixtral", ASKS), planned("mixtral")
    assert (losing.policy.balance, losing.policy.balance_by) == ("loss", 0.001)
    assert "an auxiliary loss of weight 0.001 keeps the loads of experts even" in losing.reasons
    assert "nothing keeps the loads of experts even (experts.balance)" in still.reasons
    assert losing.fingerprint != still.fingerprint
    moving = planned("deepseek-v3", experts={"balance": "bias", "bias_step": 0.01})
    assert "biases that move 0.01 a step keep the loads of experts even" in moving.reasons
    with pytest.raises(InputError) as caught:
        planned("mixtral", experts={"balance": "bias"}, batch={"global_batch": 3, "seq_len": 64})
    assert [problem.where for problem in caught.value.problems] == ["batch.global_batch", "experts.balance"]
