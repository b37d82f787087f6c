"""Receipt: the measurement beside the promise, part by part."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from pentamesh.layout.crossings import LedgerRow
from pentamesh.plan.plan import Plan

__all__ = ["SCHEMA", "VERSION", "Measured", "receipt"]

SCHEMA, VERSION = "pentamesh.receipt", 1


@dataclass(frozen=True)
class Measured:
    """What one start of a run measured, from its first step on: seconds and tokens of each step, bytes of the fullest rank, and one step's ledger.

    Bytes and ledger are None where they were not measured: a start of one step has no steady one.
    """

    from_step: int
    step_s: tuple[float, ...]
    num_tokens: tuple[int, ...]
    peak_bytes: int | None
    rss_peak_bytes: int
    states_bytes: int | None
    states_parts_bytes: dict[str, int]
    ledger: tuple[LedgerRow, ...] | None
    predicted_ledger: tuple[LedgerRow, ...]
    first_loss: float
    last_loss: float


def receipt(plan: Plan, measured: Measured) -> dict[str, Any]:
    """Predicted, measured and measured / predicted of each part. Medians over the steady steps: the first two set things up."""
    steady = measured.step_s[2:] or measured.step_s
    tokens = measured.num_tokens[2:] or measured.num_tokens
    step_s = median(steady) if steady else None
    tokens_per_s = sum(tokens) / sum(steady) if steady and sum(steady) else None
    batch = plan.job.batch
    wire = None if measured.ledger is None else sum(row.wire_bytes for row in measured.ledger)
    parts = {
        # A plan counts every sequence at its longest; rows that are shorter make steps of fewer tokens, and fewer tokens a second.
        "tokens_per_step": _part(batch.global_batch * batch.seq_len, sum(tokens) / len(tokens) if tokens else None),
        "step_s": _part(plan.time.step_s.expected, step_s),
        "tokens_per_s": _part(plan.tokens_per_s, tokens_per_s),
        "peak_bytes": _part(_allocated(plan), measured.peak_bytes),
        "states_bytes": _part(plan.memory.states_bytes, measured.states_bytes),
        "wire_bytes_per_rank": _part(sum(row.wire_bytes for row in measured.predicted_ledger), wire),
    }
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "plan": plan.fingerprint,
        "strategy": plan.strategy,
        "from_step": measured.from_step,
        "to_step": measured.from_step + len(measured.step_s) - 1,
        "num_steps": len(measured.step_s),
        "parts": parts,
        "states_parts_bytes": measured.states_parts_bytes,
        "ledger_equal": None if measured.ledger is None else measured.ledger == measured.predicted_ledger,
        "ledger": None if measured.ledger is None else [vars(row) for row in measured.ledger],
        "rss_peak_bytes": measured.rss_peak_bytes,
        "loss": {"first": measured.first_loss, "last": measured.last_loss},
    }


def _allocated(plan: Plan) -> float:
    """The planned peak of what a step's tensors take, which is what is measured: without the framework's own, what lies unused, and a checkpoint on
    its way to disk."""
    parts = plan.memory.parts_bytes
    return plan.memory.peak_bytes.expected - parts["framework"] - parts["allocator"] - parts.get("copy", 0)


def _part(predicted: float, measured: float | None) -> dict[str, float | None]:
    return {"predicted": predicted, "measured": measured, "ratio": measured / predicted if measured is not None and predicted else None}
