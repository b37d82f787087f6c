"""AdamW on whatever part of the parameters a rank holds, and the learning rate as a function of the step."""

from __future__ import annotations

import math
from typing import Any

import torch

from pentamesh.job.job import Optimizer
from pentamesh.job.precision import ROUNDED_AT_ONCE, Precision
from pentamesh.layout.rules import on_expert_view
from pentamesh.layout.split import Split, split
from pentamesh.model.roles import Role
from pentamesh.model.spec import ModelSpec
from pentamesh.run.place import local, torch_dtype
from pentamesh.run.rounding import key, noise, places, round_to_bfloat16_
from pentamesh.run.world import World

__all__ = ["STATE_NAMES", "RoundedAdamW", "adamw", "learning_rate", "set_learning_rate"]

MATRICES = ("matmul", "lookup")
STATE_NAMES = ("step", "exp_avg", "exp_avg_sq")
# 2^32 over the golden ratio, odd: the upper half of a product with it depends on all bits of the other factor. Source: Knuth, TAOCP 3, 6.4.
GOLDEN = 0x9E3779B1 - 2**32


def adamw(
    parameters: dict[str, torch.Tensor], model: ModelSpec, wanted: Optimizer, precision: Precision, world: World, seed: int
) -> torch.optim.Optimizer:
    """AdamW with its state allocated from the start, so that memory is whole before the first step and a checkpoint always has a place.

    Matrices decay; norms and biases do not, and what is frozen has no state. Under `bf16-pure` what is written is rounded stochastically, by noise
    that `seed` decides.
    """
    trained = [tensor for tensor in model.parameters if tensor.trained]
    # Experts apart: a fused step takes tensors of one mesh.
    kinds: dict[tuple[bool, bool], list[torch.Tensor]] = {}
    for t in trained:
        kinds.setdefault((t.kind in MATRICES, on_expert_view(t, world.layout)), []).append(parameters[t.name])
    groups = [{"params": held, "weight_decay": wanted.weight_decay if decays else 0.0} for (decays, _), held in sorted(kinds.items(), reverse=True)]
    if precision.stochastic_rounding:
        held = {parameters[tensor.name]: split(tensor, Role.STATE, world.layout) for tensor in trained}
        optimizer = RoundedAdamW(groups, wanted, held, world.rank, seed)
    else:
        optimizer = torch.optim.AdamW(groups, lr=wanted.lr, betas=wanted.betas, eps=wanted.eps, fused=True)
    dtype = torch_dtype(precision.state)
    for parameter in (parameters[tensor.name] for tensor in trained):
        step = torch.zeros((), dtype=torch.float32, device="cpu" if precision.stochastic_rounding else parameter.device)
        moments = {name: torch.zeros_like(parameter, dtype=dtype, requires_grad=False) for name in STATE_NAMES[1:]}
        optimizer.state[parameter] = {"step": step, **moments}
    return optimizer


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW over bfloat16 weights and moments: computed in float32, a piece at a time, and each of the three rounded stochastically.

    Rounded to the nearest, a weight would lose every update below 1/512 of itself, and a second moment that decays by a thousandth a step would
    never come down. Source: Ozkara et al. (arXiv 2502.20566).
    """

    def __init__(self, groups: list[dict[str, Any]], wanted: Optimizer, held: dict[torch.Tensor, Split], rank: int, seed: int) -> None:
        super().__init__(groups, {"lr": wanted.lr, "betas": wanted.betas, "eps": wanted.eps})
        self._held, self._rank, self._seed = held, rank, seed

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient; a `closure` is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state, held = self.state[parameter], self._held[parameter]
        state["step"] += 1
        step = int(state["step"])
        by = key(self._seed, step, held.tensor.name)
        whole = [local(t) for t in (parameter, gradient, state["exp_avg"], state["exp_avg_sq"])]
        for piece in (slab for box in held.boxes(self._rank) for slab in box.slabs(ROUNDED_AT_ONCE[parameter.device.type])):
            here = tuple(slice(low, low + size) for low, size in zip(piece.local_offset, piece.size, strict=True))
            _update_piece([t[here] for t in whole], group, step, noise(places(held.tensor.shape, piece, parameter.device), by))


def _update_piece(held: list[torch.Tensor], group: dict[str, Any], step: int, bits: torch.Tensor) -> None:
    """AdamW on a piece of a weight, its gradient and its moments. Each of the three that are written has 16 of the random bits, or a mix of them.

    Source: Loshchilov and Hutter (arXiv 1711.05101), algorithm 2.
    """
    (beta, beta_sq), lr = group["betas"], group["lr"]
    weight, gradient, average, average_sq = (t.float() for t in held)
    average.lerp_(gradient, 1 - beta)
    average_sq.mul_(beta_sq).addcmul_(gradient, gradient, value=1 - beta_sq)
    scale = average_sq.sqrt().div_(math.sqrt(1 - beta_sq**step)).add_(group["eps"])
    weight.mul_(1 - lr * group["weight_decay"]).addcdiv_(average, scale, value=-lr / (1 - beta**step))
    held[0].copy_(round_to_bfloat16_(weight, bits))
    held[2].copy_(round_to_bfloat16_(average, bits >> 16))
    held[3].copy_(round_to_bfloat16_(average_sq, bits.mul_(GOLDEN) >> 16))


def learning_rate(wanted: Optimizer, step: int, num_steps: int) -> float:
    """The rate of step `step` (0-based) of `num_steps`: linear warm-up, then the schedule down to `min_lr_ratio` of the peak."""
    if step < wanted.warmup_steps:
        return wanted.lr * (step + 1) / wanted.warmup_steps
    left = (step - wanted.warmup_steps) / max(1, num_steps - wanted.warmup_steps)
    falling = {"constant": 1.0, "linear": 1.0 - left, "cosine": 0.5 * (1.0 + math.cos(math.pi * left))}[wanted.schedule]
    floor = 0.0 if wanted.schedule == "constant" else wanted.min_lr_ratio
    return wanted.lr * (floor + (1.0 - floor) * falling)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate of every group for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
