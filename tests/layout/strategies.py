"""Small meshes, layouts and tensors for hypothesis: uneven sizes, empty shares, grains, fused parts and experts among them."""

from __future__ import annotations

from hypothesis import strategies as st

from pentamesh.layout.mesh import Layout, Mesh
from pentamesh.model.dims import Dim, TensorSpec

MAX_RANKS = 24
_degree = st.sampled_from([1, 1, 2, 3, 4])


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """A mesh of at most 24 ranks, experts on any divisor of its inner ranks."""
    degrees, left = [], MAX_RANKS
    for _ in range(5):
        degrees.append(min(draw(_degree), left))
        left //= degrees[-1]
    inner = degrees[2] * degrees[3] * degrees[4]
    ep = draw(st.sampled_from([d for d in range(1, inner + 1) if inner % d == 0]))
    return Mesh(*degrees, ep=ep)


def layouts() -> st.SearchStrategy[Layout]:
    return st.builds(
        Layout,
        mesh=meshes(),
        shard=st.sampled_from(["none", "optimizer", "gradients", "parameters"]),
        sequence_parallel=st.booleans(),
        context=st.sampled_from(["ring", "all_gather", "ulysses"]),
    )


@st.composite
def dims(draw: st.DrawFn, *names: str) -> Dim:
    """A dim of a few units; heads have a grain, and some dims are fused from unequal parts."""
    name = draw(st.sampled_from(names))
    grain = draw(st.integers(1, 3)) if name in ("heads", "kv_heads") else 1
    parts = tuple(grain * units for units in draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    return Dim(name, sum(parts), grain, parts if len(parts) > 1 else ())


@st.composite
def dense_tensors(draw: st.DrawFn) -> TensorSpec:
    """A parameter of one or two dims, of which at most one has an axis of its own."""
    first, second = dims("heads", "kv_heads", "ffn", "vocab", "hidden"), st.builds(Dim, st.just("head_dim"), st.integers(1, 4))
    return TensorSpec("weight", (draw(first), *draw(st.lists(second, max_size=1))))


@st.composite
def expert_tensors(draw: st.DrawFn) -> TensorSpec:
    """Stacked experts: [experts], [experts, ffn] or [experts, ffn, hidden], in either order of the last two."""
    inner = draw(st.permutations([draw(dims("ffn")), Dim("hidden", draw(st.integers(1, 3)))]))
    return TensorSpec("experts", (Dim("experts", draw(st.integers(1, 6))), *inner[: draw(st.integers(0, 2))]))


def tensors() -> st.SearchStrategy[TensorSpec]:
    return st.one_of(dense_tensors(), expert_tensors())


@st.composite
def activations(draw: st.DrawFn) -> TensorSpec:
    """An activation [batch, seq or kv_seq, hidden or heads]."""
    sequence, last = draw(st.sampled_from([("seq", "hidden"), ("seq", "heads"), ("kv_seq", "kv_heads")]))
    return TensorSpec(
        "activation", (Dim("batch", draw(st.integers(1, 6))), Dim(sequence, draw(st.integers(1, 9))), Dim(last, draw(st.integers(1, 9))))
    )
