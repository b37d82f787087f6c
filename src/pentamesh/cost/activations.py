"""What autograd keeps of a forward pass: an explicit list of saved tensors, each with named dims, so that `split` says what a rank holds.

The lists are those of transformers' modules with scaled-dot-product attention and the norms and gated products of pentamesh.run.lean, run
eagerly: for blocks of every described family they equal, to the byte, what saved-tensor hooks record, and under checkpointing what
stays allocated (tests/cost/test_activations.py). Fused kernels save less. What blocks of other families keep is estimated from the widths of
their tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pentamesh.job.precision import ITEMSIZE
from pentamesh.layout.mesh import DATA_AXES, Layout
from pentamesh.layout.policy import flash_knows, head_piece, scores_at_once
from pentamesh.layout.split import split
from pentamesh.model.dims import Dim, TensorSpec
from pentamesh.model.families.gpt2 import DROPOUT
from pentamesh.model.roles import Role
from pentamesh.model.spec import Kept, ModelSpec

__all__ = ["OF_MLP", "Recompute", "Saved", "Shapes", "again", "block", "head", "kept", "local_bytes", "local_tokens", "logits", "scores"]

Recompute = Literal["none", "selective", "full"]

# Of a block, what its first norm reads, and all that stays of it when it is computed again.
ENTERED = "block input"
_FLOAT32 = ITEMSIZE["float32"]
_INT64 = 8


@dataclass(frozen=True)
class Saved:
    """One tensor that waits for backward: its dims over the whole mesh, where it lives, and bytes per element."""

    name: str
    dims: tuple[Dim, ...]
    role: Role
    itemsize: int


@dataclass(frozen=True)
class Shapes:
    """Dims of one micro-batch over the whole mesh."""

    model: ModelSpec
    layout: Layout
    micro_batch: int
    seq_len: int

    def __call__(self, *last: Dim) -> tuple[Dim, ...]:
        return (Dim("batch", self.micro_batch * self.layout.mesh.degree(*DATA_AXES)), Dim("seq", self.seq_len), *last)

    @property
    def exchanges(self) -> bool:
        """Whether attention works on heads of whole rows."""
        return self.layout.mesh.cp > 1 and self.layout.context == "ulysses"

    @property
    def hidden(self) -> Dim:
        return Dim("hidden", self.model.hidden)

    @property
    def q(self) -> Dim:
        return Dim("heads", self.model.num_heads * self.model.head_dim, self.model.head_dim)

    @property
    def kv(self) -> Dim:
        return Dim("kv_heads", self.model.num_kv_heads * self.model.head_dim, self.model.head_dim)


def block(model: ModelSpec, layout: Layout, micro_batch: int, seq_len: int, compute: str) -> tuple[Saved, ...]:
    """What one block keeps between its forward and its backward; of a model of no described family an estimate of its mean block."""
    shapes, size = Shapes(model, layout, micro_batch, seq_len), ITEMSIZE[compute]
    if model.kept is not None:
        return _estimated(model.kept, shapes, size)
    norm, mlp = (_layer_norm, _plain_mlp) if model.family == "gpt2" else (_norm, _mlp)
    first, second = norm(ENTERED, "input_norm", shapes, size), norm("stream between", "post_norm", shapes, size)
    left = (_left(name, shapes, size) if model.norms_what_it_adds else () for name in ("attention projected", "MLP projected"))
    return (*first, *_attention(shapes, size), *next(left), *second, *mlp(shapes, size), *next(left), *_dropped(shapes))


def kept(model: ModelSpec, layout: Layout, micro_batch: int, seq_len: int, compute: str, recompute: Recompute) -> tuple[Saved, ...]:
    """What a block keeps when backward computes nothing of it again, all but its matmuls and attention, or the whole of it."""
    if recompute == "none":
        return block(model, layout, micro_batch, seq_len, compute)
    shapes, size = Shapes(model, layout, micro_batch, seq_len), ITEMSIZE[compute]
    entered = Saved(ENTERED, shapes(shapes.hidden), Role.CARRY, size)
    return (entered, *(_dear(shapes, size) if recompute == "selective" else ()))


def again(model: ModelSpec, layout: Layout, micro_batch: int, seq_len: int, compute: str, recompute: Recompute) -> tuple[Saved, ...]:
    """What the backward of one block computes again and then holds beside what was kept."""
    there = {saved.name for saved in kept(model, layout, micro_batch, seq_len, compute, recompute)}
    return tuple(saved for saved in block(model, layout, micro_batch, seq_len, compute) if saved.name not in there)


def head(model: ModelSpec, layout: Layout, micro_batch: int, seq_len: int, compute: str) -> tuple[Saved, ...]:
    """What is kept once per micro-batch beside the blocks: ids, labels, rotary tables and the final norm."""
    shapes, size = Shapes(model, layout, micro_batch, seq_len), ITEMSIZE[compute]
    # Of a part of a row each token's position is told beside them.
    alone = layout.mesh.cp == 1
    ids = Saved("ids and labels", shapes(Dim("kinds", 2 if alone else 3)), Role.USE, _INT64)
    if model.family == "gpt2":
        return (ids, *_layer_norm("last stream", "final_norm", shapes, size))
    rotary = ((Dim("seq", seq_len), width) if alone else shapes(width) for width in (Dim("head_dim", width) for width in model.rotary))
    tables = tuple(Saved(name, dims, Role.USE, size) for dims in rotary for name in ("cos", "sin"))
    return (ids, *tables, *_norm("last stream", "final_norm", shapes, size))


def logits(model: ModelSpec, layout: Layout, micro_batch: int, seq_len: int, compute: str, kind: str, *, frozen: bool = False) -> tuple[Saved, ...]:
    """What the head and its loss hold at their fullest, piece by piece as pentamesh.run.head computes them on a device of this `kind`.

    The logits of a piece, which become their own gradients, and these as matmuls read them; the gradients of the stream and of the head. Of what
    no family describes, the logits of all tokens when backward leaves the loss: log-probabilities that log_softmax saved, the dense gradient of
    the picked ones and the gradient of the logits. Source: torch `cross_entropy` = log_softmax + nll_loss.
    """
    shapes, size = Shapes(model, layout, micro_batch, seq_len), ITEMSIZE[compute]
    wide, vocab = max(_FLOAT32, size), Dim("vocab", model.vocab)
    if not model.is_described:
        return tuple(Saved(name, shapes(vocab), Role.USE, wide) for name in ("log-probabilities", "their gradient", "gradient of logits"))
    tokens = local_tokens(layout, micro_batch, seq_len)
    piece = head_piece(tokens, model.vocab, layout.mesh.tp, kind)
    cast = size if size != wide else 0
    capped = wide if model.logit_cap else 0  # their slope follows from what they were before the cap
    there = (
        Saved("logits", (Dim("piece", piece), vocab), Role.USE, wide + cast + capped),
        Saved("gradient of the stream", shapes(shapes.hidden), Role.USE, size),
    )
    # Of several pieces it is a sum in full width, then cast.
    own = Saved("gradient of the head", (vocab, shapes.hidden), Role.USE, wide + cast if piece < tokens else size)
    return there if frozen else (*there, own)


def scores(model: ModelSpec, layout: Layout, micro_batch: int, seq_len: int, compute: str, kind: str, *, packed: bool) -> int:
    """Bytes of the scores that the backward of attention holds at a time where no fused kernel computes it (pentamesh.run.blocks): weights, their
    gradient and that of scores, what slopes follow from, and one of them as matmuls read it. Of packed samples one at a time, as long as a row at
    most."""
    whole_rows = layout.mesh.cp == 1 or layout.context == "ulysses"
    fused = kind == "cpu" or flash_knows(compute, model.head_dim)
    if packed and whole_rows and kind == "cuda" and fused and not model.score_cap:
        return 0  # one kernel for all samples, windows and all
    # Of context ranks those under Ulysses have a part of the heads; of keys one block after the other is there round a ring, and all where gathered.
    size, cp = ITEMSIZE[compute], layout.mesh.cp
    heads = (1 if packed else micro_batch) * -(-model.num_heads // (layout.mesh.tp * (cp if layout.context == "ulysses" else 1)))
    length = -(-seq_len // cp) if layout.context == "ring" else seq_len
    written_out = model.score_cap or (not fused and (packed or not whole_rows))
    windows = {window for window in model.windows if window and window < seq_len} | ({None} if written_out else set())
    pieces = [math.prod(scores_at_once(heads, length, window, kind)) for window in windows]
    return max(pieces, default=0) * heads * ((4 if model.score_cap else 3) * max(_FLOAT32, size) + size)


def local_bytes(saved: tuple[Saved, ...], layout: Layout) -> int:
    """Bytes that the fullest rank holds of all of `saved`."""
    return sum(split(TensorSpec(s.name, s.dims), s.role, layout).max_local_numel * s.itemsize for s in saved)


def local_tokens(layout: Layout, micro_batch: int, seq_len: int) -> int:
    """Tokens of a micro-batch that one rank computes: context ranks share a sequence."""
    return micro_batch * -(-seq_len // layout.mesh.cp)


def _norm(read: str, name: str, shapes: Shapes, size: int) -> Iterator[Saved]:
    """An RMS norm of the stream: what it reads and 1/rms, and the output for the next matmul."""
    stream = shapes(shapes.hidden)
    yield Saved(read, stream, Role.CARRY, size)
    yield Saved(f"{name} 1/rms", shapes(), Role.CARRY, max(_FLOAT32, size))
    yield Saved(f"{name} output", stream, Role.USE, size)


def _left(read: str, shapes: Shapes, size: int) -> Iterator[Saved]:
    """An RMS norm of what a sublayer leaves: what it reads and 1/rms; its output is added and forgotten."""
    yield Saved(read, shapes(shapes.hidden), Role.CARRY, size)
    yield Saved(f"{read} 1/rms", shapes(), Role.CARRY, max(_FLOAT32, size))


def _layer_norm(read: str, name: str, shapes: Shapes, size: int) -> Iterator[Saved]:
    """A LayerNorm of the stream: its input, mean and 1/deviation, and the output for the next matmul."""
    yield Saved(read, shapes(shapes.hidden), Role.CARRY, size)
    yield Saved(f"{name} mean and 1/deviation", shapes(Dim("pair", 2)), Role.CARRY, size)
    yield Saved(f"{name} output", shapes(shapes.hidden), Role.USE, size)


def _attention(shapes: Shapes, size: int) -> Iterator[Saved]:
    """Queries, keys and values after rotation, the output (which o_proj also reads) and the log-sum-exp; under Ulysses as heads of whole rows, and
    what o_proj reads apart from these."""
    if any(".q_norm." in t.name for t in shapes.model.block):
        for name, dim, heads in (("q_norm", shapes.q, "heads"), ("k_norm", shapes.kv, "kv_heads")):
            yield Saved(f"{name} input", shapes(dim), Role.USE, size)
            yield Saved(f"{name} 1/rms", shapes(Dim(heads, dim.num_units)), Role.USE, max(_FLOAT32, size))
    if shapes.model.family == "glm4":
        # Its rotation reads each cosine twice in a row, anew in every block.
        for name in ("cos by pairs", "sin by pairs"):
            yield Saved(name, (Dim("seq", shapes.seq_len), Dim("head_dim", shapes.model.rotary[0])), Role.USE, size)
    yield Saved("queries", shapes(shapes.q), Role.ATTEND, size)
    yield Saved("keys", shapes(shapes.kv), Role.ATTEND, size)
    if any(".qkv_proj." in t.name for t in shapes.model.block) and not shapes.exchanges:
        # Values are a view of what was projected as one.
        for name, dim in (("projected queries", shapes.q), ("projected keys", shapes.kv)):
            yield Saved(name, shapes(dim), Role.USE, size)
    yield Saved("values", shapes(shapes.kv), Role.ATTEND, size)
    yield from _attended(shapes, size)
    if shapes.exchanges:
        yield Saved("output exchanged back", shapes(shapes.q), Role.USE, size)


def _attended(shapes: Shapes, size: int) -> Iterator[Saved]:
    """What attention gives: its output, and the log-sum-exp of each query's scores."""
    yield Saved("heads of whole rows" if shapes.exchanges else "attention output", shapes(shapes.q), Role.ATTEND, size)
    yield Saved("log-sum-exp", shapes(Dim("heads", shapes.model.num_heads)), Role.ATTEND, _FLOAT32)


