"""The generic path: a model of an architecture that no family describes, from its facts. It has names for tensors and none for their dims, so
the data axes carry it and no other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pentamesh.errors import InputError
from pentamesh.model.dims import TensorSpec
from pentamesh.model.facts import Facts
from pentamesh.model.spec import Kept, ModelSpec

__all__ = ["QUANTISED", "check_trainable", "describe", "kept"]

# What keeps the trainer from weights that are stored quantised.
QUANTISED = "its files hold quantised weights"
NOTE = "is of no described family: it is planned on the data axes, and its activations are estimated from the widths of its matmuls"


def describe(facts: Facts, config: dict[str, Any], name: str) -> ModelSpec:
    """The spec of a model by its facts; `notes` says what is approximate, `untrainable` what the trainer cannot do with it."""
    sizes = facts.sizes
    return ModelSpec(
        name=name,
        family="generic",
        hidden=sizes["hidden"],
        num_layers=sizes["num_layers"],
        num_heads=sizes["num_heads"],
        num_kv_heads=sizes["num_kv_heads"],
        head_dim=sizes["head_dim"],
        ffn=_widest(facts),
        vocab=sizes["vocab"],
        tied=any(t.tied_to for t in facts.tensors),
        max_positions=sizes["max_positions"],
        tensors=facts.tensors,
        config=config,
        notes=(f"{facts.builds} {NOTE}; tensors are those of transformers {facts.transformers}",),
        windows=facts.windows,
        kept=kept(facts.tensors, sizes),
        untrainable=facts.untrainable,
    )


def check_trainable(model: ModelSpec, method: str, where: str) -> None:
    """Raises InputError for a model that is planned but cannot be trained, or not by this method."""
    if model.untrainable:
        what = f"{model.name} is planned but not trained yet: {model.untrainable}"
        raise InputError(what, where=f"{where} model.name", hint=f"`pentamesh plan` judges it; {_what_trains(model)}")
    if not model.is_described and method == "pretrain":
        what = f"{model.name} is of no described family: what its weights start from is not known here"
        raise InputError(what, where=f"{where} method", hint="use method: full, from published weights")


def _what_trains(model: ModelSpec) -> str:
    """Of a described family other configs do; of quantised files those that they were made from."""
    if model.untrainable == QUANTISED:
        return "give the weights that its files were made from, in bfloat16, with a config.json of their own"
    return "a model folder whose config.json is without it trains" if model.is_described else "described families train"


def kept(tensors: Iterable[TensorSpec], sizes: dict[str, int]) -> Kept:
    """What one token leaves in a block on the mean, in elements, by a rule that knows no architecture.

    Of each matmul one side is the residual stream, which its norm keeps; the other side, m * n / hidden elements wide, is kept for backward. A
    gated MLP keeps a fourth tensor beside gate, up and product. A norm keeps what it scales; an expert its share of the tokens twice over.
    """
    blocks = [t for t in tensors if t.unit and t.met[0]]
    matmuls = [t for t in blocks if t.kind == "matmul"]
    mixing = sum(_width(t, sizes["hidden"]) for t in matmuls if _mixes(t))
    feeding = sum(_width(t, sizes["hidden"]) for t in matmuls if not _mixes(t))
    normed = sum(_normed(t, sizes) for t in blocks if t.kind in ("scale", "excess") and t.name.endswith("weight"))
    sent = sum(2 * t.met[0] * sizes["hidden"] for t in matmuls if t.met[1] > 1) / 2  # gate_up and down share what is sent
    layers = sizes["num_layers"]
    return Kept(round((mixing + feeding * 4 / 3 + sent) / layers), round(normed / layers))


def _mixes(tensor: TensorSpec) -> bool:
    """Whether a parameter belongs to what mixes tokens (attention of any kind) rather than to what works on each alone."""
    return "attn" in tensor.name or "attention" in tensor.name


def _width(tensor: TensorSpec, hidden: int) -> float:
    """Elements a token leaves beside the stream: m * n / hidden, or the larger side where neither is the stream."""
    return tensor.met_numel / hidden if hidden in tensor.shape else max(tensor.shape)


def _normed(tensor: TensorSpec, sizes: dict[str, int]) -> int:
    """Elements that a norm scales: as many as it has weights, for each head where it has those of one."""
    per_head = _mixes(tensor) and tensor.numel == sizes["head_dim"]
    return tensor.numel * ((sizes["num_kv_heads"] if "k_norm" in tensor.name else sizes["num_heads"]) if per_head else 1)


def _widest(facts: Facts) -> int:
    """The ffn of a gated MLP with as many parameters as a token meets beside attention, in the widest block."""
    by_unit: dict[str, float] = {}
    for t in facts.tensors:
        if t.unit and t.kind == "matmul" and t.met[0] and not _mixes(t):
            by_unit[t.unit] = by_unit.get(t.unit, 0) + _width(t, facts.sizes["hidden"])
    return round(max(by_unit.values(), default=0) / 3)
