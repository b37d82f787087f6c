"""What context parallel moves in a step, counted by hand: how often, how much, and in which direction."""

from __future__ import annotations

import pytest

from pentamesh.job.division import ContextWay
from pentamesh.job.precision import PRECISIONS
from pentamesh.layout.crossings import ledger
from pentamesh.layout.mesh import Layout, Mesh
from pentamesh.layout.policy import Policy
from pentamesh.layout.rhythm import rhythm
from pentamesh.model.config import canonical
from pentamesh.model.families import describe
from pentamesh.model.frozen import frozen
from pentamesh.model.read import read_model
from pentamesh.model.spec import ModelSpec

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 3, 8, 4, 16
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
BATCH, SEQ, ACCUM, BF16 = 2, 64, 3, PRECISIONS["bf16"]
FOUR = Mesh(cp=4)
# Bytes of bf16 keys and values of one of these ranks, and of queries or the output.
KV = 2 * BATCH * SEQ // 4 * KV_HEADS * HEAD_DIM * 2
Q = BATCH * SEQ // 4 * HEADS * HEAD_DIM * 2

Counts = dict[tuple[str, str, int], int]


def toy() -> ModelSpec:
    found = describe(canonical(CONFIG), "toy")
    assert found is not None
    return found


def moved(way: ContextWay, recompute: str = "none", model: ModelSpec | None = None, mesh: Mesh = FOUR) -> Counts:
    """Of (phase, kind, bytes of one) how many; parameters and bookkeeping are reduced by all-reduce alone, and left out."""
    policy = Policy(micro_batch=BATCH, grad_accum=ACCUM, recompute=recompute)  # type: ignore[arg-type]
    rows = ledger(rhythm(model or toy(), Layout(mesh, context=way), policy, BF16, SEQ))
    assert all(row.num_ranks == mesh.cp for row in rows if row.axes == ("cp",))
    return {(r.phase, r.kind, r.bytes): r.count for r in rows if r.axes == ("cp",) and r.kind != "all_reduce"}


@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("selective", 0), ("full", 1)])
def test_a_ring_passes_keys_and_values_in_one_message(recompute: str, again: int) -> None:
    """To three others; in backward once more, with their gradients behind them."""
    hops = 3 * LAYERS * ACCUM
    assert moved("ring", recompute) == {("forward", "send", KV): hops, ("backward", "send", KV): (2 + again) * hops}


@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("selective", 0), ("full", 1)])
def test_all_keys_are_gathered_in_one_buffer(recompute: str, again: int) -> None:
    times = LAYERS * ACCUM
    assert moved("all_gather", recompute) == {
        ("forward", "all_gather", 4 * KV): times,
        ("backward", "all_gather", 4 * KV): (1 + again) * times,
        ("backward", "reduce_scatter", 4 * KV): times,
    }


@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("selective", 1), ("full", 1)])
def test_ulysses_exchanges_twice(recompute: str, again: int) -> None:
    """Queries, keys and values in one buffer before attention, and what it gives after."""
    times = LAYERS * ACCUM
    assert moved("ulysses", recompute) == {
        ("forward", "all_to_all", Q + KV): times,
        ("forward", "all_to_all", Q): times,
        ("backward", "all_to_all", Q + KV): (1 + again) * times,
        ("backward", "all_to_all", Q): (1 + again) * times,
    }


def test_tensor_ranks_have_each_their_heads() -> None:
    """Half the heads, half the bytes; of eight ranks two share a key head, and each passes a whole one."""
    assert moved("ring", mesh=Mesh(cp=4, tp=2)) == {(phase, kind, size // 2): n for (phase, kind, size), n in moved("ring").items()}
    assert {size for _, _, size in moved("ring", mesh=Mesh(cp=4, tp=8))} == {KV // KV_HEADS}


def whole(name: str, way: ContextWay, cp: int) -> tuple[float, float]:
    """Wire bytes of one layer of a model at 8,192 tokens, forward and backward."""
    model = read_model(name)
    rows = ledger(rhythm(model, Layout(Mesh(cp=cp), context=way), Policy(), BF16, 8192))
    attention = [r for r in rows if r.axes == ("cp",) and r.kind != "all_reduce"]
    forward, backward = (sum(r.wire_bytes for r in attention if r.phase == phase) / model.num_layers for phase in ("forward", "backward"))
    return forward, backward


@pytest.mark.parametrize("cp", [2, 8])
def test_bytes_of_a_layer_are_those_of_the_papers(cp: int) -> None:
    """A ring: 2 b s/c k d of two bytes to each of c - 1 others, twice that in backward. Ulysses: (c - 1)/c of q, k, v and o each way.

    Source: Ring Attention (arXiv 2310.01889), DeepSpeed Ulysses (arXiv 2309.14509).
    """
    tokens, heads, kv_heads, head_dim = 8192 // cp, 32, 8, 128
    ring = 2 * tokens * kv_heads * head_dim * 2 * (cp - 1)
    assert whole("llama-3.1-8b", "ring", cp) == (ring, 2 * ring)
    assert whole("llama-3.1-8b", "all_gather", cp) == (ring, 2 * ring)
    ulysses = tokens * (2 * heads + 2 * kv_heads) * head_dim * 2 * (cp - 1) / cp
    assert whole("llama-3.1-8b", "ulysses", cp) == pytest.approx((ulysses, ulysses))


BELOW = ("*embed_tokens*", "model.layers.0.*")
OUT_ONLY = (*BELOW, "model.layers.1.input*", "model.layers.1.self_attn.[qkv]*")


@pytest.mark.parametrize(
    ("freeze", "mixing", "again"),
    [
        (("*embed_tokens*",), 3, 3),
        (BELOW, 2, 2),
        # The norm of keys stands after the projection of queries and before what leaves attention, whatever a module lists first.
        ((*BELOW, "model.layers.1.input*", "model.layers.1.self_attn.[qv]_proj*", "model.layers.1.self_attn.k_proj*"), 2, 2),
        (OUT_ONLY, 1, 2),
        ((*OUT_ONLY, "model.layers.1.self_attn.o*"), 1, 2),
        ((*BELOW, "model.layers.1.*"), 1, 1),
        (("*embed_tokens*", "model.layers.*"), 0, 0),
    ],
    ids=["embedding", "a block", "up to the norms", "up to the output", "all of attention", "two blocks", "all blocks"],
)
def test_attention_goes_back_as_far_as_gradients_do(freeze: tuple[str, ...], mixing: int, again: int) -> None:
    """Of three attentions `mixing` have a gradient, and `again` are computed again for that of their block."""
    model, forward = frozen(toy(), freeze), 3 * LAYERS * ACCUM
    back = {("backward", "send", KV): 3 * ACCUM * (2 * mixing + again)} if again else {}
    assert moved("ring", "full", model) == {("forward", "send", KV): forward} | back
    kept = {("backward", kind, 4 * KV): ACCUM * mixing for kind in ("all_gather", "reduce_scatter")} if mixing else {}
    assert moved("all_gather", "selective", model) == {("forward", "all_gather", 4 * KV): LAYERS * ACCUM} | kept
    exchanged = {("backward", "all_to_all", size): ACCUM * (mixing + again) for size in (Q + KV, Q)} if again else {}
    assert moved("ulysses", "full", model) == {("forward", "all_to_all", size): LAYERS * ACCUM for size in (Q + KV, Q)} | exchanged
