"""The proofs can fail: each rule of tensor, context and expert parallel, of windows, caps, documents and norms, broken in turn, shows in the quantity
that it decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from pentamesh.layout.mesh import DATA_AXES, TOKEN_AXES, Layout, Mesh, Shard
from pentamesh.layout.policy import Policy
from pentamesh.run import attention, blocks, context, experts, head, loss, partial, place, router, step, tensor
from pentamesh.run.data import batches
from pentamesh.run.data.batches import IGNORED, Micro
from pentamesh.run.data.share import Share
from pentamesh.run.verify import Outcome, Trial, errors, outcome
from pentamesh.run.world import World
from pentamesh.run.worlds import run_world
from tests.proof.toys import TOYS, alone


@dataclass(frozen=True)
class Mutation:
    """A rule that is broken, and the trial and the quantity in which it shows."""

    breaks: Callable[[], None]
    shows_in: str
    toy: str = "qwen3"
    sequence: bool = False
    mesh: Mesh = field(default_factory=lambda: Mesh(tp=2))
    shard: Shard = "none"
    in_a_row: int = 1
    context: Any = "ring"

    @property
    def trial(self) -> Trial:
        layout = Layout(self.mesh, self.shard, sequence_parallel=self.sequence, context=self.context)
        ranks = self.mesh.dp_replicate * self.mesh.dp_shard
        return Trial(TOYS[self.toy], layout, Policy(2, 2), global_batch=4 * ranks, num_steps=2, in_a_row=self.in_a_row)


def put(owner: Any, name: str, broken: Any) -> None:
    """In this process, which ends with its trial."""
    setattr(owner, name, broken)


def no_partial_sums() -> None:
    put(step, "sum_partial_gradients", lambda *_: None)


def partial_sums_but_over(axes: tuple[str, ...]) -> Callable[[], None]:
    def breaks() -> None:
        own = partial.tensor_partial
        put(partial, "tensor_partial", lambda t, layout: found if (found := own(t, layout)) != axes else ())

    return breaks


def crosses_as(meant: tuple[str, str], done: tuple[str, str]) -> Callable[[], None]:
    """What is meant to move one way forward and another backward is moved otherwise."""

    def breaks() -> None:
        own = tensor._Cross.apply
        put(tensor._Cross, "apply", lambda stream, *moves: own(stream, *(done if moves[:2] == meant else moves[:2]), moves[2]))

    return breaks


def scatters_without_sum() -> None:
    def own_part(stream: torch.Tensor, group: Any) -> torch.Tensor:
        return stream.chunk(group.size(), 1)[group.rank()].contiguous()

    tensor._MOVES["scatter"] = own_part


def bias_on_every_rank() -> None:
    put(tensor, "_without_bias", lambda module, stream: torch.nn.functional.linear(stream, module.weight, module.bias))


def looks_up_foreign_words() -> None:
    put(tensor._Rows, "after", lambda self, module, args, output: output)


def positions_of_the_part() -> None:
    own: Any = loss.weighted_loss

    def placed_in_parts(module: Any, *given: Any) -> torch.Tensor:
        def run(*, position_ids: torch.Tensor, **others: Any) -> Any:
            return module(position_ids=position_ids % (position_ids.shape[1] // 2), **others)

        return own(run, *given)

    put(step, "weighted_loss", placed_in_parts)


def head_of_its_own_part() -> None:
    own = head._Part
    put(head, "_Part", lambda low, count, group, cap: own(low, count, None, cap))


def reads(broken: Callable[[Micro], Micro]) -> Callable[[], None]:
    """A rank's part of each row is changed before it is computed."""

    def breaks() -> None:
        own = batches.collate
        put(batches, "collate", lambda *given: broken(own(*given)))

    return breaks


def labels_of_the_part(micro: Micro) -> Micro:
    """Shifted after the cut: what follows a token is the next that its rank has."""
    return replace(micro, labels=micro.input_ids.roll(-1, 1).where(micro.labels != IGNORED, IGNORED))


def tokens_as_under(context: Any) -> Callable[[], None]:
    """Attention goes one way, and tokens lie as they do for another."""

    def breaks() -> None:
        own = Share.places
        put(Share, "places", lambda share, length: own(replace(share, layout=replace(share.layout, context=context)), length))

    return breaks


def ring_turns_the_other_way() -> None:
    own = context.dist.get_global_rank
    put(context.dist, "get_global_rank", lambda group, at: own(group, (2 * group.rank() - at) % group.size()))


def keys_in_the_order_of_ranks() -> None:
    put(context.Gathered, "_in_order", lambda _, parts: list(parts))


