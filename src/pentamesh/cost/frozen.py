"""What blocks keep where some of their parameters are frozen: an input only for a weight that is trained, anything only where a gradient passes.

Of what `cost.activations` lists for a block that is trained as a whole, each tensor is kept under a condition of its own; under these the lists are
to the byte what autograd keeps (tests/cost/test_frozen.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from pentamesh.cost.activations import ENTERED, Recompute, block, kept
from pentamesh.cost.saved import Amount, Saved, amount
from pentamesh.layout.mesh import Layout
from pentamesh.model.dims import TensorSpec
from pentamesh.model.spec import ModelSpec

__all__ = ["blocks_kept", "needed"]


@lru_cache(maxsize=1024)
def blocks_kept(model: ModelSpec, layout: Layout, micro_batch: int, seq_len: int, compute: str, recompute: Recompute) -> Amount:
    """What all blocks of a model keep of one micro-batch. Of a model of no described family, and of experts or latents, those that a gradient reaches
    count as whole."""
    asked, total = (model, layout, micro_batch, seq_len, compute), Amount()
    for tensors, before, count in _reached(model):
        sparse = any(t.is_expert for t in tensors)
        if model.is_described and recompute == "none" and not sparse and model.latent is None:
            listed = needed(block(*asked), model, tensors, before=before)
        else:
            # Computed again, a block keeps what it would of a whole one, if its backward asks for anything at all.
            asks = before or any(t.trained and t.kind != "bias" for t in tensors) or not model.is_described
            listed = kept(*asked, recompute, sparse=sparse) if asks else ()
        total += amount(listed, layout) * count
    return total


def _reached(model: ModelSpec) -> Iterator[tuple[tuple[TensorSpec, ...], bool, int]]:
    """The tensors of the blocks with a backward, whether anything before them is trained, and how many are alike. The lowest is none of the others:
    its gradient may end within."""
    first = model.parameters[model.first_trained]
    for unit in model.kinds:
        if unit.reached and not unit.is_root:
            lowest = bool(first.unit) and model.first_alike[first.name].unit == unit.name
            yield unit.tensors, True, unit.count - lowest
            if lowest:
                yield unit.tensors, False, 1


def needed(listed: Sequence[Saved], model: ModelSpec, tensors: Sequence[TensorSpec], *, before: bool) -> tuple[Saved, ...]:
    """Of what a whole block of a described family keeps, what the one of `tensors` does; `before` says whether anything before it is trained."""
    conditions = _conditions(_Block.of(tensors, before=before), model)
    return tuple(saved for saved in listed if conditions[saved.name])


class _Block(NamedTuple):
    """The tensors of a block in forward order, and the places of its sublayers' first projections and of those that leave onto the stream."""

    tensors: tuple[TensorSpec, ...]
    before: bool
    enters: tuple[int, int]
    leaves: tuple[int, int]

    @classmethod
    def of(cls, tensors: Sequence[TensorSpec], *, before: bool) -> _Block:
        matmuls = [(place, t) for place, t in enumerate(tensors) if t.kind == "matmul"]
        leaves = tuple(place for place, t in matmuls if t.leaves)
        enters = (matmuls[0][0], next(place for place, _ in matmuls if place > leaves[0]))
        return cls(tuple(tensors), before, enters, (leaves[0], leaves[1]))

    def passes(self, place: int) -> bool:
        """Whether what the tensor at `place` gives has a gradient."""
        return self.before or any(t.trained for t in self.tensors[: place + 1])

    def trains(self, low: int, high: int) -> bool:
        """Whether a projection from `low` to before `high` has a gradient, for which its input is kept."""
        return any(t.trained for t in self.tensors[low:high] if t.kind == "matmul")

    def gives(self, letter: str) -> bool:
        """Whether projected queries (`q`) or keys (`k`) have a gradient."""
        own = (f".{letter}_proj.", f".{letter}_norm.", ".qkv_proj.")
        return self.passes(self.enters[0] - 1) or any(t.trained for t in self.tensors if any(part in t.name for part in own))


def _conditions(of: _Block, model: ModelSpec) -> dict[str, bool]:
    """By the names of `cost.activations`, whether a tensor is kept."""
    (attention, mlp), (out, down) = of.enters, of.leaves
    read, between = of.passes(attention - 1), of.passes(mlp - 1)
    mixed, gated = of.passes(out - 1), of.passes(down - 1)
    left = of.passes(mlp - 2) if model.norms_what_it_adds else False
    found = {ENTERED: read, "input_norm output": of.trains(attention, out), "stream between": between, "post_norm output": of.trains(mlp, down)}
    for kind in ("1/rms", "mean and 1/deviation"):
        found |= {f"input_norm {kind}": read, f"post_norm {kind}": between}
    for letter in "qk":
        found |= dict.fromkeys((f"{letter}_norm input", f"{letter}_norm 1/rms"), of.gives(letter))
    found |= dict.fromkeys(("cos by pairs", "sin by pairs"), of.gives("q") or of.gives("k"))
    found |= dict.fromkeys(("queries", "keys", "values", "projected queries", "projected keys", "log-sum-exp"), mixed)
    found |= {"attention output": mixed or of.tensors[out].trained, "heads of whole rows": mixed, "output exchanged back": of.tensors[out].trained}
    found |= dict.fromkeys(("attention projected", "attention projected 1/rms"), left)
    found |= dict.fromkeys(("MLP projected", "MLP projected 1/rms"), of.passes(len(of.tensors) - 1))
    found |= dict.fromkeys(("gate", "up", "half of up", "tanh", "1 + tanh"), gated)
    # A rectifier keeps its own output, which is what the second matmul reads.
    rectified = gated and model.config.get("activation_function") == "relu"
    found |= {"product": of.tensors[down].trained, "activated": of.tensors[down].trained or rectified}
    return found | dict.fromkeys(("attention dropped", "MLP dropped"), True)
