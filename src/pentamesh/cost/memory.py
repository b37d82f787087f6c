"""Memory of the fullest rank: the fullest moment of a steady step, and how sure that is.

What is alive at each moment is counted in `cost.moments`; here it becomes a peak with its bounds, its parts, and a verdict. Where experts are parted,
bounds are as far apart as routers may be from even (`cost.experts`).
"""

from __future__ import annotations

from typing import NamedTuple

from pentamesh.cost.holding import Holding, states
from pentamesh.cost.moments import Rank
from pentamesh.cost.needs import Memory, Range, Stage, Verdict
from pentamesh.job.job import Batch
from pentamesh.job.precision import Precision
from pentamesh.layout.policy import Policy

__all__ = ["memory", "verdict"]

GIB = 2**30


class Overhead(NamedTuple):
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

# Of a model of no described family: autograd kept 0.95 to 1.38 times the estimate in blocks of VaultGemma, OLMo 3, GLM, Granite, Mixtral, Qwen3-MoE
# and Phi (tests/model/test_generic.py).
ESTIMATED = Range(0.8, 1.0, 1.3)


def memory(
    held: Holding, policy: Policy, precision: Precision, batch: Batch, *, usable_bytes: int, kind: str, host_usable_bytes: int | None = None
) -> Memory:
    """Memory of every pipeline stage's fullest rank; the fullest stage speaks for all.

    `states_bytes` is exact. The interval of the peak comes from `Overhead`; parts are those of the expected peak and add up to it.
    """
    overhead = OVERHEAD[kind] if held.model.kept is None else OVERHEAD[kind]._replace(unsure=ESTIMATED)
    ranks = [Rank(held, policy, precision, batch, stage, kind) for stage in range(held.layout.mesh.pp)]
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


def _stage(rank: Rank, overhead: Overhead) -> Stage:
    moments, rows = rank.moments(), rank.imbalance
    moment = max(moments, key=lambda m: m.total(rows.expected))
    speaks = rank.held.layout.mesh.num_ranks > 1

    def total(of: str) -> float:
        framework = getattr(overhead.context, of) + (getattr(overhead.nccl, of) if speaks else 0)
        fullest = max(moments, key=lambda m: m.total(getattr(rows, of)))
        return fullest.resting + fullest.passing(getattr(rows, of)) * getattr(overhead.unsure, of) * (1 + getattr(overhead.slack, of)) + framework

    parts = moment._asdict() | {
        "experts": round(moment.experts * rows.expected),
        "framework": round(overhead.context.expected + (overhead.nccl.expected if speaks else 0)),
        "allocator": round(moment.passing(rows.expected) * overhead.slack.expected),
    }
    states_bytes = sum(states(rank.held, rank.precision, rank.stage).values())
    peak = Range(round(total("low")), round(total("expected")), round(total("high")))
    return Stage(rank.stage, peak, states_bytes, parts)
