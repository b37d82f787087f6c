"""Balance: how many tokens each expert meets, told after every step, and what keeps these loads even.

A load counts the choices of an expert by tokens that are not padding, over the whole batch. Two ways keep loads even. An auxiliary loss (Switch
Transformer, arXiv 2101.03961, equations 4 to 6) of every sample and sparse layer, E / n^2 * sum over experts of (choices of it * sum of its shares),
weighs by the sample's n among the batch's tokens; its gradient goes through the shares that the router gives to experts, not through choices. Or a
bias of each expert, which enters choices alone, moves a step up where the expert's load is below the mean, down where it is above (DeepSeek-V3, arXiv
2412.19437, section 2.1.2).

Ranks that share a row have parts of its samples: how often these chose each expert is summed over them, once a layer, before its gradient is known.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from pentamesh.layout.policy import Policy
from pentamesh.layout.routing import load_axes, row_axes
from pentamesh.model.spec import ModelSpec
from pentamesh.run.data.batches import Micro
from pentamesh.run.world import World

__all__ = ["Balance", "Loads", "balance_of", "counted", "even_out", "sloped"]


@dataclass(frozen=True)
class Loads:
    """Of a step: the largest load over the mean one, in the worst layer and in the mean of layers; the share of experts, over all layers, that no
    token chose; and the auxiliary loss, unweighted, where it is on: as many as a token chooses where loads are even."""

    worst: float
    mean: float
    idle: float
    aux_loss: float | None = None

    def row(self) -> dict[str, float]:
        """Their part of a line of metrics."""
        found = {"max_load": self.worst, "mean_max_load": self.mean, "idle": self.idle}
        return found if self.aux_loss is None else found | {"aux_loss": self.aux_loss}


class _Told(NamedTuple):
    """The micro-batch that is computed: the sample of each token of this rank's part of the stream, the sizes of samples, and what a choice weighs.

    Shapes: samples [tokens], one more than there are sizes standing for padding; sizes [samples].
    """

    samples: torch.Tensor
    sizes: torch.Tensor
    scale: float


class Balance:
    """Of one model's routers, in order: what they chose since the step began, and what evens it out."""

    def __init__(self, routers: list[nn.Module], model: ModelSpec, policy: Policy, world: World) -> None:
        assert model.experts is not None
        self.policy, self.world = policy, world
        self._routers, self._count = routers, model.experts.count
        self._sharers, self._everyone = (world.group(axes(world.layout)) if axes(world.layout) else None for axes in (row_axes, load_axes))
        # Choices by layer and expert, and behind them the auxiliary losses times tokens and layers: all that is summed over ranks.
        self._sums = torch.zeros(len(routers) * self._count + 1, dtype=torch.float64, device=world.device)
        self._num_tokens = 0
        self._told: _Told | None = None

    def begin(self, num_tokens: int) -> None:
        """Begin a step whose batch has so many tokens that are not padding."""
        self._sums.zero_()
        self._num_tokens = num_tokens

    @contextmanager
    def counting(self, micro: Micro, factor: float) -> Iterator[None]:
        """Around a micro-batch, forward and backward; its gradients are `factor` times what they are of."""
        samples, sizes = _samples(micro, self.world)
        weight = factor * self.policy.balance_by / (max(1, self._num_tokens) * len(self._routers))
        self._told = _Told(samples.to(self.world.device), sizes.to(self.world.device), weight)
        try:
            yield
        finally:
            self._told = None

    def count(self, layer: int, index: torch.Tensor, shares: torch.Tensor, *, slopes: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Note what a micro-batch chose; with `slopes` the sample of each token, and the gradient of every share by its sample and expert. Collective
        with them over the ranks that share its rows."""
        told = self._told
        if told is None:
            return index.new_zeros(len(index) if slopes else 0), shares.new_zeros(int(slopes), self._count)
        each = index.new_zeros(len(told.sizes) + 1, self._count)
        chosen = told.samples.unsqueeze(1) * self._count + index
        each.view(-1).scatter_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten())
        each = each[:-1]  # but what pads rows
        self._sums[:-1].view(-1, self._count)[layer] += each.sum(0)
        if not slopes:
            return index.new_zeros(0), shares.new_zeros(0, self._count)
        if self._sharers is not None:
            dist.all_reduce(each, group=self._sharers)
        slope = each.to(shares.dtype) * (self._count / told.sizes.clamp(min=1).to(shares.dtype)).unsqueeze(1)
        slope = torch.cat([slope, slope.new_zeros(1, self._count)])
        self._sums[-1] += (shares * slope.index_select(0, told.samples)).sum()
        return told.samples.clone(), slope * told.scale

    def end(self) -> Loads:
        """Sum what all ranks have counted, and say how even it is. Collective over the ranks that have different tokens."""
        if self._everyone is not None:
            with self.world.bookkeeping():
                dist.all_reduce(self._sums, group=self._everyone)
        loads = self._loads
        largest = loads.amax(1) / loads.mean(1).clamp(min=1e-9)
        found = [largest.max(), largest.mean(), (loads == 0).double().mean(), self._sums[-1] / (max(1, self._num_tokens) * len(loads))]
        worst, mean, idle, aux_loss = torch.stack(found).tolist()
        return Loads(worst, mean, idle, aux_loss if self.policy.balance == "loss" else None)

    @torch.no_grad()
    def move(self) -> None:
        """After `end`, and where weights have moved: let biases follow the loads, if they are what keeps them even."""
        if self.policy.balance == "bias":
            for router, loads in zip(self._routers, self._loads, strict=True):
                bias = router.get_buffer("e_score_correction_bias")
                bias.add_((loads.mean() - loads).sign().to(bias.dtype), alpha=self.policy.balance_by)

    @property
    def _loads(self) -> torch.Tensor:
        return self._sums[:-1].view(-1, self._count)


def even_out(built: nn.Module, routers: list[Any], model: ModelSpec, policy: Policy, world: World) -> None:
    """Let the routers of `built` tell what they chose, and be told what evens them out as `policy.balance` says. Collective."""
    if not routers:
        return
    kept: Any = built
    kept.balance = Balance(routers, model, policy, world)
    number = next(_NUMBERS)
    _BALANCES[number] = kept.balance
    for layer, router in enumerate(routers):
        router.at, router.slopes = torch.tensor([number, layer]), policy.balance == "loss"


def balance_of(module: nn.Module) -> Balance | None:
    """That of a model, whatever wraps it; None where it has no experts."""
    return getattr(getattr(module, "module", module), "balance", None)


def _samples(micro: Micro, world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """The sample of each token of the stream as it lies between blocks on this rank, and the sizes of all."""
    assert micro.samples is not None
    assert micro.sizes is not None
    layout, here = world.layout, micro.samples
    if layout.sequence_parallel and layout.mesh.tp > 1:
        here = here.chunk(layout.mesh.tp, dim=1)[layout.mesh.coord(world.rank, ("tp",))]
    return here.flatten(), micro.sizes


# Inside a forward pass. An operator finds its model's balance by a number: what is compiled for one layer serves all.


_NUMBERS = itertools.count()
_BALANCES: WeakValueDictionary[int, Balance] = WeakValueDictionary()


@torch.library.custom_op("pentamesh::counted", mutates_args=())
def counted(index: torch.Tensor, shares: torch.Tensor, at: torch.Tensor, slopes: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The choices, noted; with `slopes` also the sample of each token, and the gradient of every share by its sample and expert.

    Shapes: index [tokens, k], shares [tokens, experts], `at` the number of the balance and of the layer; returned [tokens, k], [tokens] and
    [samples + 1, experts], the latter two empty without `slopes`.
    """
    number, layer = at.tolist()
    return index.clone(), *_BALANCES[number].count(layer, index, shares, slopes=slopes)


@counted.register_fake
def _(index: torch.Tensor, shares: torch.Tensor, _at: torch.Tensor, slopes: bool) -> Any:
    rows = torch.library.get_ctx().new_dynamic_size() if slopes else 0
    return torch.empty_like(index), index.new_empty(index.shape[0] if slopes else 0), shares.new_empty(rows, shares.shape[1])


def sloped(scores: torch.Tensor, shares: torch.Tensor, samples: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    """The scores as they are, in whose backward the shares get the gradient of the auxiliary loss."""
    return _Sloped.apply(scores, shares, samples, slope)


class _Sloped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, shares: torch.Tensor, samples: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(samples, slope)
        return scores.view_as(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        samples, slope = ctx.saved_tensors
        return gradient, slope.index_select(0, samples), None, None
