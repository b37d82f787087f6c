"""ModelSpec: a model as data - its tensors with named dims, in the order in which a forward pass meets them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

from pentamesh.model.dims import TensorSpec

__all__ = ["ModelSpec", "Sublayer"]


@dataclass(frozen=True)
class Sublayer:
    """One residual branch of a block: it is entered from the residual stream and leaves onto it once."""

    layer: int
    kind: str  # attention | mlp


@dataclass(frozen=True)
class ModelSpec:
    """What is trained.

    name          as the user wrote it, resolved
    family        the described family, or "generic": tensors without names for their dims, data axes only
    config        the config.json as read, for whoever builds the modules
    tensors       every parameter, tied ones under both names, in forward order
    """

    name: str
    family: str
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    max_positions: int
    tensors: tuple[TensorSpec, ...]
    config: dict[str, Any] = field(repr=False, compare=False, default_factory=dict)
    notes: tuple[str, ...] = ()

    @cached_property
    def parameters(self) -> tuple[TensorSpec, ...]:
        """The tensors that own storage: tied ones once, under the first name."""
        return tuple(t for t in self.tensors if t.tied_to is None)

    @cached_property
    def num_parameters(self) -> int:
        return sum(t.numel for t in self.parameters)

    @cached_property
    def units(self) -> dict[str, tuple[TensorSpec, ...]]:
        """Parameters by the module that is gathered as one; the root, "", holds embedding, final norm and head."""
        ordered = sorted(self.parameters, key=lambda t: t.unit)
        return {unit: tuple(group) for unit, group in groupby(ordered, key=lambda t: t.unit)}

    @cached_property
    def block(self) -> tuple[TensorSpec, ...]:
        """The parameters of the first block; all blocks of a dense family are alike."""
        return self.units.get("model.layers.0", ())

    @property
    def sublayers(self) -> tuple[Sublayer, ...]:
        return tuple(Sublayer(layer, kind) for layer in range(self.num_layers) for kind in ("attention", "mlp"))

    @cached_property
    def matmul_parameters(self) -> int:
        """Parameters that multiply each token: every projection and the head (tied or not), not the embedding's lookup."""
        return sum(t.numel for t in self.tensors if t.kind == "matmul")

    def flop_per_token(self, seq_len: int, *, causal: bool = False) -> float:
        """Model FLOP of forward and backward per token: 6 per matmul parameter and 12 L s (heads * head_dim) of attention.

        Source: PaLM (arXiv 2204.02311) appendix B; `causal` halves the attention term, as some sources do.
        """
        attention = 12 * self.num_layers * seq_len * self.num_heads * self.head_dim
        return 6 * self.matmul_parameters + attention / (2 if causal else 1)
