"""Routers: which experts each token meets, and by what weight - one way for every described family, as its `model.spec.Experts` says.

What the modules of transformers give is given here, and less is kept for backward. What a block chose stays chosen when backward computes it again:
another choice, for rounding's sake, would be of other rows than those that wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from pentamesh.model.spec import Experts, ModelSpec
from pentamesh.run.balance import counted, sloped
from pentamesh.run.shown import class_with

__all__ = ["Choices", "route_by", "routers"]

# Keeps a sum of scores that all but vanish from dividing by zero. Source: transformers, DeepseekV3TopkRouter.
LEAST = 1e-20

# The experts that tokens chose, and what an auxiliary loss makes of that: as `balance.counted` gives it.
Choice = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def route_by(built: nn.Module, model: ModelSpec) -> None:
    """Let the routers of every sparse layer choose as `model.experts` says."""
    for tensor in model.tensors:
        if tensor.kind == "matmul" and tensor.dims[0].name == "choices":
            router: Any = built.get_submodule(tensor.name.rpartition(".")[0])
            router.__class__ = class_with(type(router), (("forward", _route),))
            router.rule = model.experts


def routers(built: nn.Module) -> list[Any]:
    """The routers of a model that choose as we say, in order."""
    return [module for module in built.modules() if hasattr(module, "rule")]


def _route(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, and of the chosen experts weights and indices. Shapes: hidden [..., hidden]; logits [tokens, experts], the others [tokens, k]."""
    rule: Experts = module.rule
    hidden = hidden.reshape(-1, hidden.shape[-1])
    bias = getattr(module, "bias", None)
    logits = _WideLinear.apply(hidden, module.weight) if rule.wide else linear(hidden, module.weight, bias)
    wide = torch.promote_types(logits.dtype, torch.float32)
    scores = _scores(logits.to(wide), rule)
    index, samples, slope = _kept(lambda: _met(module, scores))
    if _slopes(module):
        scores = sloped(scores, _shares(scores, rule), samples, slope)
    weights = scores.gather(1, index)
    if rule.scores == "softmax of chosen":
        weights = weights.softmax(-1)
    if rule.normed:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST)
    return logits, weights * rule.scale if rule.scale != 1 else weights, index


def _scores(logits: torch.Tensor, rule: Experts) -> torch.Tensor:
    return {"softmax": lambda: logits.softmax(-1), "sigmoid": logits.sigmoid, "softmax of chosen": lambda: logits}[rule.scores]()


def _shares(scores: torch.Tensor, rule: Experts) -> torch.Tensor:
    """What an auxiliary loss sees of scores: for each token numbers that add up to one. Source: arXiv 2412.19437, equation 19, for sigmoids."""
    if rule.scores == "sigmoid":
        return scores / (scores.sum(-1, keepdim=True) + LEAST)
    return scores if rule.scores == "softmax" else scores.softmax(-1)


@torch.no_grad()
def _met(module: Any, scores: torch.Tensor) -> Choice:
    """The chosen experts, which are counted where somebody asks."""
    rule: Experts = module.rule
    index = _chosen(scores, getattr(module, "e_score_correction_bias", None), rule)
    if not hasattr(module, "at"):
        return index, index.new_empty(0), scores.new_empty(0, rule.count)  # not parts of them, which would keep all
    return counted(index, _shares(scores, rule) if _slopes(module) else scores, module.at, _slopes(module))


def _slopes(module: Any) -> bool:
    """Whether an auxiliary loss is on."""
    return getattr(module, "slopes", False)


def _chosen(scores: torch.Tensor, bias: torch.Tensor | None, rule: Experts) -> torch.Tensor:
    """The best experts of each token, in the best groups where these are chosen first."""
    scores = scores if bias is None else scores + bias
    if rule.groups > 1:
        groups = scores.unflatten(1, (rule.groups, -1))
        best = groups.amax(-1) if rule.group_by == "best" else groups.topk(2, -1).values.sum(-1)
        met = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(rule.groups_met, -1).indices, True)
        scores = groups.masked_fill(~met.unsqueeze(-1), -torch.inf).flatten(1)
    return scores.topk(rule.per_token, -1).indices


class _WideLinear(torch.autograd.Function):
    """hidden @ weight.T in float32 (float64 for a float64 model), of which only what it reads is kept, as narrow as it is."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return hidden.to(wide) @ weight.to(wide).T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight = ctx.saved_tensors
        of_hidden = (gradient @ weight.to(gradient.dtype)).to(hidden.dtype) if ctx.needs_input_grad[0] else None
        of_weight = (gradient.T @ hidden.to(gradient.dtype)).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return of_hidden, of_weight


# Choices that stay


@dataclass
class Choices:
    """What the routers of one block chose in its forward pass, for when backward computes it again."""

    made: list[Choice] = field(default_factory=list)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around the forward pass: every choice is noted."""

        def note(choose: Choose) -> Choice:
            self.made.append(choose())
            return self.made[-1]

        with _noting(note):
            yield

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Around the repetition: every choice is the one that was noted."""
        noted = iter(self.made)
        with _noting(lambda _: next(noted)):
            yield


Choose = Callable[[], Choice]
Note = Callable[[Choose], Choice]
_NOTE: ContextVar[Note | None] = ContextVar("note", default=None)


@contextmanager
def _noting(note: Note) -> Iterator[None]:
    token = _NOTE.set(note)
    try:
        yield
    finally:
        _NOTE.reset(token)


def _kept(choose: Choose) -> Choice:
    note = _NOTE.get()
    return choose() if note is None else note(choose)
