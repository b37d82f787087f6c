"""Experts give what transformers' own loop over experts gives, whatever ranks they lie on: nobody chosen, everybody choosing one, and all between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import gelu

from pentamesh.model.families import describe
from pentamesh.run.experts import EXPERTS, _experts, _routed, _sent_home, _sent_out, dispatching, meet
from pentamesh.run.gates import Gate, gate_of
from pentamesh.run.grouped import grouped, grouped_outer
from pentamesh.run.place import build
from pentamesh.run.worlds import run_world
from tests.proof.toys import TOYS

FAMILIES = ("mixtral", "qwen3-moe", "gpt-oss", "deepseek-v2", "deepseek-v3")
COUNT, TOKENS = 8, 24


def layer(toy: str, act: str = "silu") -> Any:
    """The experts of a toy's last layer, in float64, with weights drawn at random."""
    spec = describe(TOYS[toy] | {"hidden_act": act}, toy)
    assert spec is not None
    experts: Any = build(spec, torch.float64).get_submodule("model.layers.2.mlp.experts").to_empty(device="cpu")
    draw = torch.Generator().manual_seed(3)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.5, generator=draw)
    return experts


@dataclass(frozen=True)
class Given:
    """Tokens, the experts they chose and by what weights, and the gradient of what comes of it."""

    how: str = "at random"

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(5)
        hidden, gradient = (torch.randn(TOKENS, 48, dtype=torch.float64, generator=draw) for _ in range(2))
        weights = torch.rand(TOKENS, 2, dtype=torch.float64, generator=draw)
        chosen = torch.rand(TOKENS, COUNT, generator=draw)
        if self.how == "all the same two":
            chosen[:, [2, 5]] += 1
        elif self.how == "the last ones":
            chosen[:, 6:] += 1
        elif self.how == "none of some":
            chosen[:, [0, 3, 4]] -= 1
        return hidden, chosen.topk(2).indices, weights, gradient


HOW = ("at random", "all the same two", "the last ones", "none of some")


def gradients(experts: Any, forward: Any, given: tuple[torch.Tensor, ...]) -> list[np.ndarray]:
    """What a forward gives, and the gradients of tokens, weights and parameters."""
    hidden, index, weights, gradient = given
    hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    out = forward(experts, hidden, index, weights)
    found = torch.autograd.grad(out, [hidden, weights, *experts.parameters()], gradient)
    return [t.detach().numpy() for t in (out, *found)]


def theirs(experts: Any, *given: torch.Tensor) -> torch.Tensor:
    experts.config._experts_implementation = "eager"
    return experts(*given)


@pytest.mark.parametrize("toy", FAMILIES)
@pytest.mark.parametrize("how", HOW)
def test_as_transformers(toy: str, how: str) -> None:
    experts = layer(toy)
    assert experts.config._experts_implementation == EXPERTS
    dispatching(experts, "")
    ours, wanted = gradients(experts, meet, Given(how)()), gradients(experts, theirs, Given(how)())
    for one, other in zip(ours, wanted, strict=True):
        assert np.linalg.norm(one - other) <= 1e-13 * np.linalg.norm(other)


@pytest.mark.parametrize(("toy", "act"), [("mixtral", "gelu"), ("mixtral", "gelu_pytorch_tanh"), ("mixtral", "relu"), ("gpt-oss", "quick_gelu")])
def test_other_activations(toy: str, act: str) -> None:
    """That of gpt-oss is its own, whatever its config names."""
    experts = layer(toy, act)
    dispatching(experts, "")
    ours, wanted = gradients(experts, meet, Given()()), gradients(experts, theirs, Given()())
    for one, other in zip(ours, wanted, strict=True):
        assert np.linalg.norm(one - other) <= 1e-13 * np.linalg.norm(other)


def on_a_rank(toy: str, how: str) -> list[np.ndarray]:
    """Of a world that parts the experts: what this rank's tokens get, and its part of each gradient."""
    degree, rank, experts, whole = dist.get_world_size(), dist.get_rank(), layer(toy), Given(how)()
    for name, parameter in list(experts.named_parameters()):
        experts._parameters[name] = nn.Parameter(parameter.detach().chunk(degree)[rank].clone())
    group: Any = dist.new_group(list(range(degree)))
    dispatching(experts, group.group_name)
    heard: list[torch.Tensor] = []
    experts.dispatch.heard.append(heard.append)
    # Tokens lie unevenly: the first rank has more than the others, of four ranks the last has none.
    sizes = {2: [18, 6], 4: [12, 8, 4, 0]}[degree]
    found = gradients(experts, meet, tuple(t.split(sizes)[rank] for t in whole))
    return [*found, np.array(heard[0].shape), np.array(int(heard[0].sum()))]


@pytest.mark.parametrize("toy", ["mixtral", "gpt-oss"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("degree", [2, 4])
def test_parted(toy: str, how: str, degree: int) -> None:
    experts = layer(toy)
    dispatching(experts, "")
    wanted, ranks = gradients(experts, meet, Given(how)()), run_world(on_a_rank, degree, toy, how)
    for position, whole in enumerate(wanted):
        found = np.concatenate([rank[position] for rank in ranks])
        assert np.linalg.norm(found - whole) <= 1e-13 * np.linalg.norm(whole), position
    assert all(tuple(rank[-2]) == (degree, COUNT // degree) for rank in ranks)
    assert sum(int(rank[-1]) for rank in ranks) == 2 * TOKENS, "every row came somewhere"
    if how == "the last ones":
        assert [int(rank[-1]) for rank in ranks] == [0] * (degree - 1) + [2 * TOKENS]


def test_operators_are_what_torch_asks_of_them() -> None:
    experts, (hidden, index, weights, _) = layer("gpt-oss"), Given()()
    order, arranged, counts = _routed(index, COUNT, "")
    torch.library.opcheck(_routed, (index, COUNT, ""))
    for of, per_token in ((hidden, 2), (weights.view(-1, 1), 1)):
        torch.library.opcheck(_sent_out, (of.clone().requires_grad_(), order, arranged, counts, per_token, ""))
    rows = torch.randn(2 * TOKENS, 48, dtype=torch.float64)
    torch.library.opcheck(_sent_home, (rows.clone().requires_grad_(), order, arranged, counts, 2, ""))
    shares = torch.rand(2 * TOKENS, 1, dtype=torch.float64).requires_grad_()
    how = (experts.gate_up_proj, experts.down_proj, experts.gate_up_proj_bias, experts.down_proj_bias, True, *Gate(alpha=1.7, limit=7.0))
    torch.library.opcheck(_experts, (rows.requires_grad_(), shares, counts, *how))


def test_grouped_is_a_matmul_for_each() -> None:
    rows, other, weights, counts = torch.randn(9, 4), torch.randn(9, 5), torch.randn(4, 4, 5), [3, 0, 6, 0]
    parts = rows.split(counts)
    assert torch.equal(grouped(rows, weights, counts), torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)]))
    outer = grouped_outer(rows, other, counts)
    assert torch.equal(outer, torch.stack([a.T @ b for a, b in zip(parts, other.split(counts), strict=True)]))
    assert grouped(rows[:0], weights, [0] * 4).shape == (0, 5)


def test_gates_that_are_unknown_are_said() -> None:
    assert gate_of("gelu").product(torch.ones(1, 2, dtype=torch.float64)).item() == pytest.approx(gelu(torch.ones(1, dtype=torch.float64)).item())
    with pytest.raises(KeyError):
        gate_of("mish")
