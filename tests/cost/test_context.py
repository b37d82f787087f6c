"""Context parallel by arithmetic: what attention holds and keeps, and which of its messages hide."""

from __future__ import annotations

import pytest

from pentamesh.cost.activations import again, block, head, kept
from pentamesh.cost.attention import scores
from pentamesh.cost.compute import Work, work
from pentamesh.cost.context import meeting
from pentamesh.cost.holding import Holding
from pentamesh.cost.memory import memory
from pentamesh.cost.network import group, seconds
from pentamesh.cost.predict import predict
from pentamesh.cost.saved import local_bytes
from pentamesh.cost.traffic import Flow, communication, flows
from pentamesh.job.division import CONTEXT_WAYS, ContextWay
from pentamesh.job.hardware import read_hardware
from pentamesh.job.job import Batch
from pentamesh.job.precision import PRECISIONS
from pentamesh.layout.crossings import ledger
from pentamesh.layout.mesh import Layout, Mesh, Shard
from pentamesh.layout.moves import Move
from pentamesh.layout.policy import Policy
from pentamesh.layout.rhythm import rhythm
from pentamesh.model.config import canonical
from pentamesh.model.families import describe
from pentamesh.model.read import read_model
from tests.cost.test_activations import CONFIG

MODEL, BF16, MACHINE = read_model("llama-3.1-8b"), PRECISIONS["bf16"], read_hardware("8xH100")
SEQ, LOCAL = 131072, 131072 // 8
# Elements of one rank of eight: queries (or the output), and keys with values.
Q, KV = LOCAL * 32 * 128, 2 * LOCAL * 8 * 128


def laid(way: ContextWay, shard: Shard = "parameters", cp: int = 8) -> Layout:
    return Layout(Mesh(dp_shard=8 // cp, cp=cp), shard, context=way)


# Memory.


@pytest.mark.parametrize(
    ("way", "forward", "backward"),
    [
        # Two blocks of keys and values; the output in float32, or in float32 the gradients of queries, of own keys and of those at hand, and two of
        # these on their way.
        ("ring", 2 * 2 * KV + 4 * Q, 2 * 2 * KV + 4 * Q + 2 * 4 * KV + 2 * 2 * KV),
        ("all_gather", 2 * 8 * KV, (2 + 4 + 2) * 8 * KV),
        # What leaves; the gradients of all three before and after, and that of the output.
        ("ulysses", 2 * (Q + KV), 2 * 2 * (Q + KV) + 2 * Q),
    ],
)
def test_what_attention_holds_of_others(way: ContextWay, forward: int, backward: int) -> None:
    found = [local_bytes(meeting(MODEL, laid(way), 1, SEQ, "bfloat16", backward=back), laid(way)) for back in (False, True)]
    assert found == [forward, backward]
    assert meeting(MODEL, Layout(Mesh(dp_shard=8)), 1, SEQ, "bfloat16", backward=True) == ()


def test_a_ring_never_holds_all_keys() -> None:
    """The more ranks the less: what is gathered is as much however many there are."""
    held = {(way, cp): local_bytes(meeting(MODEL, laid(way, cp=cp), 1, SEQ, "bfloat16", backward=True), laid(way, cp=cp))
            for way in ("ring", "all_gather") for cp in (2, 8)}  # fmt: skip
    assert held["ring", 2] == 4 * held["ring", 8]
    assert held["all_gather", 2] == held["all_gather", 8] == 8 * 2 * SEQ * 8 * 128


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "glm4"])
def test_a_rank_keeps_its_share(family: str, recompute: str) -> None:
    """A fourth of everything; Ulysses' output besides, which o_proj reads where it came from."""
    model = describe(canonical(CONFIG | {"model_type": family, "num_key_value_heads": 4}), "toy")
    assert model is not None

    def size(layout: Layout, listed=kept) -> int:
        return local_bytes(listed(model, layout, 2, 64, "bfloat16", recompute), layout)

    for listed in (kept, again):
        whole = size(Layout(), listed)
        for way in ("ring", "all_gather"):
            assert 4 * size(laid(way, cp=4), listed) == whole
    ulysses, returned = laid("ulysses", cp=4), 2 * 2 * 64 * 8 * 16
    # Selective recompute keeps what was projected, and computes what attention read of it again on the other side: values too.
    twice = 2 * 2 * 64 * 4 * 16 if recompute == "selective" else 0
    assert 4 * (size(ulysses) + size(ulysses, again)) == size(Layout()) + size(Layout(), again) + returned + twice