def blocks_without_their_weights() -> None:
    def added(out: torch.Tensor, sums: torch.Tensor, seen: torch.Tensor, seen_sums: torch.Tensor) -> None:
        out.add_(seen)
        sums.copy_(torch.logaddexp(sums, seen_sums))

    put(blocks, "_join", added)


def gradients_of_keys_stay(way: Any) -> Callable[[], None]:
    """Each rank keeps for its own keys what its own queries give them."""

    def own_part(held: Any, key: torch.Tensor, value: torch.Tensor, gradients: Any) -> Any:
        given, *_ = [gradients(*turn) for turn in held.turns(key, value)]
        return [held._of(held.group.rank(), t, key.shape[2]) for t in given] if way is context.Gathered else given

    return lambda: put(way, "home", own_part)


def heads_are_not_exchanged() -> None:
    put(context, "_all_to_all", lambda _, parts: list(parts))


def loss_of_its_own_tokens() -> None:
    own = World.sum

    def summed(world: World, values: Any, axes: tuple[str, ...]) -> list[float]:
        return own(world, values, DATA_AXES if axes == TOKEN_AXES and isinstance(values[0], float) else axes)

    put(World, "sum", summed)


def no_copies_over_context() -> None:
    put(place, "COPY_AXES", ("dp_replicate",))


def norm_of_its_own_shares() -> None:
    own = step.norm_axes
    put(step, "norm_axes", lambda *given: tuple(axis for axis in own(*given) if axis != "cp"))


def cap_without_slope() -> None:
    put(torch.Tensor, "square_", torch.Tensor.zero_)


def sees_beyond_the_window() -> None:
    own = attention.Scoring
    put(attention, "Scoring", lambda scale, _, cap: own(scale, None, cap))


def sees_other_documents() -> None:
    own = attention.documents_of
    put(attention, "documents_of", lambda _, *shape: own(None, *shape))


def own_token_count() -> None:
    own = step.accumulate
    put(step, "accumulate", lambda trainee, micros, trained: own(trainee, micros, sum(m.num_trained for m in micros)))


def norm_counts_copies() -> None:
    put(step, "shared_by", lambda *_: 1)


def rows_as_they_come() -> None:
    """Rows of several ranks are not put in the order of the experts here."""
    own = experts._routed

    def unarranged(*given: Any) -> Any:
        order, arranged, counts = own(*given)
        return order, torch.arange(len(arranged), dtype=torch.int32), counts

    put(experts, "_routed", unarranged)


def rows_weigh_the_same() -> None:
    own = experts._sent_out
    put(
        experts,
        "_sent_out",
        lambda tokens, *how: own(tokens, *how) if tokens.shape[1] > 1 else own(tokens, *how).mean().expand(len(how[1]), 1).clone(),
    )


def half_the_gradient_for_weights_of_rows() -> None:
    own = experts._sent_out
    put(experts, "_sent_out", lambda tokens, *how: own(tokens if tokens.shape[1] > 1 else (tokens + tokens.detach()) / 2, *how))


def norm_skips_the_expert_view() -> None:
    own = step.split
    put(step, "split", lambda t, role, layout: own(t, role, replace(layout, mesh=replace(layout.mesh, ep=1))))


def partial_sums_but_of(part: str) -> Callable[[], None]:
    def breaks() -> None:
        own = partial.tensor_partial
        put(partial, "tensor_partial", lambda t, layout: () if part in t.name else own(t, layout))

    return breaks


def tokens_choose_among_all_groups() -> None:
    own = router._chosen
    put(router, "_chosen", lambda scores, bias, rule: own(scores, bias, replace(rule, groups=1)))


