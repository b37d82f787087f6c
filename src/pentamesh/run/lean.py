"""Lean: norms and gated products that give what transformers' own give, and keep less for backward.

Written out, an RMS norm keeps its input in float32 and what it has normalised; here it keeps its input and one number a row. A gated MLP keeps
its activated gate; here that is computed again. Forward is the same operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from pentamesh.run.shown import class_with

__all__ = ["keep_less"]

# Norms that multiply by their weight before they round.
WIDE = ("GptOssRMSNorm",)


def keep_less(built: nn.Module, compiled: Collection[str] = ()) -> None:
    """Let every RMS norm and every gated MLP of a described family's model keep only what backward cannot compute cheaply, but for those in the
    modules named by `compiled`, which are fused as a whole."""
    for path, module in built.named_modules():
        if any(f"{path}.".startswith(f"{part}.") for part in compiled):
            continue
        if type(module).__name__.endswith("RMSNorm"):
            module.__class__ = class_with(type(module), (("forward", _normed_wide if type(module).__name__ in WIDE else _normed),))
        elif all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
            module.__class__ = class_with(type(module), (("forward", _fed),))
        elif all(hasattr(module, name) for name in ("gate_up_proj", "down_proj", "activation_fn")):
            module.__class__ = class_with(type(module), (("forward", _fed_by_both),))


def _normed(module: Any, stream: torch.Tensor) -> torch.Tensor:
    # Gemma's norms, whose weights start at zero, call their epsilon another name.
    centred = not hasattr(module, "variance_epsilon")
    return _RMSNorm.apply(stream, module.weight, module.eps if centred else module.variance_epsilon, centred, centred)


def _normed_wide(module: Any, stream: torch.Tensor) -> torch.Tensor:
    return _RMSNorm.apply(stream, module.weight, module.variance_epsilon, False, True)


def _fed(module: Any, stream: torch.Tensor) -> torch.Tensor:
    return module.down_proj(_GatedProduct.apply(module.gate_proj(stream), module.up_proj(stream), module.act_fn))


def _fed_by_both(module: Any, stream: torch.Tensor) -> torch.Tensor:
    gate, up = module.gate_up_proj(stream).chunk(2, dim=-1)
    return module.down_proj(_GatedProduct.apply(gate, up, module.activation_fn))


class _RMSNorm(torch.autograd.Function):
    """weight * x / rms(x), the root in float32 (float64 for a float64 model), or all of it where the weight is wide; where centred (1 + weight)."""

    @staticmethod
    def forward(ctx: Any, stream: torch.Tensor, weight: torch.Tensor, epsilon: float, centred: bool, wide_weight: bool) -> torch.Tensor:
        wide = stream.to(torch.promote_types(stream.dtype, torch.float32))
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(stream, weight, scale)
        ctx.centred, ctx.wide_weight = centred, wide_weight
        if wide_weight:
            return (wide * scale * (weight.to(wide.dtype) + (1.0 if centred else 0.0))).to(stream.dtype)
        return weight * (wide * scale).to(stream.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        stream, weight, scale = ctx.saved_tensors
        normalised = stream.to(scale.dtype) * scale
        of_weight = (gradient * normalised).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        of_stream = gradient * (weight.to(scale.dtype) + (1.0 if ctx.centred else 0.0)) if ctx.wide_weight else (gradient * weight).to(scale.dtype)
        of_stream = of_stream.addcmul_(normalised, (of_stream * normalised).mean(-1, keepdim=True), value=-1).mul_(scale)
        return of_stream.to(stream.dtype), of_weight, None, None, None


class _GatedProduct(torch.autograd.Function):
    """act(gate) * up."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, act: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.act = act
        ctx.save_for_backward(gate, up)
        return act(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            gate = gate.detach().requires_grad_()
            activated = ctx.act(gate)
        (of_gate,) = torch.autograd.grad(activated, gate, gradient * up)
        return of_gate, gradient * activated.detach(), None
