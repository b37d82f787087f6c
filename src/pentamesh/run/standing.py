"""Standing: the bytes of weights, gradients and optimizer state that a rank really holds, by looking at their storages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from pentamesh.layout.rules import SHARDED_KINDS
from pentamesh.model.roles import Role
from pentamesh.run.place import local
from pentamesh.run.step import Trainee

__all__ = ["Standing", "storage_bytes"]


@dataclass
class Standing:
    """The most of each kind that was seen, counted as a plan counts states: what the layout does not cut stands whole (ZeRO-1 and ZeRO-2 gather
    weights for a step), and what is whole of a kind that it cuts only passes. Where whole weights have a dtype of their own, the masters that
    they are cast from belong to the optimizer.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0

    @property
    def num_bytes(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @contextmanager
    def watched(self, trainee: Trainee) -> Iterator[None]:
        """Look after every forward inside the block, when weights are as they are used and earlier micro-batches have left their gradients."""
        hook = trainee.module.register_forward_hook(lambda *_: self.look(trainee))
        try:
            yield
        finally:
            hook.remove()

    def look(self, trainee: Trainee) -> None:
        """Count what stands now."""
        layout = trainee.world.layout
        resting, gathered = list(trainee.parameters.values()), list(_gathered(trainee.module))
        moments = [t for state in trainee.optimizer.state.values() for t in state.values()]
        whole = layout.cuts_state and not layout.cuts_weights
        masters = resting if whole and {t.dtype for t in resting} != {t.dtype for t in gathered} else []
        waiting = [] if Role.GRADIENT in SHARDED_KINDS[layout.shard] else list(_unreduced(trainee.module))
        self.weights = max(self.weights, storage_bytes(gathered if whole else resting))
        self.gradients = max(self.gradients, storage_bytes([*_reduced(trainee), *waiting]))
        self.optimizer = max(self.optimizer, storage_bytes([*masters, *moments]))


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each counted once."""
    storages = {s.data_ptr(): s.nbytes() for s in (local(t).untyped_storage() for t in tensors)}
    return sum(storages.values())


def _gathered(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """What `fully_shard` has gathered; the storages of what it has freed are empty."""
    for group in _groups(module):
        for parameter in group.fsdp_params:
            yield from parameter.all_gather_outputs


def _reduced(trainee: Trainee) -> Iterator[torch.Tensor]:
    """Gradients of parameters as they rest, and those that still wait to be summed over copies."""
    yield from (p.grad for p in trainee.parameters.values() if p.grad is not None)
    yield from (group._partial_reduce_output for group in _groups(trainee.module) if group._partial_reduce_output is not None)


def _unreduced(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Gradients of whole parameters, which micro-batches accumulate under `fully_shard` until they are reduced."""
    for group in _groups(module):
        for parameter in group.fsdp_params:
            used = getattr(parameter, "_unsharded_param", None)  # there after the first gather
            yield from (t for t in (parameter.unsharded_accumulated_grad, used.grad if used is not None else None) if t is not None)


def _groups(module: torch.nn.Module) -> Iterator[Any]:
    """torch's own record of each unit that `fully_shard` cut. Source: torch.distributed.fsdp._fully_shard, FSDPParamGroup and FSDPParam."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            yield from part._get_fsdp_state()._fsdp_param_groups