CONTEXT = Mesh(cp=2)
PARTED = Mesh(dp_shard=2, ep=2)
MUTATIONS = {
    "no partial gradients are summed": Mutation(no_partial_sums, "gradient"),
    "those of norms of a stream that is cut are not": Mutation(partial_sums_but_over(("tp",)), "gradient", "llama", sequence=True),
    "those of key heads that ranks share are not": Mutation(partial_sums_but_over(("tp/2",)), "gradient", mesh=Mesh(tp=4)),
    "a sublayer's input has only its own gradient": Mutation(crosses_as(("copy", "sum"), ("copy", "copy")), "gradient"),
    "a sublayer leaves only its own part": Mutation(crosses_as(("sum", "copy"), ("copy", "copy")), "loss"),
    "a part of the stream is not summed": Mutation(scatters_without_sum, "loss", sequence=True),
    "a bias is added by every rank": Mutation(bias_on_every_rank, "loss", "llama-untied"),
    "words of other ranks are looked up": Mutation(looks_up_foreign_words, "loss"),
    "positions count from the part's beginning": Mutation(positions_of_the_part, "loss", sequence=True),
    "a rank takes its words for all": Mutation(head_of_its_own_part, "loss"),
    "caps have no slope": Mutation(cap_without_slope, "gradient", "gemma2"),
    "windows are not looked at": Mutation(sees_beyond_the_window, "loss", "gemma3"),
    "documents are not looked at": Mutation(sees_other_documents, "loss", in_a_row=3),
    "a rank divides by its own tokens": Mutation(own_token_count, "gradient", mesh=Mesh(dp_shard=2), shard="parameters"),
    "the norm counts shared key heads twice": Mutation(norm_counts_copies, "norm", mesh=Mesh(tp=4)),
    "labels are shifted after rows are cut": Mutation(reads(labels_of_the_part), "loss", mesh=CONTEXT),
    "and over heads exchanged": Mutation(reads(labels_of_the_part), "loss", mesh=CONTEXT, context="ulysses"),
    "positions count from a rank's first token": Mutation(reads(lambda micro: replace(micro, positions=None)), "gradient", mesh=CONTEXT),
    "a ring is given one run of tokens a rank": Mutation(tokens_as_under("ulysses"), "loss", mesh=CONTEXT),
    "Ulysses is given two": Mutation(tokens_as_under("ring"), "loss", mesh=CONTEXT, context="ulysses"),
    "a ring turns the other way": Mutation(ring_turns_the_other_way, "loss", mesh=Mesh(cp=4)),
    "what is seen in parts is added up unweighted": Mutation(blocks_without_their_weights, "loss", mesh=CONTEXT),
    "a ring leaves gradients of keys where they are": Mutation(gradients_of_keys_stay(context.Ring), "gradient", mesh=CONTEXT),
    "gathered keys keep theirs": Mutation(gradients_of_keys_stay(context.Gathered), "gradient", mesh=CONTEXT, context="all_gather"),
    "gathered keys stand in the order of ranks": Mutation(keys_in_the_order_of_ranks, "loss", mesh=CONTEXT, context="all_gather"),
    "heads are not exchanged": Mutation(heads_are_not_exchanged, "loss", mesh=CONTEXT, context="ulysses"),
    "windows across ranks are not looked at": Mutation(sees_beyond_the_window, "loss", "gemma3", mesh=CONTEXT),
    "documents across ranks are not": Mutation(sees_other_documents, "loss", mesh=CONTEXT, in_a_row=3),
    "a context rank divides by its own tokens": Mutation(own_token_count, "gradient", mesh=CONTEXT),
    "and sums its own losses": Mutation(loss_of_its_own_tokens, "loss", mesh=CONTEXT),
    "and keeps its own gradients": Mutation(no_copies_over_context, "gradient", mesh=CONTEXT),
    "and its own part of the norm": Mutation(norm_of_its_own_shares, "norm", mesh=CONTEXT, shard="parameters"),
    "rows meet experts in the order of ranks": Mutation(rows_as_they_come, "gradient", "mixtral", mesh=PARTED, shard="parameters"),
    "all rows weigh the same": Mutation(rows_weigh_the_same, "gradient", "mixtral", mesh=PARTED, shard="parameters"),
    "weights of rows have half their gradient": Mutation(
        half_the_gradient_for_weights_of_rows, "gradient", "mixtral", mesh=PARTED, shard="parameters"
    ),
    "the norm skips the expert view": Mutation(norm_skips_the_expert_view, "norm", "mixtral", True, Mesh(tp=2, ep=2), "parameters"),
    "gradients of routers stay where the stream is cut": Mutation(partial_sums_but_of(".gate."), "gradient", "qwen3-moe", sequence=True),
    "those of latents stay with the heads": Mutation(partial_sums_but_of("_a_proj"), "gradient", "deepseek-v3", sequence=True),
    "and those of their norms": Mutation(partial_sums_but_of("_a_layernorm"), "gradient", "deepseek-v3", sequence=True),
    "groups of experts are not looked at": Mutation(tokens_choose_among_all_groups, "gradient", "deepseek-v2", mesh=PARTED, shard="parameters"),
}


def mutated(name: str) -> Outcome:
    MUTATIONS[name].breaks()
    return outcome(MUTATIONS[name].trial)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_rule_is_seen(name: str, record_proof) -> None:
    mutation = MUTATIONS[name]
    found = errors(run_world(mutated, mutation.mesh.num_ranks, name)[0], alone(mutation.trial))
    assert found[mutation.shows_in] > 1e-4, found
    record_proof("rules broken and seen", mutations=1)
