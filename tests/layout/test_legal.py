"""Layouts that cannot be: every reason at once, each with what would work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pentamesh.job.job import Batch
from pentamesh.layout.legal import grad_accum, problems
from pentamesh.layout.mesh import Layout, Mesh
from pentamesh.model.read import read_model

MODEL = read_model("llama-3.1-8b")


def whats(layout: Layout, **batch: Any) -> list[str]:
    return [p.what for p in problems(MODEL, layout, Batch(**batch))]


def test_a_legal_layout_has_no_problem() -> None:
    layout = Layout(Mesh(pp=2, dp_shard=2, tp=8), "parameters", sequence_parallel=True)
    assert whats(layout, global_batch=16, micro_batch=2) == []
    assert grad_accum(layout, Batch(global_batch=16, micro_batch=2)) == 4


def test_tensor_names_the_dim_and_the_tensor() -> None:
    phi = read_model("phi-4")  # 40 heads, 10 key heads, in one tensor with values
    (found,) = problems(phi, Layout(Mesh(tp=20)), Batch())
    assert "tensor = 20 does not divide" in found.what
    (first,) = problems(MODEL, Layout(Mesh(tp=64)), Batch())
    assert str(first) == (
        "error: tensor = 64 does not divide heads = 32\n"
        "  where  layout.tensor    model.layers.*.self_attn.q_proj.weight [heads*128, hidden]\n"
        "hint: use tensor = 32, 16, 8, 4, 2 or 1"
    )


def test_key_heads_are_shared_by_as_many_ranks_as_it_takes() -> None:
    assert whats(Layout(Mesh(tp=16))) == []
    gemma = read_model("gemma-3-1b-it")  # one key head for four
    assert problems(gemma, Layout(Mesh(tp=4)), Batch(seq_len=512)) == []


def test_all_at_once() -> None:
    layout = Layout(Mesh(pp=64, dp_shard=3, cp=2, tp=3, ep=2), "parameters")
    found = whats(layout, seq_len=4097, global_batch=16)
    for part in (
        "heads = 32",
        "kv_heads = 8",
        "pipeline = 64",
        "has no experts",
        "2 x context = 4",
        "x 3 = 3",
    ):
        assert any(part in what for what in found), part


@pytest.mark.parametrize(
    ("layout", "unit"),
    [
        (Layout(Mesh(cp=2, tp=2)), "2 x context = 4"),
        (Layout(Mesh(cp=2, tp=2), sequence_parallel=True), "2 x context x tensor = 8"),
        (Layout(Mesh(cp=4, tp=2), context="all_gather"), "2 x context = 8"),
        (Layout(Mesh(tp=4), sequence_parallel=True), "tensor = 4"),
    ],
)
def test_pieces_of_a_sequence(layout: Layout, unit: str) -> None:
    """A causal ring wants two pieces a rank; only sequence parallel cuts over tensor ranks too."""
    size = int(unit.rpartition(" ")[2])
    assert whats(layout, seq_len=8 * size) == []
    assert whats(layout, seq_len=8 * size + size // 2) == [f"seq_len = {8 * size + size // 2} is not a multiple of {unit}"]


@pytest.mark.parametrize(
    ("layout", "part"),
    [
        (Layout(Mesh(dp_shard=8), sequence_parallel=True), "tensor = 1"),
        (Layout(Mesh(cp=16), context="ulysses"), "over which Ulysses exchanges"),
        (Layout(Mesh(dp_replicate=8)), "micro_batch x data ranks = 3 x 8 = 24"),
    ],
)
def test_one_problem(layout: Layout, part: str) -> None:
    (found,) = whats(layout, micro_batch=3 if layout.mesh.dp_replicate > 1 else 1, global_batch=16)
    assert part in found


@pytest.mark.parametrize(
    ("mesh", "what", "hint"),
    [
        (Mesh(cp=16), "context = 16 does not divide kv_heads = 8", ", or context = 8, 4 or 2"),
        (Mesh(cp=4, tp=4), "context x tensor = 4 x 4 = 16 does not divide kv_heads = 8", ", or context = 2"),
        (Mesh(cp=2, tp=8), "context x tensor = 2 x 8 = 16 does not divide kv_heads = 8", ""),
        (Mesh(cp=2, tp=16), "context x tensor = 2 x 16 = 32 does not divide kv_heads = 8", ""),
        (Mesh(cp=3), "context = 3 does not divide kv_heads = 8", ", or context = 8, 4 or 2"),
    ],
    ids=str,
)
def test_ulysses_gives_each_rank_whole_key_heads(mesh: Mesh, what: str, hint: str) -> None:
    """Also where tensor ranks share one; the other ways pass whatever heads a rank has."""
    (found,) = problems(MODEL, Layout(mesh, context="ulysses"), Batch(seq_len=6144))
    assert found.what == f"{what}, over which Ulysses exchanges"
    assert found.where == "layout.context    model.layers.*.self_attn.k_proj.weight [kv_heads*128, hidden]"
    assert found.hint == f"use context_attention: ring or all_gather{hint}"
    for way in ("ring", "all_gather"):
        assert problems(MODEL, Layout(mesh, context=way), Batch(seq_len=6144)) == []


def test_what_attention_drops_context_ranks_do_not() -> None:
    gpt2 = read_model("gpt2")
    (found,) = problems(gpt2, Layout(Mesh(cp=2)), Batch(seq_len=512))
    assert "drops 10% of attention's weights at random: context = 2 ranks" in found.what
    assert problems(replace(gpt2, score_drop=0.0), Layout(Mesh(cp=2)), Batch(seq_len=512)) == []
    assert problems(gpt2, Layout(Mesh(tp=2)), Batch(seq_len=512)) == []


def test_an_undescribed_family_stays_on_the_data_axes() -> None:
    generic = read_model("llama-3.1-8b")
    object.__setattr__(generic, "family", "generic")
    (found,) = problems(generic, Layout(Mesh(tp=2, pp=2)), Batch())
    assert "not described" in found.what
    assert problems(generic, Layout(Mesh(dp_shard=8), "parameters"), Batch()) == []


def test_no_tensor_rank_is_left_with_nothing() -> None:
    """By twos nine rows are gone after five ranks; by fives thirty-six serve all eight."""
    (found,) = problems(replace(MODEL, vocab=9), Layout(Mesh(tp=8)), Batch())
    assert found.what == "tensor = 8 leaves the last rank nothing of vocab = 9"
    assert not problems(replace(MODEL, vocab=36), Layout(Mesh(tp=8)), Batch())


def test_a_table_of_positions_ends() -> None:
    """Where positions are rotated a longer sequence is only untrained; where they are looked up there is nothing to look up."""
    (found,) = problems(read_model("gpt2"), Layout(), Batch(seq_len=1025))
    assert found.what == "seq_len = 1025 is beyond the 1024 positions that openai-community/gpt2 has a table of"
    assert problems(MODEL, Layout(), Batch(seq_len=2**20)) == []


def test_tensor_names_the_fused_tensor_where_keys_have_none_of_their_own() -> None:
    (found,) = problems(read_model("gpt2"), Layout(Mesh(tp=8)), Batch(seq_len=1024))
    assert found.where == "layout.tensor    transformer.h.*.attn.c_attn.weight [hidden, heads*64]"
