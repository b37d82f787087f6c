"""Experts: tokens go to the ranks that have the experts they chose, and what these make of them comes home.

Under transformers' experts interface, for every described family. The axis ep parts the experts of a layer among neighbouring ranks. A token's row is
sent once for each expert that it chose, beside it the weight that this expert has for it, which is multiplied in where the expert computes: its
results come home summed up and nothing waits there for backward. Going out and coming home are each other's backward.

What is sent differs from rank to rank and step to step. How many rows each rank will get is told first, and known on the host from then on; a rank
whose experts nobody chose takes part with no rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import GroupName
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from pentamesh.run import deepep
from pentamesh.run.gates import Gate, gate_of
from pentamesh.run.grouped import grouped, grouped_outer

__all__ = ["EXPERTS", "Dispatch", "dispatches", "dispatching"]

EXPERTS = "pentamesh"


@dataclass
class Dispatch:
    """Among which ranks the experts of a layer are parted, by the name of their process group ("" where one has all), whether DeepEP brings them
    tokens, and who is told how many rows came to each of this rank's experts in a forward pass, by rank of origin."""

    group: str = ""
    deep: bool = False
    heard: list[Callable[[torch.Tensor], object]] = field(default_factory=list)


def dispatching(built: nn.Module, group: str, *, deep: bool = False) -> list[nn.Module]:
    """Let every layer's experts meet tokens of all ranks of `group`, brought by DeepEP where `deep`; the modules that are experts."""
    found: list[Any] = [module for module in built.modules() if hasattr(module, "_is_expert_parallel")]  # left by transformers' decorator
    for module in found:
        module.dispatch = Dispatch(group, deep and bool(group))
    return found


def dispatches(module: nn.Module) -> list[Dispatch]:
    """Those of a model's layers, in order."""
    found: list[Any] = [inner for inner in module.modules() if hasattr(inner, "dispatch")]
    return [inner.dispatch for inner in found]


def meet(module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """transformers' experts interface.

    Shapes: hidden [tokens, hidden], index and weights [tokens, k]; returned [tokens, hidden].
    """
    to: Dispatch = module.dispatch
    if to.deep:
        return _meet_deep(module, to, hidden, index, weights)
    order, arranged, counts = _routed(index, module.num_experts, to.group)
    _tell(to, counts)
    rows = _sent_out(hidden, order, arranged, counts, index.shape[1], to.group)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    shares = _sent_out(weights.reshape(-1, 1).to(wide), order, arranged, counts, 1, to.group)
    made = _made(module, rows, shares, counts)
    return _sent_home(made, order, arranged, counts, index.shape[1], to.group)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, meet)


