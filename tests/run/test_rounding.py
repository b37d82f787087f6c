"""Stochastic rounding keeps on average what rounding to the nearest loses, and repeats itself wherever and whenever it is asked again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pentamesh.job.job import Optimizer
from pentamesh.job.precision import PRECISIONS
from pentamesh.layout.mesh import Layout, Mesh
from pentamesh.layout.split import Box
from pentamesh.model.dims import Dim, TensorSpec
from pentamesh.run import optim
from pentamesh.run.optim import adamw
from pentamesh.run.rounding import key, noise, places, round_to_bfloat16_

CPU = torch.device("cpu")
ROUNDS = 200_000


def bits(count: int, step: int = 1) -> torch.Tensor:
    return noise(places((count,), Box((0,), (count,), (0,)), CPU), key(0, step, "w"))


@pytest.mark.parametrize("value", [1.0, 1.001, -1.001, 3.14159, 1e-3, -7.7e-20, 1e30])
def test_the_mean_is_the_value(value: float) -> None:
    """Only the two neighbours come out; the mean lies within four standard errors."""
    exact = float(np.float32(value))
    found = round_to_bfloat16_(torch.full((ROUNDS,), value), bits(ROUNDS)).double()
    assert torch.equal(found, found.bfloat16().double())
    low, high = found.min().item(), found.max().item()
    assert low <= exact <= high
    assert found.unique().numel() <= 2
    error = 4 * (high - low) / 2 / ROUNDS**0.5
    assert abs(found.mean().item() - exact) <= error
    assert (low == high) == (exact == float(torch.tensor(value).bfloat16()))


def test_what_is_not_finite_stays_so() -> None:
    values = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0]).repeat(1000)
    found = round_to_bfloat16_(values.clone(), bits(4000))
    assert torch.equal(found.isnan(), values.isnan())
    assert torch.equal(found.nan_to_num(1.0), values.nan_to_num(1.0))


def test_what_carries_beyond_the_largest_number_is_infinite() -> None:
    """And a NaN as GPUs make it, all ones, stays one: a carry would leave its sign alone."""
    words = torch.tensor([0x7F7FFFFF, 0x7FFFFFFF], dtype=torch.int32)
    largest, nan = round_to_bfloat16_(words.view(torch.float32), torch.full((2,), 0xFFFF, dtype=torch.int32)).tolist()
    assert largest == float("inf")
    assert nan != nan


def test_noise_is_the_function_it_says() -> None:
    """The same on unsigned numbers, which wrap by definition."""
    by = key(3, 5, "model.layers.0.mlp.up_proj.weight")
    words = np.arange(2**32 - 500, 2**32 + 500, dtype=np.uint64).astype(np.uint32)
    first, second = (np.uint32(k % 2**32) for k in by)
    wanted = words ^ first
    wanted ^= wanted >> 16
    wanted = (wanted * np.uint32(0x7FEB352D)) ^ second
    wanted ^= wanted >> 15
    wanted *= np.uint32(0x846CA68B)
    wanted ^= wanted >> 16
    found = noise(torch.from_numpy(words.view(np.int32).copy()), by)
    assert np.array_equal(found.numpy().view(np.uint32), wanted)


def test_noise_is_even_and_never_the_same_twice() -> None:
    one, two = (bits(2**20, step) for step in (1, 2))
    for word in (one, one >> 16, one.clone().mul_(optim.GOLDEN) >> 16):
        shares = ((word & 0xFFFF) >> 12).bincount(minlength=16) / 2**20
        assert (shares - 1 / 16).abs().max() < 5 * (1 / 16 / 2**20) ** 0.5
    assert torch.corrcoef(torch.stack([one.double(), two.double(), one.roll(1).double()])).fill_diagonal_(0).abs().max() < 0.005
    assert key(0, 1, "a") != key(0, 1, "b") != key(1, 1, "b")


def test_places_count_the_whole_tensor() -> None:
    whole = torch.arange(5 * 7 * 3, dtype=torch.int32).view(5, 7, 3)
    assert torch.equal(places((5, 7, 3), Box((1, 2, 0), (3, 4, 3), (0, 0, 0)), CPU), whole[1:4, 2:6])
    # Row 200,000 of a matrix that is 2^15 wide lies beyond 2^32.
    assert places((2**18, 2**15), Box((200_000, 5), (1, 1), (0, 0)), CPU).item() == (200_000 * 2**15 + 5) % 2**32 - 2**32


def stepped(
    weight: torch.Tensor, gradient: torch.Tensor, num_steps: int, layout: Layout | None = None, rank: int = 0, **wanted: Any
) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    """A parameter after steps of AdamW under `bf16-pure`, and the optimizer."""
    layout = layout or Layout(Mesh())
    dims = tuple(Dim(name, size) for name, size in zip(("vocab", "hidden"), (weight.shape[0] * layout.mesh.num_ranks, weight.shape[1]), strict=True))
    model: Any = SimpleNamespace(parameters=(TensorSpec("w", dims, kind="matmul"),))
    world: Any = SimpleNamespace(layout=layout, rank=rank)
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = adamw({"w": parameter}, model, Optimizer(**wanted), PRECISIONS["bf16-pure"], world, seed=7)
    for _ in range(num_steps):
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach(), optimizer


def test_updates_below_the_last_bit_are_kept_on_average() -> None:
    """A hundred steps of a thousandth of the distance to the next bfloat16: rounded to the nearest, none of them would be seen."""
    gap, gradient = 2.0**-7, torch.ones(512, 64, dtype=torch.bfloat16)
    found, _ = stepped(torch.ones(512, 64, dtype=torch.bfloat16), -gradient, 100, lr=gap / 1000)
    assert (torch.ones(1, dtype=torch.bfloat16) + gap / 1000).item() == 1.0
    assert found.double().mean().item() - 1 == pytest.approx(gap / 10, rel=0.1)


def test_a_second_moment_comes_down() -> None:
    """By a thousandth a step, which rounding to the nearest holds where it is."""
    weight = torch.ones(64, 64, dtype=torch.bfloat16)
    _, optimizer = stepped(weight, torch.zeros_like(weight), 0, betas=(0.9, 0.999))
    (parameter,) = optimizer.state
    state = optimizer.state[parameter]
    state["exp_avg_sq"].fill_(1.0)
    for _ in range(100):
        parameter.grad = torch.zeros_like(weight)
        optimizer.step()
    assert state["exp_avg_sq"].double().mean().item() == pytest.approx(0.999**100, rel=0.01)
    assert (torch.ones((), dtype=torch.bfloat16) * 0.999).item() == 1.0


def test_any_cut_of_a_tensor_is_rounded_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks hold halves, in pieces of a few rows; bit for bit what one rank makes of the whole."""
    draw = torch.Generator().manual_seed(0)
    weight, gradient = (torch.randn(300, 40, generator=draw).bfloat16() for _ in range(2))
    whole, _ = stepped(weight, gradient, 5, lr=1e-2)
    monkeypatch.setitem(optim.ROUNDED_AT_ONCE, "cpu", 700)
    layout = Layout(Mesh(dp_shard=2), "parameters")
    halves = [stepped(weight[low : low + 150], gradient[low : low + 150], 5, layout, rank, lr=1e-2)[0] for rank, low in enumerate((0, 150))]
    assert torch.equal(torch.cat(halves), whole)
