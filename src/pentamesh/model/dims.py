"""Names for dimensions: what a tensor is made of, before anyone says how it is cut.

A *dim* belongs to a tensor (an *axis* belongs to the mesh). Its *grain* is the number of elements that must stay together (`head_dim` for
heads), its *parts* are the lengths of the tensors that were fused along it (gate and up, or q, k and v).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from pentamesh.model.roles import Role

__all__ = ["Acts", "Dim", "TensorSpec"]


@dataclass(frozen=True)
class Dim:
    """One dimension of a tensor: `size` elements in units of `grain`, possibly fused from `parts` (elements each)."""

    name: str
    size: int
    grain: int = 1
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.parts and sum(self.parts) != self.size:
            raise ValueError(f"parts {self.parts} of {self.name} do not add up to {self.size}")
        if any(part % self.grain for part in self.parts or (self.size,)):
            raise ValueError(f"{self.name} of {self.size} elements is not made of units of {self.grain}")

    @property
    def num_units(self) -> int:
        return self.size // self.grain

    def __str__(self) -> str:
        return f"{self.name}*{self.grain}" if self.grain > 1 else self.name


@dataclass(frozen=True)
class Acts:
    """The activation that a parameter meets: in which role, and which dims it has there. Partial gradients follow from it."""

    role: Role
    dims: tuple[str, ...]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a model: a parameter, or an activation when `acts_on` is None.

    name       transformers' name of the parameter in memory
    dims       its dimensions, outermost first
    acts_on    the activation that its operation reads or scales
    kind       `matmul` | `lookup` | `scale` | `excess` (of a scale over one) | `bias` | `activation`: decides FLOPs and random initialisation
    unit       the module that is gathered as one (`model.layers.3`), or "" for what belongs to the root
    tied_to    the name of the parameter that this one *is*, when two names share one tensor
    met        of how many copies (experts) in it a token meets how many: (k, E); (0, 1) for what a token of text never meets
    spread     standard deviation of its random initial values, as a share of the model's
    trained    whether training updates it; one that is frozen has neither gradient nor optimizer state
    """

    name: str
    dims: tuple[Dim, ...]
    acts_on: Acts | None = None
    kind: str = "activation"
    unit: str = ""
    tied_to: str | None = None
    file_names: tuple[str, ...] = field(default=())
    met: tuple[int, int] = (1, 1)
    spread: float = 1.0
    trained: bool = True

    def __hash__(self) -> int:
        """Of the name, which tells the tensors of a model apart and is hashed already."""
        return hash(self.name)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(d.size for d in self.dims)

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def is_expert(self) -> bool:
        """Whether it is of experts, one beside the other."""
        return any(dim.name == "experts" for dim in self.dims)

    @property
    def reads(self) -> str:
        """The dim that a matmul sums over: the last of the activation that it meets."""
        assert self.acts_on is not None
        return self.acts_on.dims[-1]

    @property
    def leaves(self) -> bool:
        """Whether it is a matmul that a sublayer ends with: it writes to the residual stream and reads something else."""
        return self.kind == "matmul" and self.reads != "hidden" and any(dim.name == "hidden" for dim in self.dims)

    @property
    def met_numel(self) -> int:
        """Elements that one token meets: all, or those of the experts that it is sent to."""
        return self.numel * self.met[0] // self.met[1]

    def __str__(self) -> str:
        return f"{self.name} [{', '.join(map(str, self.dims))}]"
