"""Modules that blocks are made of, as tensors: a linear map, and a gated MLP of three."""

from __future__ import annotations

from collections.abc import Iterator

from pentamesh.model.dims import Acts, Dim, TensorSpec
from pentamesh.model.roles import Role

__all__ = ["CARRIED", "STREAM", "gated_mlp", "linear"]

STREAM = ("batch", "seq", "hidden")
CARRIED = Acts(Role.CARRY, STREAM)


def linear(path: str, out: Dim, into: Dim, bias: bool, unit: str, readers: tuple[str, ...] = ()) -> Iterator[TensorSpec]:
    """The weight of a map of `into` to `out`, and its bias; `readers` are dims whose every element gives a part of the gradient of all that is
    mapped, without being a dim of it."""
    yield TensorSpec(f"{path}.weight", (out, into), Acts(Role.USE, ("batch", "seq", *readers, into.name)), "matmul", unit)
    if bias:
        # It is added to the output; after a contraction over tp that output is on the residual stream.
        adds = Acts(Role.CARRY if out.name == "hidden" else Role.USE, ("batch", "seq", *readers, out.name))
        yield TensorSpec(f"{path}.bias", (out,), adds, "bias", unit)


def gated_mlp(path: str, hidden: Dim, ffn: Dim, bias: bool, unit: str, fused: bool = False) -> Iterator[TensorSpec]:
    """What is gated, what gates it - in one tensor where they are `fused` - and the way back to the stream."""
    both = Dim("ffn", 2 * ffn.size, 1, (ffn.size, ffn.size))
    for side, dim in (("gate_up", both),) if fused else (("gate", ffn), ("up", ffn)):
        yield from linear(f"{path}.{side}_proj", dim, hidden, bias, unit)
    yield from linear(f"{path}.down_proj", hidden, ffn, bias, unit)