def _dear(shapes: Shapes, size: int) -> Iterator[Saved]:
    """What matmuls and attention gave, whether or not backward asks for it: the recomputation has it from here."""
    model = shapes.model
    if model.kept is not None:
        yield Saved("beside matmuls", shapes(Dim("matmuls", model.kept.by_matmuls)), Role.USE, size)
    else:
        # Without rotation, attention reads what was projected.
        as_read = model.learns_positions and not shapes.exchanges
        queries, keys = ("queries", "keys") if as_read else ("projected queries", "projected keys")
        values = "projected values" if shapes.exchanges else "values"
        for name, dim in ((queries, shapes.q), (keys, shapes.kv), (values, shapes.kv)):
            yield Saved(name, shapes(dim), Role.USE if name.startswith("projected") else Role.ATTEND, size)
        yield from _attended(shapes, size)
        for name in ("up",) if model.family == "gpt2" else ("gate", "up"):
            yield Saved(name, shapes(Dim("ffn", model.ffn)), Role.USE, size)
    for name in ("attention projected", "MLP projected"):
        yield Saved(name, shapes(shapes.hidden), Role.USE, size)


def _estimated(kept: Kept, shapes: Shapes, size: int) -> tuple[Saved, ...]:
    """By widths alone: what matmuls read and write, norms as transformers writes them out, and the log-sum-exp of attention."""
    matmuls, norms, heads = Dim("matmuls", kept.by_matmuls), Dim("norms", kept.by_norms), Dim("heads", shapes.model.num_heads)
    return (
        Saved("beside matmuls", shapes(matmuls), Role.USE, size),
        Saved("norm inputs in float32", shapes(norms), Role.CARRY, max(_FLOAT32, size)),
        Saved("norms normalised and out", shapes(norms), Role.CARRY, 2 * size),
        Saved("log-sum-exp", shapes(heads), Role.USE, _FLOAT32),
    )


