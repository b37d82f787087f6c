"""Memory of the fullest rank: what rests, what works, what waits for backward, at the fullest moment of a steady step.

Four moments are computed and never added: the end of a forward with its loss, the backward of a block, the end of backward when the root's
gradients are reduced, and the optimizer's step. Everything per tensor comes from `split`; nothing is P / N.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pentamesh.cost import activations
from pentamesh.cost.holding import NF4_BYTES, Holding, states
from pentamesh.cost.needs import Memory, Range, Stage, Verdict
from pentamesh.job.job import Batch
from pentamesh.job.precision import ITEMSIZE, ROUNDED_AT_ONCE, Precision
from pentamesh.layout.policy import Policy
from pentamesh.model.roles import Role

__all__ = ["memory", "verdict"]

GIB = 2**30
# Float32-sized copies of a piece that are alive when it is rounded: weight, gradient, two moments, the root, noise, and 16 bits of it twice over.
ROUNDING_COPIES = 8


@dataclass(frozen=True)
class Overhead:
    """What a process holds outside torch's tensors, low / expected / high.

    context   CUDA context and kernels 0.47-0.92 GiB. Source: stas00/ml-engineering, training/performance
    nccl      buffers of the communicators on 8 GPUs, 1-1.5 GiB; half for two. Source: the same
    slack     of all that comes and goes, the share that the caching allocator reserves and cannot use: 0.5-1.5 GiB in nanotron's logs, up
              to a quarter without expandable segments (NVIDIA-NeMo/Megatron-Bridge, skills)
    unsure    relative error of what is not exact: kernels that save more or less than the eager ones listed
    """

    context: Range
    nccl: Range
    slack: Range
    unsure: Range


OVERHEAD = {
    "cuda": Overhead(
        context=Range(0.47 * GIB, 0.7 * GIB, 0.92 * GIB),
        nccl=Range(0.5 * GIB, 1.0 * GIB, 1.5 * GIB),
        slack=Range(0.0, 0.08, 0.2),
        unsure=Range(0.9, 1.0, 1.05),
    ),
    # On CPU, peak_bytes is the peak of torch's allocator: no context, and malloc returns what is freed.
    "cpu": Overhead(context=Range(0, 0, 0), nccl=Range(0, 0, 0), slack=Range(0, 0, 0), unsure=Range(0.9, 1.0, 1.1)),
}

# Of a model of no described family: autograd kept 0.95 to 1.23 times the estimate in blocks of Gemma 2 and 3, GLM-4, Phi-3, Mixtral and
# Qwen3-MoE, 1.38 times in those of Phi (tests/model/test_generic.py).
ESTIMATED = Range(0.8, 1.0, 1.3)


@dataclass(frozen=True)
class _Moment:
    """What is alive at one moment, in bytes. `working` is gathered, cast or unreduced parameters; the last three come and go."""

    weights: int
    gradients: int
    optimizer: int
    working: int
    activations: int = 0
    logits: int = 0

    @property
    def passing(self) -> int:
        return self.working + self.activations + self.logits

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.passing


@dataclass(frozen=True)
class _Rank:
    """One rank of a pipeline stage and the arithmetic of its moments."""

    held: Holding
    policy: Policy
    precision: Precision
    batch: Batch
    stage: int
    kind: str

    def moments(self) -> tuple[_Moment, ...]:
        return (self._loss(), self._block_backward(), self._end_of_backward(), self._update())

    # Sizes

    def _parameters(self, which: str, itemsize: float) -> int:
        """Bytes of the used (gathered, unreduced) parameters of the `root`, one `block`, or the whole `stage`."""
        numel = {
            "root": lambda: self.held.root_numel(Role.USE, self.stage),
            "block": lambda: self.held.block_numel(Role.USE),
            "stage": lambda: self.held.stage_numel(Role.USE, self.stage),
        }[which]()
        return round(numel * itemsize)

    def _trained(self, which: str, itemsize: int) -> int:
        """As `_parameters`, of what has a gradient."""
        if not self.held.is_adapted:
            return self._parameters(which, itemsize)
        block, stage = self.held.block_numel(Role.USE, trained=True), self.held.stage_numel(Role.USE, self.stage, trained=True)
        return {"root": 0, "block": block, "stage": stage}[which] * itemsize

    def _saved(self, saved: tuple[activations.Saved, ...]) -> int:
        return activations.local_bytes(saved, self.held.layout)

    @property
    def _shape(self) -> tuple[int, int]:
        return self.batch.micro_batch, self.batch.seq_len

    @property
    def _compute(self) -> int:
        return ITEMSIZE[self.precision.compute]

    @property
    def _sharded(self) -> bool:
        return self.held.layout.shard == "parameters"

    @property
    def _by_units(self) -> bool:
        """Whether gradients are reduced block by block to the rank that updates them, as every strategy but DDP does."""
        return self.held.layout.shard != "none"

    @property
    def _is_last(self) -> bool:
        return self.stage == self.held.layout.mesh.pp - 1

    def _head_gradient(self) -> int:
        """The root's gradient while blocks go back: the head's, which a tied embedding shares."""
        if self.held.is_adapted or not self._is_last:
            return 0
        return self.held.head_numel * self._compute

    # Parts

    def _states(self, *, gradients: bool) -> dict[str, int]:
        found = states(self.held, self.precision, self.stage)
        return found if gradients else found | {"gradients": 0}

    def _gradients_wait(self) -> bool:
        """Whether gradients are alive before the last backward: in DDP's buckets always, elsewhere when micro-batches accumulate them."""
        in_buckets = not self._by_units and self.held.layout.mesh.num_ranks > 1
        return in_buckets or (self.policy.grad_accum > 1 and (not self._by_units or self.policy.reduce != "once"))

    def _unreduced(self) -> int:
        """Whole gradients that wait for the one reduction of a step, in the reduce dtype."""
        waits = self._by_units and self.policy.reduce == "once" and self.policy.grad_accum > 1
        return self._trained("stage", ITEMSIZE[self.precision.reduce]) if waits else 0

    def _masters(self) -> int:
        """ZeRO-1 and ZeRO-2 in one dtype: the share that this rank updates rests beside the whole weights that it works on."""
        apart = self._by_units and not self._sharded and self.precision.weight == self.precision.compute
        return self.held.stage_numel(Role.STATE, self.stage, trained=True) * ITEMSIZE[self.precision.weight] if apart else 0

    def _used(self, *, forward: bool) -> int:
        """Parameters as blocks use them: gathered units of full shard (the root, a block and the next), or casts that autograd keeps."""
        if self._sharded:
            kept = self.policy.keep_gathered or (forward and not self.policy.reshard)
            return self._parameters("stage", self._compute) if kept else self._parameters("root", self._compute) + 2 * self._base("block")
        if self.held.is_adapted:
            return self._dequantised()
        if self.held.layout.shard == "none" and self.precision.compute != self.precision.weight:
            if self.policy.recompute != "none":
                return self._parameters("root", self._compute) + self._parameters("block", self._compute)
            return self._parameters("stage", self._compute)
        return self._masters()

    def _base(self, which: str) -> int:
        """A gathered block: in the compute dtype; qlora gathers it in NF4 and dequantises one projection at a time."""
        return self._parameters(which, self._compute) if self.held.method != "qlora" else self._parameters(which, NF4_BYTES) + self._dequantised()

    def _dequantised(self) -> int:
        return self._compute * max((t.numel for t in self.held.model.block if t.kind == "matmul"), default=0) if self.held.method == "qlora" else 0

    @property
    def _block_kept(self) -> int:
        return self._saved(activations.kept(self.held.model, self.held.layout, *self._shape, self.precision.compute, self.policy.recompute))

    @property
    def _num_kept(self) -> int:
        """Blocks that wait for backward, of all micro-batches in flight: one, or under 1F1B as many as there are stages from here on."""
        in_flight = min(self.policy.grad_accum, self.held.layout.mesh.pp - self.stage)
        return in_flight * self.held.stage_num_layers(self.stage)

    @property
    def _offloads(self) -> bool:
        return self.policy.offload and self.kind != "cpu"

    def host_bytes(self) -> int:
        """What waits in host memory."""
        return self._num_kept * self._block_kept if self._offloads else 0

    def _activations(self) -> int:
        """What blocks keep, and the head; of blocks whose inputs wait elsewhere those of the one at work and of the next."""
        once = self._saved(activations.head(self.held.model, self.held.layout, *self._shape, self.precision.compute)) if self._is_last else 0
        return (min(self._num_kept, 2) if self._offloads else self._num_kept) * self._block_kept + once

    def _block_working_set(self) -> int:
        """What the backward of one block adds: what it computes again, and the gradients of its widest part.

        In the MLP three ffn-wide gradients are alive at once (of the product, the activated gate and up), beside those of stream and norm.
        """
        model, compute = self.held.model, self._compute
        tokens = activations.local_tokens(self.held.layout, *self._shape)
        again = self._saved(activations.again(model, self.held.layout, *self._shape, self.precision.compute, self.policy.recompute))
        return again + tokens * (3 * compute * model.ffn // self.held.layout.mesh.tp + (2 * compute + ITEMSIZE["float32"]) * model.hidden)

    # Moments

    def _loss(self) -> _Moment:
        logits = self._saved(activations.logits(self.held.model, self.held.layout, *self._shape)) if self._is_last else 0
        working = self._used(forward=True) + self._unreduced()
        return _Moment(**self._states(gradients=self._gradients_wait()), working=working, activations=self._activations(), logits=logits)

    def _block_backward(self) -> _Moment:
        """The first blocks to go back: nearly all activations are still there. Full shard holds the whole gradients of one block, of the one
        before it in the reduce dtype while it is reduced, and of the head."""
        unit = self._trained("block", self._compute) if self._by_units or self.precision.compute != self.precision.weight else 0
        reducing = self._trained("block", ITEMSIZE[self.precision.reduce]) if self._by_units else 0
        root = self._head_gradient() if self._by_units else 0
        working = self._used(forward=not self.policy.reshard) + self._unreduced() + unit + reducing + root
        kept = self._activations() + self._block_working_set()
        return _Moment(**self._states(gradients=True), working=working, activations=kept)

    def _end_of_backward(self) -> _Moment:
        """The root's gradients, complete only now, are cast and reduced as one."""
        if not self._by_units:
            # DDP's gradients are views of its buckets: reducing takes no more.
            return _Moment(**self._states(gradients=True), working=self._trained("root", self._compute))
        reduce = ITEMSIZE[self.precision.reduce]
        gathered = self._parameters("stage" if self.policy.keep_gathered else "root", self._compute) if self._sharded else self._masters()
        working = gathered + self._trained("root", self._compute + reduce) + self._unreduced()
        return _Moment(**self._states(gradients=True), working=working)

    def _update(self) -> _Moment:
        """Fused AdamW makes no temporaries; stochastic rounding has a piece of weight, gradient and moments in float32, a root, and its noise."""
        piece = min(self.held.largest_tensor_numel, ROUNDED_AT_ONCE[self.kind])
        rounding = ROUNDING_COPIES * ITEMSIZE["float32"] * piece if self.precision.stochastic_rounding else 0
        return _Moment(**self._states(gradients=True), working=rounding)


def memory(
    held: Holding, policy: Policy, precision: Precision, batch: Batch, *, usable_bytes: int, kind: str, host_usable_bytes: int | None = None
) -> Memory:
    """Memory of every pipeline stage's fullest rank; the fullest stage speaks for all.

    `states_bytes` is exact. The interval of the peak comes from `Overhead`; parts are those of the expected peak and add up to it.
    """
    overhead = OVERHEAD[kind] if held.model.kept is None else replace(OVERHEAD[kind], unsure=ESTIMATED)
    ranks = [_Rank(held, policy, precision, batch, stage, kind) for stage in range(held.layout.mesh.pp)]
    stages = [_stage(rank, overhead) for rank in ranks]
    fullest = max(stages, key=lambda s: s.peak_bytes.expected)
    states_bytes, host_bytes = max(s.states_bytes for s in stages), max(rank.host_bytes() for rank in ranks)
    return Memory(usable_bytes, fullest.peak_bytes, states_bytes, fullest.parts_bytes, tuple(stages), host_bytes, host_usable_bytes)


def verdict(found: Memory) -> Verdict:
    """`fits` when even the high estimate does, `does_not_fit` when the expected one does not, or the host has no room, else `at_risk`."""
    if found.host_usable_bytes is not None and found.host_bytes > found.host_usable_bytes:
        return "does_not_fit"
    if found.peak_bytes.high <= found.usable_bytes:
        return "fits"
    return "does_not_fit" if found.peak_bytes.expected > found.usable_bytes else "at_risk"


def _stage(rank: _Rank, overhead: Overhead) -> Stage:
    moment = max(rank.moments(), key=lambda m: m.total)
    speaks = rank.held.layout.mesh.num_ranks > 1

    def total(of: str) -> float:
        framework = getattr(overhead.context, of) + (getattr(overhead.nccl, of) if speaks else 0)
        return moment.total - moment.passing + moment.passing * getattr(overhead.unsure, of) * (1 + getattr(overhead.slack, of)) + framework

    parts = vars(moment) | {
        "framework": round(overhead.context.expected + (overhead.nccl.expected if speaks else 0)),
        "allocator": round(moment.passing * overhead.slack.expected),
    }
    states_bytes = sum(states(rank.held, rank.precision, rank.stage).values())
    peak = Range(round(total("low")), round(total("expected")), round(total("high")))
    return Stage(rank.stage, peak, states_bytes, parts)
