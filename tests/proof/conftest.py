"""Counts what the proofs compared, and prints it at the end of the session."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

_TOTALS: dict[str, dict[str, float]] = defaultdict(dict)


@pytest.fixture
def record_proof() -> Callable[..., None]:
    """`record_proof(title, things=3, worst_relative_error=1e-16)`: counts add up, errors keep their worst."""

    def record(title: str, **facts: Any) -> None:
        totals = _TOTALS[title]
        for name, value in facts.items():
            totals[name] = max(totals.get(name, 0.0), value) if name.startswith("worst") else totals.get(name, 0) + value

    return record


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for title, facts in _TOTALS.items():
        said = ", ".join(
            f"{value:.1e} {name.replace('_', ' ')}" if isinstance(value, float) else f"{value:,} {name}" for name, value in facts.items()
        )
        terminalreporter.write_line(f"proof: {title}: {said}")