def test_beside_the_blocks_a_rank_has_its_own_tokens() -> None:
    """Ids, labels and positions; a cosine for each; what the last norm keeps."""
    sizes = {saved.name: local_bytes((saved,), laid("ring")) for saved in head(MODEL, laid("ring"), 1, SEQ, "bfloat16")}
    assert sizes["ids and labels"] == 3 * 8 * LOCAL
    assert sizes["cos"] == sizes["sin"] == 2 * 128 * LOCAL
    assert sizes["last stream"] == 2 * 4096 * LOCAL


def test_scores_of_a_rank() -> None:
    """A window's worth against two windows in each way; capped scores see a block, all keys, or all keys for a part of the heads."""
    gemma = read_model("gemma-2-9b")
    held = {way: scores(gemma, laid(way), 1, SEQ, "bfloat16", "cuda", packed=False) for way in CONTEXT_WAYS}
    assert held["ring"] < held["all_gather"]
    assert held["ulysses"] < held["all_gather"]


@pytest.mark.parametrize("way", CONTEXT_WAYS)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_parts_add_up(way: ContextWay, recompute: str) -> None:
    policy, batch = Policy(recompute=recompute), Batch(seq_len=SEQ)  # type: ignore[arg-type]
    found = memory(Holding(MODEL, laid(way)), policy, BF16, batch, usable_bytes=10**11, kind="cuda")
    assert sum(found.parts_bytes.values()) == pytest.approx(found.peak_bytes.expected, abs=10)


def test_gathered_keys_are_fullest_where_ranks_are_many() -> None:
    """A million tokens over 32: everything else is cut, and plan shows what is not."""

    def over(way: ContextWay):
        layout = Layout(Mesh(cp=32), "parameters", context=way)
        return memory(Holding(MODEL, layout), Policy(recompute="full"), BF16, Batch(seq_len=8 * SEQ), usable_bytes=10**11, kind="cuda")

    assert over("all_gather").parts_bytes["context"] == 8 * 2 * 8 * SEQ * 8 * 128
    assert over("ring").peak_bytes.expected < over("all_gather").peak_bytes.expected - 10e9


# Time.


def timed(way: ContextWay, seq_len: int, on: str = "8xH100", shard: Shard = "parameters") -> tuple[tuple[Flow, ...], Work, dict[str, float]]:
    held, policy, machine = Holding(MODEL, laid(way, shard), "full"), Policy(recompute="full"), read_hardware(on)
    found, computing = flows(held, policy, BF16, seq_len, machine), work(held, policy, BF16, Batch(seq_len=seq_len), machine.device)
    table = communication(found, policy, computing, machine.device.kind, bucketed=shard == "none")
    return found, computing, {c.kind: c.exposed_s for c in table}


def test_a_ring_hides_behind_attention_where_rows_are_long() -> None:
    _, _, exposed = timed("ring", SEQ)
    assert exposed["send"] == 0
    found, computing, exposed = timed("ring", 2048)
    (forward,) = (f for f in found if f.row.kind == "send" and f.row.phase == "forward")
    hop = seconds(Move("send", ("cp",), 8, 2 * 2 * 256 * 8 * 128), group(laid("ring").mesh, ("cp",), 8), MACHINE)
    assert forward.each_s == pytest.approx(hop)
    ((attention_s, layers),) = computing.attention
    assert layers == 32
    assert attention_s / 8 < hop
    assert exposed["send"] == pytest.approx(4 * 7 * 32 * (hop - attention_s / 8))  # forward, again, and backward with two messages


