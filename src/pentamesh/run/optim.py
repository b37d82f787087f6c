"""AdamW on whatever part of the parameters a rank holds, and the learning rate as a function of the step."""

from __future__ import annotations

import math

import torch

from pentamesh.job.job import Optimizer
from pentamesh.job.precision import Precision
from pentamesh.model.spec import ModelSpec
from pentamesh.run.place import torch_dtype

__all__ = ["STATE_NAMES", "adamw", "learning_rate", "set_learning_rate"]

STATE_NAMES = ("step", "exp_avg", "exp_avg_sq")


def adamw(parameters: dict[str, torch.Tensor], model: ModelSpec, wanted: Optimizer, precision: Precision) -> torch.optim.AdamW:
    """AdamW with its state allocated from the start, so that memory is whole before the first step and a checkpoint always has a place.

    Matrices decay; norms and biases do not.
    """
    matrices = {tensor.name for tensor in model.parameters if tensor.kind in ("matmul", "lookup")}
    groups = [
        {"params": [p for name, p in parameters.items() if name in matrices], "weight_decay": wanted.weight_decay},
        {"params": [p for name, p in parameters.items() if name not in matrices], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=wanted.lr, betas=wanted.betas, eps=wanted.eps, fused=True)
    dtype = torch_dtype(precision.state)
    for parameter in parameters.values():
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        moments = {name: torch.zeros_like(parameter, dtype=dtype, requires_grad=False) for name in STATE_NAMES[1:]}
        optimizer.state[parameter] = {"step": step, **moments}
    return optimizer


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
