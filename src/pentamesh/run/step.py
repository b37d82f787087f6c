"""One optimizer step: count the trained tokens, accumulate gradients, reduce once, clip, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from pentamesh.layout.mesh import TOKEN_AXES
from pentamesh.layout.policy import Policy
from pentamesh.layout.rhythm import norm_axes
from pentamesh.layout.rules import shared_by
from pentamesh.layout.split import split
from pentamesh.model.dims import TensorSpec
from pentamesh.model.roles import Role
from pentamesh.model.spec import ModelSpec
from pentamesh.run.balance import Loads, balance_of
from pentamesh.run.data.batches import Micro
from pentamesh.run.loss import weighted_loss
from pentamesh.run.partial import sum_partial_gradients
from pentamesh.run.place import local
from pentamesh.run.world import World

__all__ = ["StepResult", "Trainee", "accumulate", "grad_norm", "take_step"]


@dataclass(frozen=True)
class Trainee:
    """What a step works on: this rank's module, its parameters by Hugging Face name, their optimizer, and what was planned for them."""

    module: nn.Module
    parameters: dict[str, torch.Tensor]
    optimizer: torch.optim.Optimizer
    model: ModelSpec
    policy: Policy
    world: World


@dataclass(frozen=True)
class StepResult:
    """What a step did, equal on all ranks: the loss before the update, the gradient norm before clipping, tokens over the global batch, and how even
    the loads of experts were. The loss is the cross-entropy alone; an auxiliary loss stands with the loads."""

    loss: float
    grad_norm: float
    num_trained_tokens: int
    num_tokens: int
    skipped: str = ""
    loads: Loads | None = None

    @property
    def is_usable(self) -> bool:
        """Whether loss and gradient are finite; those of a batch without trained tokens are, though it updates nothing."""
        return not self.skipped or not self.num_trained_tokens


def take_step(trainee: Trainee, micros: Sequence[Micro], max_grad_norm: float | None, watch: Callable[[Trainee], None] | None = None) -> StepResult:
    """One step over this rank's micro-batches; `watch` sees the whole gradient before it is clipped.

    A batch without any trained token, or with a loss or gradient that is not finite, updates nothing.
    """
    world = trainee.world
    trained, total = (int(n) for n in world.sum([sum(m.num_trained for m in micros), sum(m.num_tokens for m in micros)], TOKEN_AXES))
    if trained == 0:
        return StepResult(0.0, 0.0, 0, total, skipped="no trained token in the whole batch")
    balance = balance_of(trainee.module)
    if balance is not None:
        balance.begin(total)
    loss = accumulate(trainee, micros, trained) / trained
    loads = None if balance is None else balance.end()
    norm = grad_norm(trainee)
    if watch is not None:
        watch(trainee)
    skipped = "" if math.isfinite(loss) and math.isfinite(norm) else f"loss {loss} and gradient norm {norm} are not both finite"
    if not skipped:
        _clip(trainee.parameters, norm, max_grad_norm)
        trainee.optimizer.step()
        if balance is not None:
            balance.move()
    # DDP's gradients are views of its buckets: dropped, the next accumulation would make a second copy beside them.
    trainee.optimizer.zero_grad(set_to_none=not isinstance(trainee.module, DistributedDataParallel))
    return StepResult(loss, norm, trained, total, skipped, loads)


def accumulate(trainee: Trainee, micros: Sequence[Micro], num_trained: int) -> float:
    """Leave d(sum of losses) / `num_trained` in the gradients, summed over ranks, and return the sum of losses over the global batch."""
    module, world = trainee.module, trainee.world
    # DDP averages over its group; gradients here are sums, so the factor is taken out beforehand.
    factor = dist.get_world_size(module.process_group) if isinstance(module, DistributedDataParallel) else 1
    losses, balance = [], balance_of(module)
    for index, micro in enumerate(micros):
        counting = nullcontext() if balance is None else balance.counting(micro, factor)
        with _reducing(module, trainee.policy, last=index == len(micros) - 1), counting:
            loss = weighted_loss(module, micro, trainee.model, world, factor / num_trained)
            loss.backward()
        losses.append(loss.detach().double() * (num_trained / factor))
    sum_partial_gradients(trainee.parameters, trainee.model, world)
    return world.sum([float(torch.stack(losses).sum())], TOKEN_AXES)[0]


@contextmanager
def _reducing(module: nn.Module, policy: Policy, *, last: bool) -> Iterator[None]:
    """Reduce gradients in this backward or keep them local, and free gathered parameters or keep them, as the policy says."""
    reduces = last or policy.reduce == "each"
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last or policy.reduce != "once")
        module.set_requires_all_reduce(reduces)
        module.set_is_last_backward(last)
        module.set_reshard_after_backward(last or not policy.keep_gathered)
        yield
    elif isinstance(module, DistributedDataParallel) and not reduces:
        with module.no_sync():
            yield
    else:
        yield


def grad_norm(trainee: Trainee) -> float:
    """The 2-norm of the whole gradient, each logical parameter counted once; the same on every rank.

    Squares are summed in float64 over the axes that part gradients; a tensor that such an axis does not cut, or key heads that its ranks share,
    are held several times and weigh one share. Stages hold different tensors; experts are parted by other axes among the same ranks.
    """
    model, parameters, world = trainee.model, trainee.parameters, trainee.world
    axes, mesh = norm_axes(model, world.layout), world.layout.mesh
    num_ranks = mesh.degree(*(set(axes) - {"pp"}))

    def holders(tensor: TensorSpec) -> float:
        cut = split(tensor, Role.STATE, world.layout).axes
        return num_ranks / mesh.degree(*cut) * (shared_by(tensor, world.layout) if "tp" in cut else 1)

    weights = {t.name: 1.0 / holders(t) for t in model.parameters if t.trained}
    grads = {name: local(p.grad) for name, p in parameters.items() if p.grad is not None}
    norms = torch.stack(torch._foreach_norm(list(grads.values()), dtype=torch.float64))
    shares = torch.tensor([weights[name] for name in grads], dtype=torch.float64, device=norms.device)
    return math.sqrt(world.sum([float((shares * norms.square()).sum())], axes)[0])


def _clip(parameters: dict[str, torch.Tensor], norm: float, max_norm: float | None) -> None:
    if max_norm is not None and norm > max_norm:
        torch._foreach_mul_([local(p.grad) for p in parameters.values() if p.grad is not None], max_norm / (norm + 1e-6))