def test_gathers_and_exchanges_are_waited_for() -> None:
    """What is gathered of keys goes over the ranks that parameters are gathered over, which do hide."""
    found, _, exposed = timed("all_gather", SEQ)
    keys = [f for f in found if f.row.axes == ("cp",) and not f.of_parameters and f.row.phase != "step"]
    assert {f.row.kind for f in keys} == {"all_gather", "reduce_scatter"}
    waited = sum(f.seconds for f in keys)
    parameters = sum(f.seconds for f in found if f.of_parameters)
    assert waited < sum(exposed.values()) < waited + 0.2 * parameters
    found, _, exposed = timed("ulysses", SEQ)
    assert exposed["all_to_all"] == pytest.approx(sum(f.seconds for f in found if f.row.kind == "all_to_all"))


@pytest.mark.parametrize("way", CONTEXT_WAYS)
def test_rows_are_those_of_the_rhythm(way: ContextWay) -> None:
    for shard in ("none", "parameters"):
        found = flows(Holding(MODEL, laid(way, shard)), Policy(), BF16, SEQ, MACHINE)
        assert sorted(f.row for f in found) == ledger(rhythm(MODEL, laid(way, shard), Policy(), BF16, SEQ))


def test_adapters_move_keys_as_their_base_does() -> None:
    """Of the base in four bits parameters are small; keys are as wide as ever, and counted once."""
    full, qlora = (flows(Holding(MODEL, laid("all_gather"), method), Policy(), BF16, SEQ, MACHINE) for method in ("full", "qlora"))
    assert [f.row for f in full if not f.of_parameters] == [f.row for f in qlora if not f.of_parameters]


def test_work_is_even() -> None:
    """Eight ranks compute what one would, an eighth each, but for what they copy."""
    alone = work(Holding(MODEL, Layout()), Policy(), BF16, Batch(seq_len=SEQ), MACHINE.device)
    for way in CONTEXT_WAYS:
        found = work(Holding(MODEL, laid(way, "none")), Policy(), BF16, Batch(seq_len=SEQ), MACHINE.device)
        assert alone.forward_s / 8 < found.forward_s < 1.05 * alone.forward_s / 8
        assert found.attention[0][0] == pytest.approx(alone.attention[0][0] / 8)


def test_windows_leave_a_ring_little_to_hide_behind() -> None:
    gemma = read_model("gemma-2-9b")
    found = work(Holding(gemma, laid("ring")), Policy(), BF16, Batch(seq_len=SEQ), MACHINE.device)
    (slides, half), (sees, other) = sorted(found.attention)
    assert (half, other) == (21, 21)
    assert slides < sees / 7


def test_nothing_hides_on_cpu() -> None:
    found, _, exposed = timed("ring", 2048, "8xCPU")
    assert sum(exposed.values()) == pytest.approx(sum(f.seconds for f in found))


def test_the_mlp_has_gone_back_before_attention_does() -> None:
    held, batch = Holding(MODEL, laid("ring")), Batch(seq_len=SEQ)
    found = predict(held, Policy(recompute="full"), BF16, batch, MACHINE)
    assert found.memory.parts_bytes["context"] == 0
    assert local_bytes(block(MODEL, laid("ring"), 1, SEQ, "bfloat16"), laid("ring")) < found.memory.parts_bytes["activations"]


def test_copies_over_context_ranks_have_gradients_in_buckets() -> None:
    """As over data ranks: they are there before the first backward."""
    small, batch = read_model("smollm2-135m"), Batch(seq_len=4096, global_batch=1)
    for mesh in (Mesh(dp_replicate=2), Mesh(cp=2)):
        found = memory(Holding(small, Layout(mesh)), Policy(), BF16, batch, usable_bytes=10**11, kind="cuda")
        assert found.parts_bytes["gradients"] == 4 * small.num_parameters
    alone = memory(Holding(small, Layout()), Policy(), BF16, batch, usable_bytes=10**11, kind="cuda")
    assert alone.parts_bytes["gradients"] < 4 * small.num_parameters
