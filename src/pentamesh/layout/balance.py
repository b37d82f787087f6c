"""`balance`: what keeps the loads of a model's experts even, of what a job asks and what its config.json says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pentamesh.errors import Problem
from pentamesh.job.job import ExpertsRequest
from pentamesh.model.spec import ModelSpec

__all__ = ["balance", "unbalanced"]

# Where config.json does not say what the auxiliary loss weighs, or says nothing. Source: transformers, MixtralConfig and its kin.
LOSS_WEIGHT = 0.001


def balance(asked: ExpertsRequest, model: ModelSpec) -> tuple[Literal["none", "loss", "bias"], float]:
    """How, and what the loss weighs or how far a bias moves: `layout.policy.Policy.balance` and `balance_by`."""
    how, weight = asked.balance, _weight_of(model)
    if how == "auto":
        adds = model.experts is not None and model.config.get("output_router_logits") is True and (asked.loss_weight or weight)
        how = "loss" if adds else "none"
    by = {"none": 0.0, "loss": asked.loss_weight or weight or LOSS_WEIGHT, "bias": asked.bias_step}
    return how, by[how]


def _weight_of(model: ModelSpec) -> float:
    """What transformers lets the loss weigh: 0 where it adds none, and of a model whose config.json nobody has looked through."""
    said = model.config.get("router_aux_loss_coef") if model.experts is not None else 0
    return LOSS_WEIGHT if said is None else float(said)


def unbalanced(asked: ExpertsRequest, model: ModelSpec) -> Iterator[Problem]:
    """Everything that keeps a model's experts from being kept even as a job asks."""
    how, _ = balance(asked, model)
    if model.experts is None:
        lacks = f"{model.name} has no experts" if model.is_described else f"nobody has described what experts {model.name} has"
        for key, said in (("balance", how if how != "none" else None), ("loss_weight", asked.loss_weight)):
            if said is not None:
                yield Problem(f"{key} = {said}, but {lacks}", f"experts.{key}", "leave the section `experts` out")
        return
    if how == "bias" and not model.experts.biased:
        what = f"balance = bias, and the files of {model.name} ({model.family}) have no place for a bias that enters the choice of experts alone"
        yield Problem(what, "experts.balance", "use balance: loss; models of the family deepseek_v3 have one")
    if asked.loss_weight is not None and asked.balance == "auto" and how == "none":
        what = f"loss_weight = {asked.loss_weight:g}, and the config.json of {model.name} does not say output_router_logits: no loss is added"
        yield Problem(what, "experts.loss_weight", "add experts.balance: loss, or leave loss_weight out")
