"""What the attention of a block keeps for backward, by its kind, and the scores that it holds at a time where no fused kernel computes it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pentamesh.cost.saved import FLOAT32, Saved, Shapes
from pentamesh.job.precision import ITEMSIZE
from pentamesh.layout.mesh import Layout
from pentamesh.layout.policy import flash_knows, scores_at_once
from pentamesh.model.dims import Dim
from pentamesh.model.roles import Role
from pentamesh.model.spec import Latent, ModelSpec

__all__ = ["attention", "attention_given", "scores"]


def attention(shapes: Shapes, size: int) -> Iterator[Saved]:
    """Queries, keys and values after rotation, the output (which o_proj also reads) and the log-sum-exp; under Ulysses as heads of whole rows, and
    what o_proj reads apart from these."""
    if shapes.model.latent is not None:
        yield from _pressed(shapes, shapes.model.latent, size)
    else:
        yield from _projected(shapes, size)
    yield from _attended(shapes, size)
    if shapes.exchanges:
        yield Saved("output exchanged back", shapes(shapes.out), Role.USE, size)


def attention_given(shapes: Shapes, size: int) -> Iterator[Saved]:
    """What the matmuls of attention and attention itself gave, but for what is left to the stream: what `selective` keeps."""
    model = shapes.model
    if model.latent is not None:
        yield from _latents(shapes, model.latent, size)
        for name, dim in (("projected queries", shapes.q), (KEYS_AND_VALUES, _keys_and_values(shapes, model.latent))):
            yield Saved(name, shapes(dim), Role.USE, size)
    else:
        # Without rotation, attention reads what was projected.
        as_read = model.learns_positions and not shapes.exchanges
        queries, keys = ("queries", "keys") if as_read else ("projected queries", "projected keys")
        values = "projected values" if shapes.exchanges else "values"
        for name, dim in ((queries, shapes.q), (keys, shapes.k), (values, shapes.v)):
            yield Saved(name, shapes(dim), Role.USE if name.startswith("projected") else Role.ATTEND, size)
    yield from _attended(shapes, size)


def _projected(shapes: Shapes, size: int) -> Iterator[Saved]:
    """Of queries, keys and values that are each projected from the stream."""
    if any(".q_norm." in t.name for t in shapes.model.block):
        for name, dim, heads in (("q_norm", shapes.q, "heads"), ("k_norm", shapes.k, "kv_heads")):
            yield Saved(f"{name} input", shapes(dim), Role.USE, size)
            yield Saved(f"{name} 1/rms", shapes(Dim(heads, dim.num_units)), Role.USE, max(FLOAT32, size))
    if shapes.model.family == "glm4":
        # Its rotation reads each cosine twice in a row, anew in every block.
        for name in ("cos by pairs", "sin by pairs"):
            yield Saved(name, (Dim("seq", shapes.seq_len), Dim("head_dim", shapes.model.rotary[0])), Role.USE, size)
    yield Saved("queries", shapes(shapes.q), Role.ATTEND, size)
    yield Saved("keys", shapes(shapes.k), Role.ATTEND, size)
    if any(".qkv_proj." in t.name for t in shapes.model.block) and not shapes.exchanges:
        # Values are a view of what was projected as one.
        for name, dim in (("projected queries", shapes.q), ("projected keys", shapes.k)):
            yield Saved(name, shapes(dim), Role.USE, size)
    yield Saved("values", shapes(shapes.v), Role.ATTEND, size)


# Of each head, which a latent becomes in one projection: keys, but for what is rotated, and values.
KEYS_AND_VALUES = "projected keys and values"


def _pressed(shapes: Shapes, latent: Latent, size: int) -> Iterator[Saved]:
    """Of multi-head latent attention: what is pressed into latents, their norms, and what attention reads. Values are a view of what was projected
    together with keys, unless they are exchanged."""
    yield from _latents(shapes, latent, size)
    for whose, width in (("queries", latent.queries), ("keys", latent.keys)):
        if width:
            yield Saved(f"latent {whose} 1/rms", shapes(), Role.USE, max(FLOAT32, size))
            yield Saved(f"latent {whose} normed", shapes(Dim("latent", width)), Role.USE, size)
    yield Saved("queries", shapes(shapes.q), Role.ATTEND, size)
    yield Saved("keys", shapes(shapes.k), Role.ATTEND, size)
    if shapes.exchanges:
        yield Saved("values", shapes(shapes.v), Role.ATTEND, size)
    else:
        yield Saved(KEYS_AND_VALUES, shapes(_keys_and_values(shapes, latent)), Role.USE, size)


def _latents(shapes: Shapes, latent: Latent, size: int) -> Iterator[Saved]:
    """What is projected to latents, whole on every tensor rank; with that of keys the part of them that all heads share."""
    if latent.queries:
        yield Saved("latent queries", shapes(Dim("latent", latent.queries)), Role.USE, size)
    yield Saved("latent keys", shapes(Dim("latent", latent.keys + latent.rotated)), Role.USE, size)


def _keys_and_values(shapes: Shapes, latent: Latent) -> Dim:
    each = shapes.k.grain - latent.rotated + shapes.v.grain
    return Dim("heads", shapes.model.num_heads * each, each)


def _attended(shapes: Shapes, size: int) -> Iterator[Saved]:
    """What attention gives: its output, and the log-sum-exp of each query's scores."""
    yield Saved("heads of whole rows" if shapes.exchanges else "attention output", shapes(shapes.out), Role.ATTEND, size)
    yield Saved("log-sum-exp", shapes(Dim("heads", shapes.model.num_heads)), Role.ATTEND, FLOAT32)


def scores(model: ModelSpec, layout: Layout, micro_batch: int, seq_len: int, compute: str, kind: str, *, packed: bool) -> int:
    """Bytes of the scores that the backward of attention holds at a time where no fused kernel computes it (pentamesh.run.blocks): weights, their
    gradient and that of scores, what slopes follow from, and one of them as matmuls read it. Of packed samples one at a time, as long as a row at
    most."""
    whole_rows = layout.mesh.cp == 1 or layout.context == "ulysses"
    fused = kind == "cpu" or flash_knows(compute, model.head_dim)
    one_kernel = not model.score_cap and not _has_sinks(model) and model.latent is None
    if packed and whole_rows and kind == "cuda" and fused and one_kernel:
        return 0  # for all samples, windows and all
    # Of context ranks those under Ulysses have a part of the heads; of keys one block after the other is there round a ring, and all where gathered.
    size, cp = ITEMSIZE[compute], layout.mesh.cp
    heads = (1 if packed else micro_batch) * -(-model.num_heads // (layout.mesh.tp * (cp if layout.context == "ulysses" else 1)))
    length = -(-seq_len // cp) if layout.context == "ring" else seq_len
    written_out = model.score_cap or (not fused and (packed or not whole_rows))
    windows = {window for window in model.windows if window and window < seq_len} | ({None} if written_out else set())
    pieces = [math.prod(scores_at_once(heads, length, window, kind)) for window in windows]
    return max(pieces, default=0) * heads * ((4 if model.score_cap else 3) * max(FLOAT32, size) + size)


def _has_sinks(model: ModelSpec) -> bool:
    """Whether each head has a score of nothing seen, which is not known to the kernel for samples of uneven length."""
    return any(t.kind == "sink" for t in model.block)
