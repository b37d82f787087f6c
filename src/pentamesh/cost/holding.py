"""What a rank holds of a model between steps: elements by unit and kind, and the bytes of each under a precision and a method.

Blocks of a model are mostly alike, so every distinct unit is split once and counted as often as it occurs.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from pentamesh.job.precision import ITEMSIZE, Precision
from pentamesh.layout.mesh import Layout
from pentamesh.layout.rules import SHARDED_KINDS
from pentamesh.layout.split import split
from pentamesh.layout.stages import stage_layers, stage_root
from pentamesh.model.dims import Dim, TensorSpec
from pentamesh.model.roles import STORE, Role
from pentamesh.model.spec import ModelSpec, Unit

__all__ = ["ADAPTER_RANK", "NF4_BYTES", "Holding", "Widths", "adapters", "resting", "states", "widths"]

# Rank of the adapters that lora and qlora plan for, on every projection of every block.
# Source: QLoRA (arXiv 2305.14314) section 4: all linear layers, and the rank hardly matters.
ADAPTER_RANK = 16
# Bytes of an NF4 weight: 4 bits and 0.127 bit of doubly quantised block constants. Source: QLoRA (arXiv 2305.14314) section 3.
NF4_BYTES = (4 + 0.127) / 8


class Widths(NamedTuple):
    """Bytes per element of what is held: trained weights, gradients and optimizer state; and of weights that stay frozen."""

    weight: int
    gradient: int
    state: int
    frozen_block: float
    frozen_root: float


@lru_cache(maxsize=64)
def adapters(model: ModelSpec) -> ModelSpec:
    """What lora trains: for each projection of a block, A [rank, in] and B [out, rank] in place of its weight."""
    return replace(model, tensors=_adapted(model.parameters))


@lru_cache(maxsize=64)
def _adapter_units(model: ModelSpec) -> tuple[Unit, ...]:
    """The distinct units of `adapters`, from those of the model: one block of a kind is adapted for all."""
    units = (replace(unit, tensors=_adapted(unit.tensors)) for unit in model.kinds)
    return tuple(unit for unit in units if unit.tensors)


def _adapted(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """The adapters of every projection among `tensors`."""
    rank = Dim("rank", ADAPTER_RANK)

    def pair(t: TensorSpec) -> tuple[TensorSpec, TensorSpec]:
        out, into = t.dims
        stem = t.name.removesuffix(".weight")
        return replace(t, name=f"{stem}.lora_A.weight", dims=(rank, into)), replace(t, name=f"{stem}.lora_B.weight", dims=(out, rank))

    projections = [t for t in tensors if t.kind == "matmul" and t.unit and t.met[0] and len(t.dims) == 2]
    return tuple(a for t in projections for a in pair(t))


@dataclass(frozen=True, eq=False)
class Holding:
    """Elements that the fullest rank of a layout holds of a model, in every role that rests or works. Equal to itself only: what is computed
    for one is remembered under it.

    `trained` is what of the model is not frozen, or its adapters.
    """

    model: ModelSpec
    layout: Layout
    method: str = "full"

    @property
    def units(self) -> tuple[Unit, ...]:
        return self.model.kinds

    @property
    def trained_units(self) -> tuple[Unit, ...]:
        return _adapter_units(self.model) if self.is_adapted else self.units

    @property
    def is_adapted(self) -> bool:
        return self.method in ("lora", "qlora")

    def root_numel(self, role: Role, stage: int, *, trained: bool = False) -> int:
        """Elements of the root that a pipeline stage holds; adapters have none."""
        return 0 if trained and self.is_adapted else _root_numel(self.model, role, self.layout, stage, trained)

    def block_numel(self, role: Role, *, trained: bool = False) -> int:
        """Elements of the largest block."""
        return max((_unit_numel(u, role, self.layout, trained) for u in self._blocks(trained)), default=0)

    def blocks_numel(self, role: Role, stage: int, *, trained: bool = False) -> int:
        """Elements of the blocks of one pipeline stage."""
        return _blocks_numel(self, role, stage, trained)

    def _blocks(self, trained: bool) -> list[Unit]:
        return [unit for unit in (self.trained_units if trained else self.units) if not unit.is_root]

    def stage_numel(self, role: Role, stage: int, *, trained: bool = False) -> int:
        """Elements of everything a stage holds."""
        return self.root_numel(role, stage, trained=trained) + self.blocks_numel(role, stage, trained=trained)

    def stage_num_layers(self, stage: int) -> int:
        return stage_layers(self.model.num_layers, self.layout.mesh.pp)[stage]

    def stage_num_reached(self, stage: int) -> int:
        """Of the layers of a stage, those that have a backward: all but the ones below everything that is trained."""
        return sum(self.stage_kinds(stage, reached=True).values())

    def stage_kinds(self, stage: int, *, reached: bool = False) -> Counter[bool]:
        """How many layers of a stage are sparse and how many are not; or of those that have a backward."""
        blocks = [unit for unit in self.units if not unit.is_root]
        below = sum(u.count for u in blocks if not u.reached) * self.model.num_layers // max(1, sum(u.count for u in blocks)) if reached else 0
        first = sum(self.stage_num_layers(earlier) for earlier in range(stage))
        sparse = self.model.experts.layers if self.model.experts else frozenset()
        return Counter(layer in sparse for layer in range(max(first, below), first + self.stage_num_layers(stage)))

    @cached_property
    def experts_numel(self) -> int:
        """Elements of the experts of one layer that this rank has."""
        sparse = next((u.tensors for u in self.units if any(t.is_expert for t in u.tensors)), ())
        return sum(split(t, Role.USE, self.layout).max_local_numel for t in sparse if t.is_expert)

    @property
    def trains_head(self) -> bool:
        """Whether the head, tied or not, has a gradient."""
        return not self.is_adapted and any(t.trained for t in self.model.tensors if t.kind == "matmul" and not t.unit and t.met[0])

    @cached_property
    def head_numel(self) -> int:
        """Elements of the head as it is used, tied or not."""
        return sum(split(t, Role.USE, self.layout).max_local_numel for t in self.model.tensors if t.kind == "matmul" and not t.unit and t.met[0])

    @cached_property
    def largest_tensor_numel(self) -> int:
        """Elements of the largest trained tensor that a rank updates."""
        return max((split(t, Role.STATE, self.layout).max_local_numel for u in self.trained_units for t in u.tensors if t.trained), default=0)


@lru_cache(maxsize=4096)
def _blocks_numel(held: Holding, role: Role, stage: int, trained: bool) -> int:
    counts = _stage_units(held.model, held.layout.mesh.pp, stage)
    return sum(_unit_numel(u, role, held.layout, trained) * counts[u.name] for u in held._blocks(trained))


@lru_cache(maxsize=256)
def _stage_units(model: ModelSpec, num_stages: int, stage: int) -> Counter[str]:
    """The blocks of a stage by their kind, each known by the first that is alike."""
    if num_stages == 1:
        return Counter({unit.name: unit.count for unit in model.kinds})
    blocks = [unit for unit in dict.fromkeys(t.unit for t in model.tensors) if unit]
    bounds = list(itertools.accumulate(stage_layers(len(blocks), num_stages), initial=0))
    return Counter(model.first_alike[model.units[unit][0].name].unit for unit in blocks[bounds[stage] : bounds[stage + 1]])


@lru_cache(maxsize=4096)
def _unit_numel(unit: Unit, role: Role, layout: Layout, trained: bool) -> int:
    return _local_numel(unit.tensors, *_alike(role, layout), trained)


@lru_cache(maxsize=4096)
def _root_numel(model: ModelSpec, role: Role, layout: Layout, stage: int, trained: bool) -> int:
    return _local_numel(stage_root(model, layout.mesh.pp, stage), *_alike(role, layout), trained)


@lru_cache(maxsize=4096)
def _local_numel(tensors: tuple[TensorSpec, ...], role: Role, layout: Layout, trained: bool) -> int:
    return sum(split(t, role, layout).max_local_numel for t in tensors if t.trained or not trained)


@lru_cache(maxsize=4096)
def _alike(role: Role, layout: Layout) -> tuple[Role, Layout]:
    """A role and layout in which parameters are held as in these: of what is stored, it only matters whether the strategy cuts it, and of the data
    axes how far (all of them where experts live on them)."""
    is_cut, mesh = role in SHARDED_KINDS[layout.shard], replace(layout.mesh, dp_replicate=1)
    if not is_cut and mesh.ep == 1:
        mesh = replace(mesh, dp_shard=1)
    return Role.STATE if role in STORE else role, replace(layout, mesh=mesh, shard="optimizer" if is_cut else "none")


def widths(precision: Precision, layout: Layout, method: str = "full") -> Widths:
    """Bytes per element of weights, gradients and state.

    A strategy that cuts only the optimizer (ZeRO-1, ZeRO-2) works on weights and gradients of the compute dtype and keeps the master copy
    with the moments in the state: 2 + 2 and 12 / N bytes in `bf16`, hence 4P + 12P/N and 2P + 14P/N. DDP and full shard keep the master as
    the weight itself: 4 + 4 + 8. With one dtype for all (`fp32`, `bf16-pure`) there is no separate master.
    Source: ZeRO (arXiv 1910.02054) section 5; torch `fully_shard` with MixedPrecisionPolicy.
    """
    weight, compute, moments = ITEMSIZE[precision.weight], ITEMSIZE[precision.compute], precision.moments_bytes
    frozen = NF4_BYTES if method == "qlora" else compute
    if layout.cuts_state and not layout.cuts_weights and weight != compute:
        return Widths(compute, compute, weight + moments, frozen, compute)
    return Widths(weight, ITEMSIZE[precision.gradient], moments, frozen, compute)


def states(held: Holding, precision: Precision, stage: int = 0) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer state on the fullest rank of a pipeline stage, exact from `split`: the table of ZeRO.

    Under adapters the base rests in the compute dtype (projections of blocks in NF4 for qlora; embedding and head stay in the compute dtype).
    What is frozen rests as what is trained does, masters of ZeRO included, so that it is exported as it came; it has neither gradient nor moments.
    """
    width, moments = widths(precision, held.layout, held.method), precision.moments_bytes
    updated, own = held.stage_numel(Role.STATE, stage, trained=True), held.stage_numel(Role.STATE, stage, trained=held.is_adapted)
    return {
        "weights": held.stage_numel(Role.WEIGHT, stage, trained=held.is_adapted) * width.weight + _base_bytes(held, width, stage),
        "gradients": held.stage_numel(Role.GRADIENT, stage, trained=True) * width.gradient,
        "optimizer": updated * moments + own * (width.state - moments),
    }


def resting(held: Holding, precision: Precision, stage: int = 0) -> dict[str, int]:
    """Bytes that are there at every moment: the weights that this rank keeps, moments of those that it updates, and a base under adapters.

    ZeRO-1 and ZeRO-2 rest like full shard: the whole weights that `states` counts are gathered when a step begins, and gone when it ends.
    """
    own, width = held.stage_numel(Role.STATE, stage, trained=held.is_adapted), widths(precision, held.layout, held.method)
    weights = own * ITEMSIZE[precision.weight] + _base_bytes(held, width, stage)
    return {"weights": weights, "optimizer": held.stage_numel(Role.STATE, stage, trained=True) * precision.moments_bytes}


def _base_bytes(held: Holding, width: Widths, stage: int) -> int:
    if not held.is_adapted:
        return 0
    return math.ceil(held.blocks_numel(Role.WEIGHT, stage) * width.frozen_block + held.root_numel(Role.WEIGHT, stage) * width.frozen_root)
