"""A run that is killed at any moment loses nothing: what was published is whole, and the resumed run is the undisturbed one bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from pentamesh.checkpoint.phases import PHASES
from tests.trials.kills import hits, undisturbed

TRIALS = 25


@pytest.mark.timeout(600)
def test_a_run_that_is_killed_in_any_phase_is_gone_on_with_bit_for_bit(tmp_path: Path, record_proof: Callable[..., None]) -> None:
    reference = undisturbed(tmp_path / "undisturbed")
    found = list(hits(reference, tmp_path, range(TRIALS)))
    by_phase = Counter(trial.target.phase for trial in found)
    assert all(trial.equal for trial in found)
    assert len(found) == TRIALS
    assert min(by_phase[phase] for phase in PHASES) >= 3
    print(*map(str, found), sep="\n")
    facts = {f"in_{phase}": by_phase[phase] for phase in PHASES} | {"of_all_ranks_at_once": sum(trial.target.everyone for trial in found)}
    seeds = " ".join(str(trial.target.seed) for trial in found)
    record_proof("runs killed and gone on with", kills=len(found), lost=0, **facts, seeds=seeds)
