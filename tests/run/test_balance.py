"""What keeps experts' loads even, in one process: the auxiliary loss and its gradient are transformers', biases follow loads, choices stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from pentamesh.job.precision import PRECISIONS
from pentamesh.layout.mesh import Layout
from pentamesh.layout.policy import Policy
from pentamesh.model.families import describe
from pentamesh.model.spec import ModelSpec
from pentamesh.run import router
from pentamesh.run.balance import Balance, Loads, balance_of
from pentamesh.run.data.batches import IGNORED, Micro, collate
from pentamesh.run.data.samples import Samples
from pentamesh.run.evaluate import held_out
from pentamesh.run.initial import drawing
from pentamesh.run.loss import weighted_loss
from pentamesh.run.optim import adamw
from pentamesh.run.place import parameters_of, place
from pentamesh.run.step import StepResult, Trainee, take_step
from pentamesh.run.verify import Trial, toy_samples
from pentamesh.run.world import World, join
from pentamesh.run.worlds import run_world
from tests.proof.toys import TOYS

ONE_LAYER = {"num_hidden_layers": 1, "mlp_only_layers": []}
SEED = 3


def model_of(toy: str, **config: Any) -> ModelSpec:
    model = describe(TOYS[toy] | config, toy)
    assert model is not None
    return model


def trainee_of(model: ModelSpec, world: World, lr: float = 1e-3, **policy: Any) -> Trainee:
    chosen, precision = replace(Policy(2, 1), **policy), PRECISIONS["fp64"]
    module = place(model, Layout(), chosen, precision, world, drawing(SEED, std=0.3))
    parameters, optimizer = parameters_of(module), Trial(model.config).optimizer.model_copy(update={"lr": lr})
    return Trainee(module, parameters, adamw(parameters, model, optimizer, precision, world, SEED), model, chosen, world)


def row_of(samples: Samples, *rows: tuple[int, ...]) -> Micro:
    return collate(samples, rows)


class Gradients:
    """A watcher of a step: its gradients, before they are clipped."""

    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}

    def __call__(self, trainee: Trainee) -> None:
        self.found = {name: p.grad.clone() for name, p in trainee.parameters.items() if p.grad is not None}


def test_a_sample_in_a_layer_has_transformers_loss() -> None:
    """Its own model, asked for the loss, gives the same number and, of every parameter, the same gradient; of a padded row too. Its norms are in
    float32, whatever the model is in."""
    assert run_world(beside_transformers, 1)[0] < 1e-5


def beside_transformers() -> float:
    worst, world = 0.0, join(Layout(), "cpu")
    for toy in ("mixtral", "qwen3-moe", "gpt-oss"):
        model, samples = model_of(toy, **ONE_LAYER), toy_samples(SEED, 1, 301, 24)
        trainee, watch = trainee_of(model, world, balance="loss", balance_by=0.7), Gradients()
        theirs = like(trainee, samples)
        ours = take_step(trainee, [row_of(samples, (0,), ())], None, watch)
        assert ours.loads is not None
        assert ours.loads.aux_loss is not None
        worst = max(worst, abs(ours.loss + 0.7 * ours.loads.aux_loss - theirs[0]), abs(ours.loads.aux_loss - theirs[1]))
        worst = max(worst, *(float((theirs[2][name] - found).norm() / found.norm()) for name, found in watch.found.items()))
    return worst


def like(trainee: Trainee, samples: Samples) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss, auxiliary loss and gradients of transformers' own modules with the same weights."""
    torch.Tensor.float = torch.Tensor.double  # in this process alone: their auxiliary loss is in float32, whatever the model is in
    asked: dict[str, Any] = {**trainee.model.config, "output_router_logits": True}
    config = AutoConfig.for_model(**asked)
    built = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager")
    built.load_state_dict({name: p.detach() for name, p in trainee.parameters.items()}, strict=not trainee.model.tied)
    micro = row_of(samples, (0,))
    out = built(input_ids=micro.input_ids, use_cache=False)
    loss = nn.functional.cross_entropy(out.logits[0], micro.labels[0], ignore_index=IGNORED) + 0.7 * out.aux_loss
    loss.backward()
    return float(loss), float(out.aux_loss), {name: p.grad for name, p in built.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("toy", ["mixtral", "qwen3-moe", "gpt-oss", "deepseek-v2", "deepseek-v3"])
def test_every_sample_weighs_by_its_tokens(toy: str) -> None:
    """The loss by its definition, of several samples and layers; rows of one sample each and rows of several have the same, and padding has none."""
    found = run_world(by_definition, 1, toy)[0]
    assert max(found) < 1e-12, found


def by_definition(toy: str) -> list[float]:
    world, model, samples, errors = join(Layout(), "cpu"), model_of(toy), toy_samples(SEED, 6, 301, 24), []
    aux_loss, wanted = defined(trainee_of(model, world), samples)
    for rows in ([(0,), (1,), (2,), (3,), (4,), (5,)], [(0, 1, 2), (3, 4, 5)], [(5, 0), (), (4, 2, 1, 3), ()]):
        trainee, watch = trainee_of(model, world, balance="loss", balance_by=0.1), Gradients()
        micros = [row_of(samples, *rows[: len(rows) // 2]), row_of(samples, *rows[len(rows) // 2 :])]
        loads = take_step(trainee, micros, None, watch).loads
        assert loads is not None
        assert loads.aux_loss is not None
        errors += [abs(loads.aux_loss - aux_loss), *(float((watch.found[name] - of).norm() / of.norm()) for name, of in wanted.items())]
    return errors


def defined(trainee: Trainee, samples: Samples) -> tuple[float, dict[str, torch.Tensor]]:
    """The auxiliary loss sample by sample and layer by layer, and by autograd the gradients of the loss with a tenth of it."""
    model, loss, aux_loss = trainee.model, torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    assert model.experts is not None
    micros = [row_of(samples, (sample,)) for sample in range(6)]
    for micro in micros:
        found, seen = met(trainee, micro)
        loss = loss + found / sum(micro.num_trained for micro in micros)
        for shares, chosen in seen:
            choices = torch.bincount(chosen.flatten(), minlength=model.experts.count)
            one = (choices * shares.sum(0)).sum() * model.experts.count / len(chosen) ** 2
            aux_loss = aux_loss + one * len(chosen) / sum(micro.num_tokens for micro in micros) / len(model.experts.layers)
    (loss + 0.1 * aux_loss).backward()
    return float(aux_loss), {name: p.grad for name, p in trainee.parameters.items() if p.grad is not None}


def met(trainee: Trainee, micro: Micro) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The loss of a micro-batch, and by layer the shares that its router gives to experts and the experts that tokens choose."""
    assert trainee.model.experts is not None
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    sigmoid = trainee.model.experts.scores == "sigmoid"

    def note(_: nn.Module, __: object, out: tuple[torch.Tensor, ...]) -> None:
        scores = out[0].sigmoid() if sigmoid else out[0].softmax(-1)
        found.append((scores / scores.sum(-1, keepdim=True), out[2]))

    hooks = [module.register_forward_hook(note) for module in trainee.module.modules() if hasattr(module, "rule")]
    loss = weighted_loss(trainee.module, micro, trainee.model, trainee.world)
    for hook in hooks:
        hook.remove()
    return loss, found


def test_a_bias_follows_the_loads_and_nothing_else() -> None:
    run_world(biases, 1)


def biases() -> None:
    world, model, samples = join(Layout(), "cpu"), model_of("deepseek-v3"), toy_samples(SEED, 4, 301, 24)
    trainee = trainee_of(model, world, balance="bias", balance_by=0.25)
    held = dict(trainee.module.named_buffers())
    places = [tensor.name for tensor in model.buffers]
    assert {held[name].dtype for name in places} == {torch.float32}
    micro = row_of(samples, (0, 1), (2, 3))
    for _ in range(3):
        before = [held[name].clone() for name in places]
        counts = [torch.bincount(chosen[real(micro)].flatten(), minlength=8).double() for _, chosen in met(trainee, micro)[1]]
        result = take_step(trainee, [micro], None)
        assert result.loads == loads_of(counts)
        for name, was, count in zip(places, before, counts, strict=True):
            assert torch.equal(held[name], was + 0.25 * torch.sign(count.mean() - count).float())
    # What updates nothing moves nothing.
    unlabelled = replace(micro, labels=torch.full_like(micro.labels, IGNORED), num_trained=0)
    before = [held[name].clone() for name in places]
    assert take_step(trainee, [unlabelled], None).skipped
    spoil(trainee)
    assert "not both finite" in take_step(trainee, [micro], None).skipped
    assert all(torch.equal(held[name], was) for name, was in zip(places, before, strict=True))


def real(micro: Micro) -> torch.Tensor:
    assert micro.samples is not None
    assert micro.sizes is not None
    return (micro.samples < len(micro.sizes)).flatten()


def loads_of(counts: list[torch.Tensor]) -> Loads:
    largest = torch.stack([count.max() / count.mean() for count in counts])
    idle = torch.stack([(count == 0).double().mean() for count in counts]).mean()
    return Loads(float(largest.max()), float(largest.mean()), float(idle))


def spoil(trainee: Trainee) -> None:
    with torch.no_grad():
        trainee.parameters["model.norm.weight"].fill_(np.inf)


def test_held_out_rows_are_neither_counted_nor_weighed() -> None:
    run_world(held_out_rows, 1)


def held_out_rows() -> None:
    world, model, samples = join(Layout(), "cpu"), model_of("mixtral"), toy_samples(SEED, 4, 301, 24)
    plain, losing = trainee_of(model, world), trainee_of(model, world, balance="loss", balance_by=10.0)
    found = [held_out(trainee.module, samples, 2, model, world) for trainee in (plain, losing)]
    assert found[0] == found[1]
    balance = balance_of(losing.module)
    assert isinstance(balance, Balance)
    balance.begin(1)
    held_out(losing.module, samples, 2, model, world)
    assert balance.end().idle == 1.0
    # Nor does a config that asks for their loss let transformers add it.
    asked = trainee_of(model_of("mixtral", output_router_logits=True), world)
    assert held_out(asked.module, samples, 2, model, world) == found[0]


@pytest.mark.parametrize("balance", ["none", "loss", "bias"])
def test_recompute_changes_nothing(balance: str) -> None:
    """The same loss, loads and gradients, whatever blocks keep: to the last bit where all is computed as before."""
    run_world(recomputed, 1, balance)


def recomputed(balance: Any) -> None:
    world, samples = join(Layout(), "cpu"), toy_samples(SEED, 6, 301, 24)
    for toy in ("mixtral", "deepseek-v3"):
        if balance == "bias" and toy == "mixtral":
            continue
        model = model_of(toy)
        found: list[tuple[StepResult, dict[str, torch.Tensor]]] = []
        for recompute in ("none", "selective", "full"):
            trainee, watch = trainee_of(model, world, recompute=recompute, balance=balance, balance_by=0.1), Gradients()
            micros = [row_of(samples, (0, 1), (2,)), row_of(samples, (3,), (4, 5))]
            found.append((take_step(trainee, micros, None, watch), watch.found | dict(trainee.module.named_buffers())))
        for result, gradients in found[1:]:
            assert result == found[0][0]
            assert [name for name, gradient in gradients.items() if not torch.equal(gradient, found[0][1][name])] == []


def test_a_choice_is_kept_where_a_block_is_computed_again() -> None:
    """A router that would choose others in backward does not get to: gradients are those of what was chosen."""
    run_world(chosen_otherwise, 1)


def chosen_otherwise() -> None:
    world, model, samples = join(Layout(), "cpu"), model_of("mixtral"), toy_samples(SEED, 2, 301, 24)
    own, again = router._chosen, 0

    def fickle(scores: torch.Tensor, *how: Any) -> torch.Tensor:
        nonlocal again
        backward = torch._C._current_graph_task_id() != -1
        again += backward
        return own(-scores if backward else scores, *how)

    router._chosen = fickle
    found = []
    for recompute in ("none", "selective", "full"):
        trainee, watch = trainee_of(model, world, recompute=recompute, balance="loss", balance_by=0.1), Gradients()
        take_step(trainee, [row_of(samples, (0,), (1,))], None, watch)
        found.append(watch.found)
    assert again == 0
    assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in found[0])
