"""Reach: how far back gradients go, which is to the first trained parameter in the order of a forward pass and no farther."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from pentamesh.model.dims import TensorSpec
from pentamesh.model.spec import ModelSpec

__all__ = ["Reached", "ends", "reach"]


class Reached(NamedTuple):
    """Where a gradient goes back through: the entry of a sublayer, its exit, the whole block, which is then computed again if it was not kept, and
    what lies between its projections, which of attention is the attention itself, and of experts the weights that a router gives them."""

    enters: bool = True
    leaves: bool = True
    again: bool = True
    mixes: bool = True


@lru_cache(maxsize=256)
def reach(model: ModelSpec) -> tuple[Reached, ...]:
    """Of each of the model's sublayers, in order; of a model of no described family, whose sublayers move nothing, as if all were trained."""
    first = model.first_trained
    if not first or not model.is_described:
        return (Reached(),) * len(model.sublayers)
    blocks: dict[str, list[tuple[int, TensorSpec]]] = {}
    for place, tensor in enumerate(model.parameters):
        if tensor.unit:
            blocks.setdefault(tensor.unit, []).append((place, tensor))
    return tuple(found for block in blocks.values() for found in _of_block(block, first))


def ends(model: ModelSpec) -> Reached:
    """Of the embedding, which leaves onto the stream, and the head, which enters from it: it reads what the norms before it give."""
    head = next((place for place, t in enumerate(model.parameters) if t.kind == "matmul" and not t.unit), len(model.parameters))
    return Reached(enters=model.first_trained < head, leaves=model.first_trained == 0)


def _of_block(block: Sequence[tuple[int, TensorSpec]], first: int) -> Iterator[Reached]:
    """A sublayer is entered before the first projection that reads the stream and left after the one that does not: what lies between has a gradient
    where anything before the latter is trained, norms of queries and keys among them. Backward needs nothing of a bias, but where it is of experts,
    which are one operator."""
    experts = [place for place, t in block if t.is_expert]
    again = any(place >= first and (t.kind != "bias" or place in experts) for place, t in block)
    entry: int | None = None
    read: int | None = None
    for place, tensor in block:
        if tensor.kind == "matmul":
            entry = place if entry is None else entry
            if place in experts and tensor.leaves:
                yield Reached(first < entry, first <= experts[-1], again, first < experts[0])
                entry, read = None, entry
            elif tensor.leaves:
                found = Reached(first < entry, first <= place, again, first < place)
                yield found if read is None else _beside(first < read, any(t.trained for at, t in block if entry <= at <= place))
                entry = None


def _beside(enters: bool, trains: bool) -> Reached:
    """Of shared experts, which read what the routed ones read and not what these make of it: they go back where a gradient passes the stream, or they
    are trained themselves, and else are not computed again either."""
    return Reached(enters, *[enters or trains] * 3)