def _mlp(shapes: Shapes, size: int) -> Iterator[Saved]:
    """A gated MLP: gate, up, and the product that down_proj reads."""
    for name in ("gate", "up", "product"):
        yield Saved(name, shapes(Dim("ffn", shapes.model.ffn)), Role.USE, size)


# What activation functions keep where no gate follows, besides what the next matmul reads: that of transformers' `gelu_new` is written out in
# five operations, that of a rectifier is its own output.
_KEPT_BY = {"gelu_new": ("up", "half of up", "tanh", "1 + tanh"), "relu": ()}


# What the MLP keeps beside what it reads; its backward has let go of these when that of attention begins.
OF_MLP = frozenset(("gate", "up", "product", "half of up", "tanh", "1 + tanh", "activated"))


def _plain_mlp(shapes: Shapes, size: int) -> Iterator[Saved]:
    """An MLP without a gate: what its activation function keeps, and what the second matmul reads."""
    function = shapes.model.config.get("activation_function", "gelu_new")
    for name in (*_KEPT_BY.get(function, ("up",)), "activated"):
        yield Saved(name, shapes(Dim("ffn", shapes.model.ffn)), Role.USE, size)


def _dropped(shapes: Shapes) -> Iterator[Saved]:
    """One byte for each element that dropout may drop of what a sublayer leaves; attention draws its own again. Source: torch `native_dropout`."""
    if shapes.model.family == "gpt2" and shapes.model.config.get("resid_pdrop", DROPOUT["resid_pdrop"]):
        for name in ("attention dropped", "MLP dropped"):
            yield Saved(name, shapes(shapes.hidden), Role.CARRY, 1)
