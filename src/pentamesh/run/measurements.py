"""Measurements: what a run learns about itself while it goes, for its lines of metrics and its receipt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from pentamesh.errors import Problem
from pentamesh.layout.crossings import LedgerRow, ledger
from pentamesh.layout.rhythm import rhythm
from pentamesh.plan.plan import Plan
from pentamesh.plan.receipt import Measured
from pentamesh.run.arrivals import arrivals, by_micro_batch
from pentamesh.run.data.batches import Micro
from pentamesh.run.ledger import Recorder, differences
from pentamesh.run.peak import measured_peak, rss_peak_bytes
from pentamesh.run.standing import Standing
from pentamesh.run.step import StepResult, Trainee

__all__ = ["Measurements"]

# Steps of a start whose peak is measured on CPU, where measuring takes time; CUDA counts for nothing.
NUM_PEAK_STEPS = 2
# The step of a start, from 0, from which on one with a trained token has its collectives recorded: the first one sets things up.
STEADY = 1


@dataclass
class Measurements:
    """Of this start of a run, whose first step is `from_step`."""

    plan: Plan
    trainee: Trainee
    from_step: int
    step_s: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    ledger: list[LedgerRow] | None = None
    recorded: int = STEADY
    lengths: list[int] = field(default_factory=list)
    samples: list[int] | None = None
    came: list[list[int]] | None = None
    standing: Standing = field(default_factory=Standing)
    # Bytes of the copy that is saved beside the steps: on a CPU the allocator counts them, and no step has made them.
    copy_bytes: Callable[[], int] = lambda: 0

    @contextmanager
    def instruments(self, micros: Sequence[Micro]) -> Iterator[Callable[[Trainee], None] | None]:
        """Measure one step inside the block; yields what is to look at the trainee when its gradient is whole, if anything is."""
        index, world = len(self.step_s), self.trainee.world
        with ExitStack() as stack:
            peak = recorder = came = None
            if index < NUM_PEAK_STEPS or world.device.type == "cuda":
                peak = stack.enter_context(measured_peak(world.device))
            if index >= STEADY and self.ledger is None:
                self.recorded, self.lengths = index, [world.share.row_length(micro.input_ids.shape[1]) for micro in micros]
                self.samples = [len(micro.sizes) for micro in micros if micro.sizes is not None]
                recorder, came = stack.enter_context(Recorder(world)), stack.enter_context(arrivals(self.trainee.module))
                stack.enter_context(self.standing.watched(self.trainee))
            yield self.standing.look if recorder is not None else None
        if peak is not None and peak.peak_bytes is not None:
            copied = self.copy_bytes() if world.device.type == "cpu" else 0
            self.peak_bytes = max(self.peak_bytes or 0, peak.peak_bytes - copied)
        if recorder is not None and came is not None:
            self.ledger, self.came = recorder.rows(), by_micro_batch(came, len(micros))

    def add(self, result: StepResult, elapsed_s: float) -> None:
        """Note what a step took and gave. One without a trained token has computed nothing: another is recorded for it."""
        if not result.num_trained_tokens and self.recorded == len(self.step_s):
            self.ledger = self.came = self.samples = None
            self.lengths = []
        self.step_s.append(elapsed_s)
        self.num_tokens.append(result.num_tokens)
        self.losses.append(result.loss)

    def drift(self) -> tuple[Problem, ...]:
        """Every collective of the recorded step that this rank made and was not predicted to, or the other way round."""
        lines = [] if self.ledger is None else differences(self._predicted(), self.ledger)
        step = f"step {self.from_step + self.recorded} on rank {self.trainee.world.rank}"
        return tuple(Problem(line, f"collectives of {step}") for line in lines)

    def facts(self) -> Measured | None:
        """What goes into the receipt, None of a start without a step. Collective: bytes are those of the fullest rank."""
        standing, world = self.standing, self.trainee.world
        kinds = (standing.weights, standing.gradients, standing.optimizer)
        peak, rss, fullest, *_ = fullest_rank = world.max([self.peak_bytes or 0, rss_peak_bytes(), standing.num_bytes, *kinds])
        if not self.step_s:
            return None
        return Measured(
            from_step=self.from_step,
            step_s=tuple(self.step_s),
            num_tokens=tuple(self.num_tokens),
            peak_bytes=peak or None,
            rss_peak_bytes=rss,
            states_bytes=fullest or None,
            states_parts_bytes=dict(zip(("weights", "gradients", "optimizer"), fullest_rank[3:], strict=True)),
            ledger=None if self.ledger is None else tuple(self.ledger),
            predicted_ledger=tuple(self._predicted()),
            first_loss=self.losses[0],
            last_loss=self.losses[-1],
        )

    def _predicted(self) -> list[LedgerRow]:
        """Of a step of rows as long as the recorded ones, and as many that come to experts here: what is sent grows with them."""
        plan, lengths = self.plan, self.lengths or self.plan.job.batch.seq_len
        rank = self.trainee.world.rank
        return ledger(rhythm(self.trainee.model, plan.layout, plan.policy, plan.precision, lengths, rank, self.came, self.samples))
