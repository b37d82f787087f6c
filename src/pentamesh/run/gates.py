"""Gates: what an expert makes of its first projection, and the way back, written out: an operator of ours has no autograd inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

__all__ = ["Gate", "gate_of"]

_aten = torch.ops.aten
_Pair = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]

# An activation function, and its gradient from that of its output and its input.
_FUNCTIONS: dict[str, _Pair] = {
    "silu": (_aten.silu, _aten.silu_backward),
    "gelu": (_aten.gelu, _aten.gelu_backward),
    "gelu_tanh": (lambda x: _aten.gelu(x, approximate="tanh"), lambda g, x: _aten.gelu_backward(g, x, approximate="tanh")),
    "relu": (_aten.relu, lambda g, x: _aten.threshold_backward(g, x, 0)),
}
# The names that configs have for them.
_SPELLED = {"swish": "silu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


class Gate(NamedTuple):
    """act(gate) * up of two halves; or, where there is a `limit`, gpt-oss's: of even and odd places, both clamped,
    gate * sigmoid(alpha * gate) * (up + 1). Source: transformers, GptOssExperts."""

    act: str = "silu"
    alpha: float = 0.0
    limit: float = 0.0

    def product(self, both: torch.Tensor) -> torch.Tensor:
        """Shapes: both [rows, 2 ffn]; returned [rows, ffn]."""
        if not self.limit:
            gate, up = both.chunk(2, dim=-1)
            return _FUNCTIONS[self.act][0](gate) * up
        gate, up = self._clamped(both)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))

    def back(self, of_product: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
        """The gradient of both halves from that of their product."""
        found = torch.empty_like(both)
        if not self.limit:
            gate, up = both.chunk(2, dim=-1)
            act, slope = _FUNCTIONS[self.act]
            of_gate, of_up = found.chunk(2, dim=-1)
            of_gate.copy_(slope(of_product * up, gate))
            of_up.copy_(of_product * act(gate))
            return found
        gate, up = self._clamped(both)
        share = torch.sigmoid(gate * self.alpha)
        of_gate = of_product * (up + 1) * (share + self.alpha * gate * share * (1 - share))
        found[:, 0::2] = of_gate * (both[:, 0::2] <= self.limit)
        found[:, 1::2] = of_product * (gate * share) * (both[:, 1::2].abs() <= self.limit)
        return found

    def _clamped(self, both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return both[:, 0::2].clamp(max=self.limit), both[:, 1::2].clamp(-self.limit, self.limit)


def gate_of(act: str) -> Gate:
    """The gate of a config's activation function. Raises KeyError for one that is not written out here."""
    name = _SPELLED.get(act, act)
    if name not in _FUNCTIONS:
        raise KeyError(act)
    return Gate(name)
