"""The progress of a run, as a line: step, loss, speed, share of the promise, memory and time left."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, TextIO

from pentamesh.plan.plan import Plan
from pentamesh.units import format_bytes, format_count, format_seconds

__all__ = ["Progress"]


@dataclass
class Progress:
    """Writes to stderr: one line that renews itself on a terminal, plain lines elsewhere."""

    plan: Plan
    num_steps: int
    every: int = 1
    stream: TextIO = sys.stderr

    def step(self, row: dict[str, Any]) -> None:
        """Show one step; `row` is a line of metrics.jsonl."""
        done = int(row["step"])
        if done % self.every and done != self.num_steps:
            return
        if self.stream.isatty():
            print("\r\x1b[2K" + self._line(row), end="" if done < self.num_steps else "\n", file=self.stream, flush=True)
        else:
            self.say(self._line(row))

    def say(self, text: str) -> None:
        """Write a line of its own."""
        start = "\r\x1b[2K" if self.stream.isatty() else ""
        print(start + text, file=self.stream, flush=True)

    def _line(self, row: dict[str, Any]) -> str:
        left = self.num_steps - row["step"]
        predicted = self.plan.time.step_s.expected
        parts = [
            f"step {int(row['step'])}/{self.num_steps}",
            f"loss {row['loss']:.4f}",
            f"norm {row['grad_norm']:.3g}",
            f"lr {row['lr']:.3g}",
            f"{format_count(row['tokens_per_s'])} tok/s",
            f"{row['step_s']:.2f} s ({row['step_s'] / predicted:.2f}x planned)" if predicted else f"{row['step_s']:.2f} s",
            f"MFU {row['mfu']:.1%}",
            *([f"max load {row['experts']['max_load']:.2f}x"] if "experts" in row else []),
            *([f"peak {format_bytes(row['peak_bytes'])}"] if row["peak_bytes"] is not None else []),
            f"ETA {format_seconds(left * row['step_s'])}" if left else "done",
        ]
        return "  ".join(parts)
