"""Moments: what is alive on a rank when memory may be fullest - as a block goes back, as its attention meets other ranks' keys, and at the ends of
forward, backward and step.

Moments are computed one by one and never added. Everything per tensor comes from `split`; nothing is P / N.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from pentamesh.cost import activations
from pentamesh.cost.attention import scores
from pentamesh.cost.context import meeting
from pentamesh.cost.experts import experts_at_work, imbalance
from pentamesh.cost.frozen import blocks_kept
from pentamesh.cost.holding import NF4_BYTES, Holding, resting
from pentamesh.cost.needs import Range
from pentamesh.cost.saved import Amount, Saved, Shapes, amount, held, local_tokens
from pentamesh.job.job import Batch
from pentamesh.job.precision import ITEMSIZE, ROUNDED_AT_ONCE, Precision
from pentamesh.layout.mesh import COPY_AXES, Layout
from pentamesh.layout.policy import Policy
from pentamesh.model.roles import Role

__all__ = ["Moment", "Rank"]

# Float32-sized copies of a piece that are alive when it is rounded: weight, gradient, two moments, the root, noise, and 16 bits of it twice over.
ROUNDING_COPIES = 8
NOTHING = Amount()


class Moment(NamedTuple):
    """What is alive at one moment, in bytes. `working` is gathered, cast or unreduced parameters, `context` what attention holds for the sake of
    other context ranks, `experts` what rows take that come from other ranks to this one's experts; the last five come and go."""

    weights: int
    gradients: int
    optimizer: int
    working: int
    activations: int = 0
    experts: int = 0
    context: int = 0
    logits: int = 0

    @property
    def resting(self) -> int:
        return self.weights + self.gradients + self.optimizer

    def passing(self, rows: float) -> float:
        """What comes and goes where so many times as many rows come as a balanced router sends."""
        return self.working + self.activations + self.experts * rows + self.context + self.logits

    def total(self, rows: float) -> float:
        return self.resting + self.passing(rows)


