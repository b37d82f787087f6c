"""What autograd keeps of a forward pass: an explicit list of saved tensors, each with named dims, so that `split` says what a rank holds.

The lists are those of transformers' modules with scaled-dot-product attention and the norms and gated products of pentamesh.run.lean, run
eagerly: for blocks of every described family they equal, to the byte, what saved-tensor hooks record, and under checkpointing what
stays allocated (tests/cost/test_activations.py). Fused kernels save less. What blocks of other families keep is estimated from the widths of
their tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pentamesh.cost.attention import attention, attention_given
from pentamesh.cost.experts import OF_EXPERTS, chosen, routed, routed_given, shared, shared_given
from pentamesh.cost.saved import FLOAT32, INT64, Saved, Shapes, local_tokens
from pentamesh.job.precision import ITEMSIZE
from pentamesh.layout.mesh import Layout
from pentamesh.layout.policy import head_piece
from pentamesh.model.dims import Dim
from pentamesh.model.families.gpt2 import DROPOUT
from pentamesh.model.roles import Role
from pentamesh.model.spec import Experts, Kept, ModelSpec

__all__ = ["ENTERED", "OF_MLP", "Recompute", "again", "block", "head", "kept", "logits"]

Recompute = Literal["none", "selective", "full"]

# Of a block, what its first norm reads, and all that stays of it when it is computed again.
ENTERED = "block input"


def block(model: ModelSpec, layout: Layout, micro_batch: int, seq_len: int, compute: str, *, sparse: bool = False) -> tuple[Saved, ...]:
    """What one block keeps between its forward and its backward, one with experts where it is `sparse`; of a model of no described family an estimate
    of its mean block."""
    shapes, size = Shapes(model, layout, micro_batch, seq_len), ITEMSIZE[compute]
    if model.kept is not None:
        return _estimated(model.kept, shapes, size)
    norm, mlp = (_layer_norm, _plain_mlp) if model.family == "gpt2" else (_norm, _mlp)
    first = norm(ENTERED, "input_norm", shapes, size)
    if sparse:
        assert model.experts is not None
        return (*first, *attention(shapes, size), *_sparse_mlp(shapes, model.experts, size))
    second = norm("stream between", "post_norm", shapes, size)
    left = (_left(name, shapes, size) if model.norms_what_it_adds else () for name in ("attention projected", "MLP projected"))
    return (*first, *attention(shapes, size), *next(left), *second, *mlp(shapes, size), *next(left), *_dropped(shapes))


def kept(
    model: ModelSpec, layout: Layout, micro_batch: int, seq_len: int, compute: str, recompute: Recompute, *, sparse: bool = False
) -> tuple[Saved, ...]:
    """What a block keeps when backward computes nothing of it again, all but its matmuls and attention, or the whole of it: but for what its router
    chose, which stays chosen, and where rows went."""
    if recompute == "none":
        return block(model, layout, micro_batch, seq_len, compute, sparse=sparse)
    shapes, size = Shapes(model, layout, micro_batch, seq_len), ITEMSIZE[compute]
    entered = Saved(ENTERED, shapes(shapes.hidden), Role.CARRY, size)
    stays = chosen(shapes, model.experts) if sparse and model.experts else ()
    return (entered, *stays, *(_dear(shapes, size, sparse=sparse) if recompute == "selective" else ()))


def again(
    model: ModelSpec, layout: Layout, micro_batch: int, seq_len: int, compute: str, recompute: Recompute, *, sparse: bool = False
) -> tuple[Saved, ...]:
    """What the backward of one block computes again and then holds beside what was kept."""
    there = {saved.name for saved in kept(model, layout, micro_batch, seq_len, compute, recompute, sparse=sparse)}
    return tuple(saved for saved in block(model, layout, micro_batch, seq_len, compute, sparse=sparse) if saved.name not in there)


def head(model: ModelSpec, layout: Layout, micro_batch: int, seq_len: int, compute: str) -> tuple[Saved, ...]:
    """What is kept once per micro-batch beside the blocks: ids, labels, rotary tables and the final norm."""
    shapes, size = Shapes(model, layout, micro_batch, seq_len), ITEMSIZE[compute]
    # Of a part of a row each token's position is told beside them.
    alone = layout.mesh.cp == 1
    ids = Saved("ids and labels", shapes(Dim("kinds", 2 if alone else 3)), Role.USE, INT64)
    if model.family == "gpt2":
        return (ids, *_layer_norm("last stream", "final_norm", shapes, size))
    return (ids, *_rotary(shapes, size), *_norm("last stream", "final_norm", shapes, size))


def logits(model: ModelSpec, layout: Layout, micro_batch: int, seq_len: int, compute: str, kind: str, *, frozen: bool = False) -> tuple[Saved, ...]:
    """What the head and its loss hold at their fullest, piece by piece as pentamesh.run.head computes them on a device of this `kind`.

    The logits of a piece, which become their own gradients, and these as matmuls read them; the gradients of the stream and of the head. Of what
    no family describes, the logits of all tokens when backward leaves the loss: log-probabilities that log_softmax saved, the dense gradient of
    the picked ones and the gradient of the logits. Source: torch `cross_entropy` = log_softmax + nll_loss.
    """
    shapes, size = Shapes(model, layout, micro_batch, seq_len), ITEMSIZE[compute]
    wide, vocab = max(FLOAT32, size), Dim("vocab", model.vocab)
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


def _rotary(shapes: Shapes, size: int) -> Iterator[Saved]:
    """What positions are rotated by: cosines and sines, of DeepSeek-V2 as complex numbers in float32."""
    for width in (Dim("head_dim", width) for width in shapes.model.rotary):
        dims = (Dim("seq", shapes.seq_len), width) if shapes.layout.mesh.cp == 1 else shapes(width)
        if shapes.model.family == "deepseek_v2":
            yield Saved("turns", dims, Role.USE, 2 * FLOAT32)
        else:
            yield from (Saved(name, dims, Role.USE, size) for name in ("cos", "sin"))


def _norm(read: str, name: str, shapes: Shapes, size: int) -> Iterator[Saved]:
    """An RMS norm of the stream: what it reads and 1/rms, and the output for the next matmul."""
    stream = shapes(shapes.hidden)
    yield Saved(read, stream, Role.CARRY, size)
    yield Saved(f"{name} 1/rms", shapes(), Role.CARRY, max(FLOAT32, size))
    yield Saved(f"{name} output", stream, Role.USE, size)


def _left(read: str, shapes: Shapes, size: int) -> Iterator[Saved]:
    """An RMS norm of what a sublayer leaves: what it reads and 1/rms; its output is added and forgotten."""
    yield Saved(read, shapes(shapes.hidden), Role.CARRY, size)
    yield Saved(f"{read} 1/rms", shapes(), Role.CARRY, max(FLOAT32, size))


def _layer_norm(read: str, name: str, shapes: Shapes, size: int) -> Iterator[Saved]:
    """A LayerNorm of the stream: its input, mean and 1/deviation, and the output for the next matmul."""
    yield Saved(read, shapes(shapes.hidden), Role.CARRY, size)
    yield Saved(f"{name} mean and 1/deviation", shapes(Dim("pair", 2)), Role.CARRY, size)
    yield Saved(f"{name} output", shapes(shapes.hidden), Role.USE, size)


def _dear(shapes: Shapes, size: int, *, sparse: bool) -> Iterator[Saved]:
    """What matmuls and attention gave, whether or not backward asks for it: the recomputation has it from here."""
    model = shapes.model
    if model.kept is not None:
        yield Saved("beside matmuls", shapes(Dim("matmuls", model.kept.by_matmuls)), Role.USE, size)
    else:
        yield from attention_given(shapes, size)
    yield Saved("attention projected", shapes(shapes.hidden), Role.USE, size)
    if sparse:
        assert model.experts is not None
        yield from routed_given(shapes, model.experts, size)
        yield from shared_given(shapes, model.experts, size)
        return
    if model.kept is None:
        for name in ("up",) if model.family == "gpt2" else ("gate", "up"):
            yield Saved(name, shapes(Dim("ffn", model.ffn)), Role.USE, size)
    yield Saved("MLP projected", shapes(shapes.hidden), Role.USE, size)


def _sparse_mlp(shapes: Shapes, experts: Experts, size: int) -> Iterator[Saved]:
    """A norm, and what router and experts make of the stream as it lies between blocks; shared experts read it as a dense MLP does."""
    stream = shapes(shapes.hidden)
    yield Saved("stream between", stream, Role.CARRY, size)
    yield Saved("post_norm 1/rms", shapes(), Role.CARRY, max(FLOAT32, size))
    yield Saved("post_norm output", stream, Role.CARRY, size)
    yield from routed(shapes, experts, size)
    yield from shared(shapes, experts, size)


def _estimated(kept: Kept, shapes: Shapes, size: int) -> tuple[Saved, ...]:
    """By widths alone: what matmuls read and write, norms as transformers writes them out, and the log-sum-exp of attention."""
    matmuls, norms, heads = Dim("matmuls", kept.by_matmuls), Dim("norms", kept.by_norms), Dim("heads", shapes.model.num_heads)
    return (
        Saved("beside matmuls", shapes(matmuls), Role.USE, size),
        Saved("norm inputs in float32", shapes(norms), Role.CARRY, max(FLOAT32, size)),
        Saved("norms normalised and out", shapes(norms), Role.CARRY, 2 * size),
        Saved("log-sum-exp", shapes(heads), Role.USE, FLOAT32),
    )


def _mlp(shapes: Shapes, size: int) -> Iterator[Saved]:
    """A gated MLP: gate, up, and the product that down_proj reads."""
    for name in ("gate", "up", "product"):
        yield Saved(name, shapes(Dim("ffn", shapes.model.ffn)), Role.USE, size)


# What activation functions keep where no gate follows, besides what the next matmul reads: that of transformers' `gelu_new` is written out in
# five operations, that of a rectifier is its own output.
_KEPT_BY = {"gelu_new": ("up", "half of up", "tanh", "1 + tanh"), "relu": ()}


# What the MLP keeps beside what it reads; its backward has let go of these when that of attention begins.
OF_MLP = frozenset(("gate", "up", "product", "half of up", "tanh", "1 + tanh", "activated")) | OF_EXPERTS


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
