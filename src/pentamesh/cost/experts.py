"""What a sparse MLP takes: what its router and its experts keep for backward and have at work, and how far from even routers are.

Of a rank's experts everything counts by the rows that come to them. A balanced router sends each rank as many as it sends out; a real one does not,
which matters wherever experts are parted: the fullest rank has `IMBALANCE` times as many.
"""

from __future__ import annotations

from collections.abc import Iterator

from pentamesh.cost.needs import Range
from pentamesh.cost.saved import FLOAT32, INT64, Saved, Shapes
from pentamesh.layout.mesh import Layout
from pentamesh.model.dims import Dim
from pentamesh.model.roles import Role
from pentamesh.model.spec import Experts, ModelSpec

__all__ = ["OF_EXPERTS", "chosen", "experts_at_work", "experts_flop_per_token", "imbalance", "routed", "routed_given", "shared", "shared_given"]

INT32 = 4
# Rows of the rank that most come to, in those of an even share. Source: pith-train trains with 1.2; xtuner measures capacities from 1 to 5.
IMBALANCE = Range(1.0, 1.2, 5.0)


def imbalance(model: ModelSpec, layout: Layout) -> Range:
    """How many rows come to the fullest rank, in those of an even share: never more than if all tokens of all ranks chose its experts."""
    experts, ep = model.experts, layout.mesh.ep
    if experts is None or ep == 1:
        return Range(1.0, 1.0, 1.0)
    most = ep * min(experts.per_token, experts.count // ep) / experts.per_token
    return Range(*(min(most, factor) for factor in (IMBALANCE.low, IMBALANCE.expected, IMBALANCE.high)))


def experts_flop_per_token(model: ModelSpec) -> int:
    """FLOP of the experts that a token meets in all layers, forward and backward."""
    return 6 * sum(t.met_numel * unit.count for unit in model.kinds for t in unit.tensors if t.kind == "matmul" and t.is_expert)


def routed(shapes: Shapes, experts: Experts, size: int) -> Iterator[Saved]:
    """What the router keeps of every token, and its experts of every row that comes to them: once for each expert that a token chose."""
    wide = max(FLOAT32, size)
    yield from _router(shapes, experts, wide)
    yield from chosen(shapes, experts)
    yield from _rows(shapes, experts, size, wide)


def routed_given(shapes: Shapes, experts: Experts, size: int) -> Iterator[Saved]:
    """What `selective` keeps of a sparse MLP, besides what is chosen: what the router's matmul and the experts gave, and all that ranks sent each
    other."""
    wide = max(FLOAT32, size)
    yield Saved("router logits", shapes(Dim("choices", experts.count)), Role.CARRY, wide if experts.wide else size)
    yield from _rows(shapes, experts, size, wide)
    yield _of_rows("results of rows", shapes, experts, shapes.model.hidden, size)
    yield Saved("results", shapes(shapes.hidden), Role.CARRY, size)


def chosen(shapes: Shapes, experts: Experts) -> Iterator[Saved]:
    """Which experts each token chose, and where rows go: their order by the experts they go to, and that of those that come; on the host how many
    there are for each expert."""
    each = shapes(Dim("chosen", experts.per_token))
    yield Saved("chosen", each, Role.CARRY, INT64)
    yield Saved("order of rows", each, Role.CARRY, INT32)
    yield _of_rows("arrangement of rows", shapes, experts, 1, INT32)
    yield Saved("counts of rows", (Dim("both ways", 2), Dim("choices", experts.count)), Role.CARRY, INT64)


def shared(shapes: Shapes, experts: Experts, size: int) -> Iterator[Saved]:
    """Of experts that every token meets: a gated MLP beside the routed ones."""
    if not experts.shared_ffn:
        return
    if shapes.layout.mesh.tp > 1:
        yield Saved("shared input", shapes(shapes.hidden), Role.USE, size)
    for name in ("shared gate", "shared up", "shared product"):
        yield Saved(name, shapes(Dim("ffn", experts.shared_ffn)), Role.USE, size)


def shared_given(shapes: Shapes, experts: Experts, size: int) -> Iterator[Saved]:
    """Of these, what their matmuls gave."""
    if experts.shared_ffn:
        for name in ("shared gate", "shared up"):
            yield Saved(name, shapes(Dim("ffn", experts.shared_ffn)), Role.USE, size)
        yield Saved("shared projected", shapes(shapes.hidden), Role.USE, size)


# Of what a sparse block keeps, what its backward has let go of when that of attention begins.
OF_ROUTER = ("scores", "chosen", "chosen scores", "sum of chosen scores", "weights", "order of rows", "arrangement of rows", "counts of rows")
OF_EXPERTS = frozenset((*OF_ROUTER, "rows", "shares of rows", "gate and up of rows", "shared input", "shared gate", "shared up", "shared product"))


def _router(shapes: Shapes, experts: Experts, wide: int) -> Iterator[Saved]:
    """The scores of all experts, from which those of the chosen are picked, and what the weights of these follow from."""
    each = shapes(Dim("chosen", experts.per_token))
    yield Saved("scores", shapes(Dim("choices", experts.count)), Role.CARRY, wide)
    if experts.scores == "softmax of chosen":
        yield Saved("weights", each, Role.CARRY, wide)
    if experts.normed:
        yield Saved("chosen scores", each, Role.CARRY, wide)
        yield Saved("sum of chosen scores", shapes(), Role.CARRY, wide)


def _rows(shapes: Shapes, experts: Experts, size: int, wide: int) -> Iterator[Saved]:
    """What comes to experts, and what their gates see."""
    yield _of_rows("rows", shapes, experts, shapes.model.hidden, size)
    yield _of_rows("shares of rows", shapes, experts, 1, wide)
    yield _of_rows("gate and up of rows", shapes, experts, 2 * experts.ffn, size)


def _of_rows(name: str, shapes: Shapes, experts: Experts, width: int, itemsize: int) -> Saved:
    """`width` elements of every row that comes to the experts of a rank."""
    return Saved(name, shapes(Dim("of rows", experts.per_token * width)), Role.CARRY, itemsize, routed=shapes.layout.mesh.ep > 1)


def experts_at_work(shapes: Shapes, experts: Experts, size: int) -> tuple[Saved, ...]:
    """What the backward of experts has at its fullest, beside what was kept: of every row the gradient of its result, the product of gate and up, its
    gradient and that by the row's share, and the gradients of gate and up with two products from which they come."""
    return (
        _of_rows("gradients of results", shapes, experts, shapes.model.hidden, size),
        _of_rows("product and its gradients", shapes, experts, 3 * experts.ffn, size),
        _of_rows("gradients of gate and up", shapes, experts, 4 * experts.ffn, size),
    )
