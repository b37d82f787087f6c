"""`predict`: one layout judged - whether it fits, what moves, how long a step takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pentamesh.cost.compute import flop_per_token, offloading_s, peak_flop_per_s, tokens_per_step, work
from pentamesh.cost.holding import Holding
from pentamesh.cost.memory import memory, verdict
from pentamesh.cost.needs import Communication, Memory, Range, Time, Verdict
from pentamesh.cost.traffic import communication, flows
from pentamesh.job.hardware import Hardware
from pentamesh.job.job import Batch
from pentamesh.job.precision import Precision
from pentamesh.layout.policy import Policy

__all__ = ["Prediction", "predict"]

# While NCCL moves data, kernels beside it slow down: SM tax 0.02-0.15 (Calculon, SC'23), 1.1-1.3 (Galvatron, VLDB'23).
OVERLAP_TAX = 0.15
# Spread of measured steps around one efficiency: 8B on H100 is published between 24 and 45% MFU, around an expected 40% with recompute.
COMPUTE_SPREAD = Range(0.85, 1.0, 1.5)
# Fabric and ring efficiency: 0.74-0.92 of a NIC, 0.8-1.07 of NVLink. High: a third of what should hide does not.
EXPOSED_SPREAD = Range(0.8, 1.0, 1.4)
UNHIDDEN_HIGH = 1 / 3


@dataclass(frozen=True)
class Prediction:
    """One layout and policy with everything that follows from them. Memory is cheap and always there; time is computed when asked for."""

    held: Holding
    policy: Policy
    precision: Precision
    batch: Batch
    hardware: Hardware
    memory: Memory

    @property
    def verdict(self) -> Verdict:
        return verdict(self.memory)

    @cached_property
    def communication(self) -> tuple[Communication, ...]:
        found = flows(self.held, self.policy, self.precision, self.batch.seq_len, self.hardware)
        return communication(found, self.policy, self._work, self.hardware.device.kind, bucketed=not self.held.layout.cuts_state)

    @cached_property
    def _work(self):
        return work(self.held, self.policy, self.precision, self.batch, self.hardware.device)

    @cached_property
    def time(self) -> Time:
        """Seconds of one step: computing, what communication adds to it, and the pipeline's bubble (p - 1) / m of what its stages do.

        Source of the bubble: Narayanan et al. 2021 (arXiv 2104.04473), GPipe and 1F1B.
        """
        exposed = sum(c.exposed_s for c in self.communication)
        hidden = sum(c.seconds for c in self.communication) - exposed
        micro = self._work.forward_s + self._work.backward_s
        compute = micro * self.policy.grad_accum + self._work.optimizer_s + OVERLAP_TAX * hidden
        bubble = (self.held.layout.mesh.pp - 1) * micro
        low = (compute + bubble) * COMPUTE_SPREAD.low + exposed * EXPOSED_SPREAD.low
        high = (compute + bubble) * COMPUTE_SPREAD.high + exposed * EXPOSED_SPREAD.high + hidden * UNHIDDEN_HIGH
        return Time(Range(low, compute + exposed + bubble, high), compute, exposed, bubble)

    @property
    def offloading_s(self) -> float:
        """Of the computing, what copies of block inputs to the host and back take."""
        return 2 * self.policy.grad_accum * offloading_s(self.held, self.policy, self.precision, self.batch, self.hardware.device)

    @property
    def tokens_per_s(self) -> float:
        return tokens_per_step(self.held, self.batch, self.policy) / self.time.step_s.expected

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens_per_s / self.held.layout.mesh.num_ranks

    @property
    def mfu(self) -> float:
        """Model FLOP (6 N + 12 L s a d, recompute not counted) over the dense peak of the compute dtype."""
        return self.tokens_per_s_per_gpu * flop_per_token(self.held, self.batch.seq_len) / peak_flop_per_s(self.hardware.device, self.precision)


def predict(held: Holding, policy: Policy, precision: Precision, batch: Batch, hardware: Hardware) -> Prediction:
    """The judgement of one layout and policy. Units: bytes and seconds of the fullest and busiest rank."""
    device = hardware.device
    host = hardware.host_usable_bytes_per_device
    found = memory(held, policy, precision, batch, usable_bytes=device.usable_bytes, kind=device.kind, host_usable_bytes=host)
    return Prediction(held, policy, precision, batch, hardware, found)