def _meet_deep(module: Any, to: Dispatch, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    came = deepep.gone(hidden, index, weights, module.num_experts, to.group)
    _tell(to, came.counts)
    return deepep.home(_made(module, came.rows, came.shares, came.counts), came, to.group)


def _tell(to: Dispatch, counts: torch.Tensor) -> None:
    """Let those who want to know hear what came, but not where backward computes a block again."""
    if torch._C._current_graph_task_id() == -1:
        for hear in to.heard:
            hear(counts[1])


def _made(module: Any, rows: torch.Tensor, shares: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    biases = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
    made, _ = _experts(rows, shares, counts, module.gate_up_proj, module.down_proj, *biases, module.is_transposed, *_gate(module))
    return made


def _gate(module: Any) -> Gate:
    """gpt-oss has a gate of its own, whatever activation function its config names."""
    return gate_of(module.config.hidden_act) if module.is_concatenated else Gate(alpha=module.alpha, limit=module.limit)


# Where rows go


@torch.library.custom_op("pentamesh::routed", mutates_args=())
def _routed(index: torch.Tensor, num_experts: int, group: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What each rank sends and gets: the choices in the order of their experts; the places, among what comes, of the rows in the order of this rank's
    experts; and on the host the rows for each expert by destination, and those for this rank's by origin. Collective over `group`.

    Shapes: index [tokens, k]; order [tokens * k] and arranged [rows], int32; counts [2, ranks, experts / ranks], int64.
    """
    chosen = index.flatten()
    order = chosen.argsort(stable=True).int()
    degree = _group(group).size() if group else 1
    sent = chosen.new_zeros(num_experts).scatter_add_(0, chosen, torch.ones_like(chosen)).view(degree, -1)
    came = sent.clone()
    if group:
        dist.all_to_all_single(came, sent, group=_group(group))
    counts = torch.stack([sent, came]).cpu()  # for which the host waits, once a layer
    experts = torch.arange(counts.shape[2], device=index.device).repeat(degree)
    by_expert = experts.repeat_interleave(came.flatten(), output_size=int(counts[1].sum()))
    return order, by_expert.argsort(stable=True).int(), counts


@_routed.register_fake
def _(index: torch.Tensor, num_experts: int, group: str) -> Any:
    degree = _group(group).size() if group else 1
    rows = torch.library.get_ctx().new_dynamic_size() if group else index.numel()
    order, arranged = (index.new_empty(count, dtype=torch.int32) for count in (index.numel(), rows))
    return order, arranged, index.new_empty((2, degree, num_experts // degree), device="cpu")


def _group(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(GroupName(name))


# Out and home


def _exchanged(rows: torch.Tensor, sent: torch.Tensor, came: torch.Tensor, group: str) -> torch.Tensor:
    """Rows in the order of the ranks they go to become rows in the order of those they come from."""
    if not group:
        return rows
    splits = [counts.sum(1).tolist() for counts in (came, sent)]
    found = rows.new_empty(sum(splits[0]), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), *splits, group=_group(group))
    return found


@torch.library.custom_op("pentamesh::sent_out", mutates_args=())
def _sent_out(tokens: torch.Tensor, order: torch.Tensor, arranged: torch.Tensor, counts: torch.Tensor, per_token: int, group: str) -> torch.Tensor:
    """The rows that come to this rank's experts, in the order of these. Collective over `group`.

    Shapes: tokens [tokens * k / per_token, width]; returned [rows, width].
    """
    there = _exchanged(tokens.index_select(0, order // per_token), counts[0], counts[1], group)
    return there.index_select(0, arranged) if group else there


@torch.library.custom_op("pentamesh::sent_home", mutates_args=())
def _sent_home(rows: torch.Tensor, order: torch.Tensor, arranged: torch.Tensor, counts: torch.Tensor, per_token: int, group: str) -> torch.Tensor:
    """For each token the sum of its rows. Collective over `group`.

    Shapes: rows [rows, width]; returned [tokens * k / per_token, width].
    """
    by_origin = torch.empty_like(rows).index_copy_(0, arranged.long(), rows) if group else rows
    home = _exchanged(by_origin, counts[1], counts[0], group)
    placed = torch.empty_like(home).index_copy_(0, order.long(), home)
    return placed.view(-1, per_token, rows.shape[1]).sum(1) if per_token > 1 else placed


@_sent_out.register_fake
def _(tokens: torch.Tensor, _order: torch.Tensor, arranged: torch.Tensor, *_how: object) -> torch.Tensor:
    return tokens.new_empty(arranged.shape[0], tokens.shape[1])


@_sent_home.register_fake
def _(rows: torch.Tensor, order: torch.Tensor, _arranged: torch.Tensor, _counts: torch.Tensor, per_token: int, _group: str) -> torch.Tensor:
    return rows.new_empty(order.shape[0] // per_token, rows.shape[1])


def _keep_places(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    # Not as saved tensors: computing a block again would go on to the last that is saved, and send results home for nothing.
    ctx.places = inputs[1:]


def _back_by(other: Callable[..., torch.Tensor]) -> Callable[..., tuple[Any, ...]]:
    return lambda ctx, gradient: (other(gradient.contiguous(), *ctx.places), *[None] * 5)


_sent_out.register_autograd(_back_by(_sent_home), setup_context=_keep_places)
_sent_home.register_autograd(_back_by(_sent_out), setup_context=_keep_places)


# What experts do


@torch.library.custom_op("pentamesh::experts", mutates_args=())
def _experts(
    rows: torch.Tensor,
    shares: torch.Tensor,
    counts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    transposed: bool,
    act: str,
    alpha: float,
    limit: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """share * (gate(x @ gate_up + bias) @ down + bias) of every row by its expert, and what the gate saw.

    Shapes: rows [rows, hidden], shares [rows, 1], counts as of `_routed`; gate_up [experts, 2 ffn, hidden] and down [experts, hidden, ffn], the last
    two dims of both the other way round where `transposed`; biases [experts, 2 ffn] and [experts, hidden]; returned [rows, hidden] and [rows, 2 ffn].
    """
    each, gate = counts[1].sum(0).tolist(), Gate(act, alpha, limit)
    first, second = (gate_up, down) if transposed else (gate_up.transpose(1, 2), down.transpose(1, 2))
    both = grouped(rows, first, each)
    if gate_up_bias is not None:
        both += _for_rows(gate_up_bias, each)
    made = grouped((gate.product(both) * shares).to(rows.dtype), second, each)
    if down_bias is not None:
        made += (_for_rows(down_bias, each) * shares).to(rows.dtype)
    return made, both


@_experts.register_fake
def _(rows: torch.Tensor, _shares: torch.Tensor, _counts: torch.Tensor, gate_up: torch.Tensor, _down: torch.Tensor, *how: Any) -> Any:
    return torch.empty_like(rows), rows.new_empty(rows.shape[0], gate_up.shape[2 if how[2] else 1])


def _for_rows(bias: torch.Tensor, counts: list[int]) -> torch.Tensor:
    return bias.repeat_interleave(torch.tensor(counts, device=bias.device), dim=0, output_size=sum(counts))


@torch.library.custom_op("pentamesh::experts_backward", mutates_args=())
def _experts_backward(
    gradient: torch.Tensor,
    rows: torch.Tensor,
    shares: torch.Tensor,
    counts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    both: torch.Tensor,
    transposed: bool,
    act: str,
    alpha: float,
    limit: float,
    needed: list[bool],
) -> list[torch.Tensor]:
    """Gradients of rows, shares, gate_up, down and their biases, empty where not `needed`."""
    each, gate = counts[1].sum(0).tolist(), Gate(act, alpha, limit)
    first, second = (gate_up.transpose(1, 2), down.transpose(1, 2)) if transposed else (gate_up, down)
    product, found = gate.product(both), [rows.new_empty(0) for _ in needed]
    if needed[3]:
        found[3] = _outer((product * shares).to(rows.dtype), gradient, each, transposed)
    if needed[5]:
        found[5] = _by_expert(gradient * shares, each).to(rows.dtype)
    if any((*needed[:3], needed[4])):
        of_product = grouped(gradient, second, each)
        if needed[1]:
            found[1] = (of_product.to(shares.dtype) * product).sum(1, keepdim=True)
            if down_bias is not None:
                found[1] += (gradient.to(shares.dtype) * _for_rows(down_bias, each)).sum(1, keepdim=True)
        of_both = gate.back((of_product * shares).to(rows.dtype), both)
        del of_product, product
        if needed[2]:
            found[2] = _outer(rows, of_both, each, transposed)
        if needed[4]:
            found[4] = _by_expert(of_both, each)
        if needed[0]:
            found[0] = grouped(of_both, first, each)
    return found


def _outer(into: torch.Tensor, out: torch.Tensor, counts: list[int], transposed: bool) -> torch.Tensor:
    """The gradient of experts' matrices from what these read and the gradient of what they gave."""
    return grouped_outer(into, out, counts) if transposed else grouped_outer(out, into, counts)


def _by_expert(rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """The sum of each expert's rows."""
    return torch.stack([part.sum(0) for part in rows.split(counts)])


@_experts_backward.register_fake
def _(*given: Any) -> list[torch.Tensor]:
    _, rows, shares, _, gate_up, down, _, both, *_how, needed = given
    biases = (gate_up.new_empty(gate_up.shape[0], both.shape[1]), gate_up.new_empty(down.shape[0], rows.shape[1]))
    shaped = (*(torch.empty_like(t) for t in (rows, shares, gate_up, down)), *biases)
    return [t if need else rows.new_empty(0) for t, need in zip(shaped, needed, strict=True)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    rows, shares, counts, gate_up, down, _, down_bias, *how = inputs
    ctx.save_for_backward(rows, shares, counts, gate_up, down, down_bias, output[1])
    ctx.how = how
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor | None) -> tuple[Any, ...]:
    asked = ctx.needs_input_grad
    needed = [asked[0], asked[1], *asked[3:7]]
    found = _experts_backward(gradient.contiguous(), *ctx.saved_tensors, *ctx.how, needed)
    rows, shares, *weights = (t if need else None for t, need in zip(found, needed, strict=True))
    return (rows, shares, None, *weights, *[None] * len(ctx.how))


_experts.register_autograd(_backward, setup_context=_keep)
