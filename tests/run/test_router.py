"""Routers choose and weigh as transformers' own modules do, keep less, and choose the same when a block is computed again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pentamesh.model.families import describe
from pentamesh.run.place import build
from pentamesh.run.recompute import _contexts
from pentamesh.run.router import Choices, route_by
from tests.proof.toys import TOYS

FAMILIES = ("mixtral", "qwen3-moe", "gpt-oss", "deepseek-v2", "deepseek-v3")
CHOOSES_FREELY = ("deepseek-v2", "deepseek-v3")


def routers(toy: str, dtype: torch.dtype, **changes: Any) -> tuple[Any, Any]:
    """The router of the last layer as transformers has it, and as ours, with the same random weights."""
    spec = describe(TOYS[toy] | changes, toy)
    assert spec is not None
    found: list[Any] = []
    for ours in (False, True):
        built = build(spec, dtype)
        if ours:
            route_by(built, spec)
        mlp: Any = built.get_submodule("model.layers.2.mlp")
        router = (mlp.router if hasattr(mlp, "router") else mlp.gate).to_empty(device="cpu")
        draw = torch.Generator().manual_seed(3)
        for held in (*router.parameters(), *router.buffers()):
            nn.init.normal_(held, generator=draw)
        found.append(router)
    return found[0], found[1]


@pytest.mark.parametrize("toy", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_as_transformers(toy: str, dtype: torch.dtype) -> None:
    """The same experts, by the same weights to rounding: theirs are rounded to the dtype of the model on the way in some families."""
    theirs, ours = routers(toy, dtype)
    stream = torch.randn(80, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    (_, weights, index), (_, our_weights, our_index) = theirs(stream), ours(stream)
    order, our_order = index.argsort(-1), our_index.argsort(-1)
    assert torch.equal(index.gather(1, order), our_index.gather(1, our_order))
    found = our_weights.gather(1, our_order)
    tolerance = 2**-7 if dtype == torch.bfloat16 and toy in ("qwen3-moe", "gpt-oss") else 1e-6
    assert torch.allclose(found.float(), weights.gather(1, order).float(), rtol=tolerance, atol=0)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("toy", FAMILIES)
def test_gradients_as_transformers(toy: str) -> None:
    theirs, ours = routers(toy, torch.float32)
    found = []
    for router in (theirs, ours):
        stream = torch.randn(80, 48, generator=torch.Generator().manual_seed(1)).requires_grad_()
        _, weights, index = router(stream)
        order = index.argsort(-1)
        pull = torch.randn(80, index.shape[1], generator=torch.Generator().manual_seed(2))
        found.append(torch.autograd.grad((weights.gather(1, order) * pull).sum(), [stream, *router.parameters()]))
    for their_own, our_own in zip(*found, strict=True):
        assert (their_own - our_own).norm() < 2e-6 * their_own.norm()


@pytest.mark.parametrize("toy", CHOOSES_FREELY)
def test_without_groups(toy: str) -> None:
    freely = {"topk_method": "greedy"} if toy == "deepseek-v2" else {"n_group": 1, "topk_group": 1}
    theirs, ours = routers(toy, torch.float32, **freely)
    stream = torch.randn(80, 48, generator=torch.Generator().manual_seed(1))
    assert torch.equal(theirs(stream)[2].sort(-1).values, ours(stream)[2].sort(-1).values)


def test_groups_are_looked_at() -> None:
    """Among all experts tokens would choose otherwise than among those of the best groups."""
    _, among_groups = routers("deepseek-v3", torch.float32)
    _, among_all = routers("deepseek-v3", torch.float32, n_group=1, topk_group=1)
    stream = torch.randn(80, 48, generator=torch.Generator().manual_seed(1))
    assert not torch.equal(among_groups(stream)[2].sort(-1).values, among_all(stream)[2].sort(-1).values)


@pytest.mark.parametrize("selective", [False, True])
def test_a_block_computed_again_chooses_as_before(selective: bool) -> None:
    """Even where rounding, here a nudge of the router between forward and backward, would have it choose others."""
    _, router = routers("mixtral", torch.float64)
    seen: list[torch.Tensor] = []

    def block(stream: torch.Tensor) -> torch.Tensor:
        _, weights, index = router(stream)
        seen.append(index)
        return weights.sin()

    stream = torch.randn(40, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    out: Any = checkpoint(block, stream, use_reentrant=False, context_fn=lambda: _contexts(selective))
    with torch.no_grad():
        router.weight.neg_()
    out.sum().backward()
    assert len(seen) == 2
    assert torch.equal(*seen)
    assert not torch.equal(router(stream)[2], seen[0])


def test_choices_of_several_routers_come_in_order() -> None:
    _, first = routers("mixtral", torch.float32)
    _, second = routers("deepseek-v3", torch.float32)
    stream, choices = torch.randn(10, 48), Choices()
    with choices.kept():
        made = [first(stream)[2], second(stream)[2]]
    with choices.repeated():
        assert [torch.equal(router(-stream)[2], one) for router, one in zip((first, second), made, strict=True)] == [True, True]
    assert not torch.equal(first(-stream)[2], made[0])
