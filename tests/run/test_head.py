"""The head and its loss in pieces: the loss and every gradient that transformers' own forward and torch's cross_entropy give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pentamesh.job.precision import PRECISIONS
from pentamesh.layout import policy
from pentamesh.layout.mesh import Layout
from pentamesh.layout.policy import Policy
from pentamesh.model.families import describe
from pentamesh.model.spec import ModelSpec
from pentamesh.run.data.batches import IGNORED, Micro
from pentamesh.run.initial import drawing
from pentamesh.run.lean import keep_less
from pentamesh.run.loss import weighted_loss
from pentamesh.run.place import build, parameters_of, place
from pentamesh.run.world import join
from tests.proof.toys import TOYS

WEIGHT = 0.37


def spec(name: str = "llama") -> ModelSpec:
    found = describe(TOYS[name], "toy")
    assert found is not None
    return found


def micro(vocab: int, trained: int) -> Micro:
    """Three sequences of nine tokens of which `trained`, spread over all, are trained."""
    draw = torch.Generator().manual_seed(3)
    ids, labels = (torch.randint(0, vocab, (3, 9), generator=draw) for _ in range(2))
    kept = torch.randperm(27, generator=draw)[:trained]
    flat = torch.full((27,), IGNORED).index_copy(0, kept, labels.flatten()[kept])
    return Micro(ids, flat.view(3, 9), trained, 27)


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in parameters_of(module).items() if p.grad is not None}


def placed(model: ModelSpec, precision: str) -> nn.Module:
    world = join(Layout())
    return place(model, Layout(), Policy(), PRECISIONS[precision], world, drawing(0))


def plain(model: ModelSpec, module: nn.Module, given: Micro) -> tuple[float, dict[str, torch.Tensor]]:
    """The same in float64 by transformers' own forward and torch's loss, over all logits at once."""
    built: Any = build(model, torch.float64)
    keep_less(built)
    buffers = dict(built.named_buffers())
    built.to_empty(device="cpu").tie_weights()
    built.load_state_dict(module.state_dict())
    for name, buffer in built.named_buffers():
        buffer.copy_(buffers[name])
    logits = built(input_ids=given.input_ids).logits.flatten(0, 1)
    loss = cross_entropy(logits, given.labels.flatten(), ignore_index=IGNORED, reduction="sum")
    (WEIGHT * loss).backward()
    return float(loss.detach()), gradients(built)


@pytest.mark.parametrize("name", ["llama", "llama-untied", "gpt2", "gemma2"])
@pytest.mark.parametrize(("at_once", "trained"), [(2**22, 27), (2**22, 11), (5 * 301, 11), (1, 4)])
def test_equals_the_whole_logits(name: str, at_once: int, trained: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(policy.LOGITS_AT_ONCE, "cpu", at_once)
    model = spec(name)
    given, module = micro(model.vocab, trained), placed(model, "fp64")
    expected, theirs = plain(model, module, given)
    loss = weighted_loss(module, given, model, join(Layout()), WEIGHT)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(WEIGHT * expected, rel=1e-13)
    ours = gradients(module)
    assert ours.keys() == theirs.keys()
    for tensor, found in ours.items():
        torch.testing.assert_close(found, theirs[tensor], rtol=1e-10, atol=1e-13)


def test_bfloat16_adds_pieces_up_in_full_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of one token the head's gradient is as near to float64's as in one piece."""
    model = spec("llama-untied")
    given, error = micro(model.vocab, 27), {}
    _, exact = plain(model, placed(model, "bf16-pure"), given)
    for at_once in (2**22, 1):
        monkeypatch.setitem(policy.LOGITS_AT_ONCE, "cpu", at_once)
        module = placed(model, "bf16-pure")
        weighted_loss(module, given, model, join(Layout()), WEIGHT).backward()
        head = gradients(module)["lm_head.weight"].double()
        error[at_once] = float((head - exact["lm_head.weight"]).norm() / exact["lm_head.weight"].norm())
    assert error[1] < 0.05
    assert error[1] < 1.2 * error[2**22]


def test_nothing_trained_is_connected_and_zero() -> None:
    model = spec()
    module = placed(model, "fp32")
    loss = weighted_loss(module, micro(model.vocab, 0), model, join(Layout()))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert gradients(module).keys() == {t.name for t in model.parameters}
    assert all(not g.any() for g in gradients(module).values())


def test_without_gradients_none_are_computed() -> None:
    model = spec()
    module = placed(model, "fp32")
    with torch.no_grad():
        loss = weighted_loss(module, micro(model.vocab, 27), model, join(Layout()))
    assert not loss.requires_grad
    assert float(loss) == pytest.approx(float(weighted_loss(module, micro(model.vocab, 27), model, join(Layout())).detach()), rel=1e-6)
