"""Receipt: the measurement beside the promise, part by part."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from pentamesh.layout.rhythm import LedgerRow
from pentamesh.plan.plan import Plan

__all__ = ["SCHEMA", "VERSION", "Measured", "receipt"]

SCHEMA, VERSION = "pentamesh.receipt", 1


@dataclass(frozen=True)
class Measured:
    """What a run measured: seconds of each steady step, tokens of each, bytes of the fullest rank, and one step's ledger."""

    step_s: tuple[float, ...]
    num_tokens: tuple[int, ...]
    peak_bytes: int
    rss_peak_bytes: int
    states_bytes: int
    ledger: tuple[LedgerRow, ...]
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
    wire = (sum(row.wire_bytes for row in rows) for rows in (measured.predicted_ledger, measured.ledger))
    parts = {
        # A plan counts every sequence at its longest; rows that are shorter make steps of fewer tokens, and fewer tokens a second.
        "tokens_per_step": _part(batch.global_batch * batch.seq_len, sum(tokens) / len(tokens) if tokens else None),
        "step_s": _part(plan.time.step_s.expected, step_s),
        "tokens_per_s": _part(plan.tokens_per_s, tokens_per_s),
        "peak_bytes": _part(plan.memory.peak_bytes.expected, measured.peak_bytes),
        "states_bytes": _part(plan.memory.states_bytes, measured.states_bytes),
        "wire_bytes_per_rank": _part(*wire),
    }
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "plan": plan.fingerprint,
        "strategy": plan.strategy,
        "num_steps": len(measured.step_s),
        "parts": parts,
        "ledger_equal": measured.ledger == measured.predicted_ledger,
        "ledger": [vars(row) for row in measured.ledger],
        "rss_peak_bytes": measured.rss_peak_bytes,
        "loss": {"first": measured.first_loss, "last": measured.last_loss},
    }


def _part(predicted: float, measured: float | None) -> dict[str, float | None]:
    return {"predicted": predicted, "measured": measured, "ratio": measured / predicted if measured is not None and predicted else None}