@dataclass(frozen=True)
class Rank:
    """One rank of a pipeline stage and the arithmetic of its moments, in the last micro-batch of a step: the one that reduces."""

    held: Holding
    policy: Policy
    precision: Precision
    batch: Batch
    stage: int
    kind: str

    def moments(self) -> tuple[Moment, ...]:
        """Backward turns activations into gradients block by block, so that it is fullest at its first block or at its last; where it comes to none,
        the forward of a block is."""
        blocks = [self._backward(layers) for layers in (self._layers, 1)] if self._layers else [self._forward()]
        if self._layout.mesh.cp > 1 and self._layers:
            blocks += [self._meeting(block, layers) for block, layers in zip(blocks, (self._layers, 1), strict=True)]
        return (self._loss(), *blocks, self._end_of_backward(), self._update())

    # Sizes

    def _parameters(self, which: str, itemsize: float) -> int:
        """Bytes of the used (gathered, unreduced) parameters of the `root`, one `block`, or all `blocks` of the stage."""
        numel = {
            "root": lambda: self.held.root_numel(Role.USE, self.stage),
            "block": lambda: self.held.block_numel(Role.USE),
            "blocks": lambda: self.held.blocks_numel(Role.USE, self.stage),
        }[which]()
        return round(numel * itemsize)

    def _trained(self, which: str, itemsize: int) -> int:
        """As `_parameters`, of what has a gradient."""
        numel = {
            "root": lambda: self.held.root_numel(Role.USE, self.stage, trained=True),
            "block": lambda: self.held.block_numel(Role.USE, trained=True),
            "blocks": lambda: self.held.blocks_numel(Role.USE, self.stage, trained=True),
        }[which]()
        return numel * itemsize

    def _saved(self, listed: Callable[..., tuple[Saved, ...]], *asked: str, **named: bool) -> int:
        """Bytes of what a function of `activations` lists for this rank's micro-batches, of what no router has a say in."""
        return held(listed, self.held.model, self._layout, *self._shape, self.precision.compute, *asked, **named).fixed

    def _of_block(self, listed: Callable[..., tuple[Saved, ...]], *asked: str, sparse: bool) -> Amount:
        """As `_saved`, of a block, all that it lists."""
        return held(listed, self.held.model, self._layout, *self._shape, self.precision.compute, *asked, sparse=sparse)

    def _share(self, num_bytes: int, layers: int) -> int:
        """Of what all blocks with a backward take, the part of `layers` of them."""
        return round(num_bytes * layers / max(1, self._layers))

    @cached_property
    def _layers(self) -> int:
        """Blocks of the stage that have a backward. Those below everything that is trained keep nothing."""
        return self.held.stage_num_reached(self.stage)

    @cached_property
    def imbalance(self) -> Range:
        """How many rows come to the fullest rank's experts, in those of an even share."""
        return imbalance(self.held.model, self._layout)

    @property
    def _shape(self) -> tuple[int, int]:
        return self.batch.micro_batch, self.batch.seq_len

    @property
    def _compute(self) -> int:
        return ITEMSIZE[self.precision.compute]

    @property
    def _reduce(self) -> int:
        return ITEMSIZE[self.precision.reduce]

    @property
    def _layout(self) -> Layout:
        return self.held.layout

    @property
    def _is_last(self) -> bool:
        return self.stage == self._layout.mesh.pp - 1

    # Gradients

    @property
    def _stand(self) -> bool:
        """Whether gradients that the optimizer reads stand before the last backward: in DDP's buckets, or because micro-batches add to them."""
        in_buckets = not self._layout.cuts_state and self._layout.mesh.degree(*COPY_AXES) > 1
        return in_buckets or (self.policy.grad_accum > 1 and not self._unreduced_wait)

    @property
    def _unreduced_wait(self) -> bool:
        """Whether whole gradients add up over micro-batches, in the reduce dtype, until they are reduced once."""
        return self._layout.cuts_state and self.policy.reduce == "once" and self.policy.grad_accum > 1

    def _gradients(self, layers: int) -> int:
        """Gradients that the optimizer will read when `layers` blocks have still to go back; those of the root are the last."""
        size = ITEMSIZE[self.precision.gradient]
        if self._stand or layers < 0:
            return self.held.stage_numel(Role.STATE, self.stage, trained=True) * size
        return self._share(self.held.blocks_numel(Role.STATE, self.stage, trained=True) * size, self._layers - layers)

    def _unreduced(self, layers: int) -> int:
        """Whole gradients that wait for the one reduction: those of the root, and of `layers` blocks."""
        if not self._unreduced_wait:
            return 0
        return self._trained("root", self._reduce) + self._share(self._trained("blocks", self._reduce), layers)

    def _one_block(self) -> int:
        """Gradients of a block as its backward leaves them, and of the one before it while it is reduced.

        Beside them those of the head wait: to be reduced, where they have no bucket to go to, or, tied, for the embedding's.
        """
        if not self._layout.cuts_state:
            casts = self._trained("block", self._compute) if self.precision.compute != self.precision.weight else 0
            return casts + (self._head() if self.held.model.tied or not self._stand else 0)
        return self._trained("block", self._compute + self._reduce) + self._head()

    def _head(self) -> int:
        """The gradient of the head while blocks go back, which a tied embedding shares."""
        return self.held.head_numel * self._compute if self._is_last and self.held.trains_head else 0

    # Parameters in use

    def _used(self, layers: int) -> int:
        """Parameters as modules use them when forward has gone through, or backward has still to go through, `layers` blocks."""
        if self.held.is_adapted and not self._layout.cuts_weights:
            return self._dequantised()
        if not self._layout.cuts_state:
            return self._casts(layers)
        if self._layout.cuts_weights and self.policy.reshard:
            return self._parameters("root", self._compute) + 2 * self._base_block()
        below = self.held.stage_num_layers(self.stage) - self._layers
        return self._parameters("root", self._compute) + self._used_blocks(below + layers)

    def _used_blocks(self, layers: int) -> int:
        """Parameters in the compute dtype of `layers` blocks, with a backward or without."""
        return round(self._parameters("blocks", self._compute) * layers / self.held.stage_num_layers(self.stage))

    def _casts(self, layers: int) -> int:
        """Copies in the compute dtype: autograd keeps those of every block that has not gone back, unless it is recomputed."""
        if self.precision.compute == self.precision.weight:
            return 0
        kept = layers if self.policy.recompute == "none" else 1
        return self._parameters("root", self._compute) + self._used_blocks(kept)

    def _base_block(self) -> int:
        """A gathered block: in the compute dtype; qlora gathers it in NF4 and dequantises one projection at a time."""
        if self.held.method != "qlora":
            return self._parameters("block", self._compute)
        return self._parameters("block", NF4_BYTES) + self._dequantised()

    def _dequantised(self) -> int:
        return self._compute * max((t.numel for t in self.held.model.block if t.kind == "matmul"), default=0) if self.held.method == "qlora" else 0

    # Activations

    @cached_property
    def _blocks_kept(self) -> Amount:
        """What all blocks keep that have a backward; of a stage its share."""
        model = self.held.model
        if model.num_trained_parameters == model.num_parameters:
            kinds = self.held.stage_kinds(self.stage, reached=True)
            return sum((self._of_block(activations.kept, self.policy.recompute, sparse=kind) * n for kind, n in kinds.items()), NOTHING)
        reached = sum(self.held.stage_num_reached(stage) for stage in range(self._layout.mesh.pp))
        whole = blocks_kept(model, self._layout, *self._shape, self.precision.compute, self.policy.recompute)
        return whole * (self._layers / max(1, reached))

    def _num_kept(self, layers: int) -> int:
        """Blocks that wait for backward: `layers` of this micro-batch, all of the others in flight, under 1F1B one for each stage that follows."""
        others = min(self.policy.grad_accum, self._layout.mesh.pp - self.stage) - 1
        return others * self._layers + layers

    @cached_property
    def _head_kept(self) -> int:
        return self._saved(activations.head) if self._is_last else 0

    @property
    def _offloads(self) -> bool:
        return self.policy.offload and self.kind != "cpu"

    def host_bytes(self) -> int:
        """What waits in host memory."""
        return self._share(self._blocks_kept.fixed, self._num_kept(self._layers)) if self._offloads else 0

    def _activations(self, layers: int) -> Amount:
        """What `layers` blocks keep, and the head; of blocks whose inputs wait elsewhere those of the one at work and of the next."""
        num_kept = self._num_kept(layers)
        kept = self._blocks_kept * ((min(num_kept, 2) if self._offloads else num_kept) / max(1, self._layers))
        return kept + Amount(self._head_kept)

    def _widest(self, of: Callable[[bool], Amount]) -> Amount:
        """Of the kinds of blocks that the stage has, sparse and not, the most that any has."""
        kinds = self.held.stage_kinds(self.stage)
        return max((of(kind) for kind in kinds), key=lambda found: found.at(self.imbalance.expected), default=NOTHING)

    @cached_property
    def _block_working_set(self) -> Amount:
        """What the backward of one block adds: what it computes again, and the gradients of its widest part."""
        return self._widest(lambda sparse: self._of_block(activations.again, self.policy.recompute, sparse=sparse) + self._widest_part(sparse))

    def _widest_part(self, sparse: bool) -> Amount:
        """In the MLP three ffn-wide tensors are alive at once, beside those of stream and norm: backward the gradients of the product, the activated
        gate and up, forward these themselves. Experts have theirs, of rows."""
        model, compute, experts = self.held.model, self._compute, self.held.model.experts
        tokens = local_tokens(self._layout, *self._shape)
        stream = Amount(self._scores + tokens * (2 * compute + ITEMSIZE["float32"]) * model.hidden)
        if not sparse or experts is None:
            return stream + Amount(tokens * 3 * compute * model.ffn // self._layout.mesh.tp)
        shared = Amount(tokens * 3 * compute * experts.shared_ffn // self._layout.mesh.tp)
        rows = amount(experts_at_work(Shapes(model, self._layout, *self._shape), experts, compute), self._layout)
        return stream + max(shared, rows, key=lambda found: found.at(self.imbalance.expected))

    @property
    def _scores(self) -> int:
        model, narrow = self.held.model, (self.precision.compute, self.kind)
        return scores(model, self._layout, *self._shape, *narrow, packed=self.policy.packed) if model.is_described else 0

    @property
    def _logits(self) -> int:
        return self._saved(activations.logits, self.kind, frozen=not self.held.trains_head) if self._is_last else 0

    # Moments

    def _moment(self, gradients: int, working: int, activations: Amount = NOTHING, **passing: int) -> Moment:
        kept = {"activations": activations.fixed, "experts": activations.routed}
        return Moment(**self._resting, gradients=gradients, working=working, **kept, **passing)

    @cached_property
    def _resting(self) -> dict[str, int]:
        return resting(self.held, self.precision, self.stage)

    def _loss(self) -> Moment:
        layers = self._layers
        working = self._used(layers) + self._unreduced(layers)
        return self._moment(self._gradients(layers), working, activations=self._activations(layers), logits=self._logits)

    def _forward(self) -> Moment:
        """The forward of a block that keeps nothing."""
        return self._moment(self._gradients(0), self._used(0) + self._unreduced(0), activations=self._widest(self._widest_part))

    def _backward(self, layers: int) -> Moment:
        """The backward of a block, the last of `layers` that have still to go back."""
        working = self._used(layers) + self._unreduced(layers) + self._one_block()
        return self._moment(self._gradients(layers), working, activations=self._activations(layers) + self._block_working_set)

    def _meeting(self, block: Moment, layers: int) -> Moment:
        """The backward of the attention of that block, when its MLP has gone back."""
        passing = self._activations(layers) + self._widest(self._without_mlp) + Amount(self._scores)
        return block._replace(activations=passing.fixed, experts=passing.routed, context=self._saved(meeting, backward=True))

    def _without_mlp(self, sparse: bool) -> Amount:
        """What the backward of a block has computed again, but for its MLP."""
        found = self._of_block(activations.again, self.policy.recompute, sparse=sparse)
        return found if self.policy.recompute == "selective" else found + self._of_block(_of_mlp, self.policy.recompute, sparse=sparse) * -1

    def _end_of_backward(self) -> Moment:
        """The root's gradients, complete only now, are cast and reduced as one; DDP reduces them in its buckets, where they lie."""
        if not self._layout.cuts_state:
            return self._moment(self._gradients(-1), self._trained("root", self._compute))
        kept = self.policy.keep_gathered and self.policy.grad_accum > 1
        gathered = self._used(self._layers) if kept else self._parameters("root", self._compute)
        reduced = self._trained("root", self._reduce + (self._reduce if self._unreduced_wait else self._compute))
        return self._moment(self._gradients(-1), gathered + reduced)

    def _update(self) -> Moment:
        """Fused AdamW makes no temporaries; stochastic rounding has a piece of weight, gradient and moments in float32, a root, and its noise."""
        return self._moment(self._gradients(-1), self._rounding if self.precision.stochastic_rounding else 0)

    @property
    def _rounding(self) -> int:
        return ROUNDING_COPIES * ITEMSIZE["float32"] * min(self.held.largest_tensor_numel, ROUNDED_AT_ONCE[self.kind])


def _of_mlp(*asked: Any, sparse: bool) -> tuple[Saved, ...]:
    """Of what a block keeps, or where that is not all has computed again, what its MLP does."""
    stays = {saved.name for saved in activations.kept(*asked, sparse=sparse)} if asked[-1] == "full" else set()
    return tuple(saved for saved in activations.block(*asked[:-1], sparse=sparse) if saved.name in activations.OF_MLP - stays)
