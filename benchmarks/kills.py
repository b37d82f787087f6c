"""`python benchmarks/kills.py --n 200`: a small job of four processes, killed by SIGKILL in every phase of its checkpoints, and what was lost.

Each trial is drawn from its seed (tests/trials/kills.py says how). A trial counts when the kill fell into the phase that was meant; one that came too
late is tried again with a seed some thousands further. Whatever was lost is told with its seed, and the command then ends with 1; `--seed 8` tries
one again.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pentamesh.checkpoint.phases import PHASES
from tests.trials.kills import EVERY, RANKS, STEPS, Disturbed, Trial, Undisturbed, hits, target, undisturbed

HEAD = ("seed", "phase", "occurrence", "rank", "after", "killed", "what was left", "gone on from", "equal")


def table(trials: list[Trial]) -> str:
    """The trials as a page: totals by phase, then one line each."""
    phases, alone = Counter(trial.target.phase for trial in trials), sum(not trial.target.everyone for trial in trials)
    equal = sum(trial.equal for trial in trials)
    return "\n".join(
        [
            "# Runs that were killed",
            "",
            f"Written by `python benchmarks/kills.py --n {len(trials)}`. A job of {RANKS} processes and {STEPS} steps saves every {EVERY} and keeps",
            "one checkpoint. It is killed by SIGKILL, one rank (the others are then ended as torchrun does it) or all at once, resumed, and",
            "compared with an undisturbed run: every tensor of the last checkpoint bit by bit (weights, moments, random states), and every loss.",
            "",
            f"**{len(trials)} killed, {equal} equal, {len(trials) - equal} not**; {alone} times one rank, {len(trials) - alone} times all.",
            "",
            _row(("phase", "killed in it")),
            _row(("---",) * 2),
            *(_row((phase, phases[phase])) for phase in PHASES),
            "",
            "A line each: the phase and which of its kind, the rank that was in it, and how long after it began the kill was sent.",
            "",
            _row(HEAD),
            _row(("---",) * len(HEAD)),
            *(_row(_line(trial)) for trial in trials),
            "",
        ]
    )


def _line(trial: Trial) -> tuple[object, ...]:
    aim = trial.target
    who = "all" if aim.everyone else "one"
    left = trial.left.replace("step-0000000", "step-…")
    resumed = trial.resumed_from.replace("step-0000000", "step-…")
    return aim.seed, aim.phase, aim.nth, aim.rank, f"{1e3 * aim.delay_s:.1f} ms", who, left, resumed, "yes" if trial.equal else "NO"


def _row(cells: tuple[object, ...]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=200, help="trials, of seeds 0 to n - 1")
    parser.add_argument("--seed", type=int, help="only the trial of this seed, without writing the table")
    parser.add_argument("--table", type=Path, default=Path(__file__).with_suffix(".md"))
    given = parser.parse_args()
    started, trials = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="pentamesh-kills-") as folder:
        reference = undisturbed(Path(folder) / "undisturbed")
        for seed in range(given.n) if given.seed is None else [given.seed]:
            trials.append(_tried(reference, Path(folder), seed))
            if given.seed is None:
                given.table.write_text(table(trials))
    phases, lost = Counter(trial.target.phase for trial in trials), sum(not trial.equal for trial in trials)
    print(f"{len(trials)} killed, {lost} lost: {', '.join(f'{phases[phase]} in {phase}' for phase in PHASES)}; {time.monotonic() - started:.0f} s")
    sys.exit(lost > 0)


def _tried(reference: Undisturbed, folder: Path, seed: int) -> Trial:
    try:
        found = next(hits(reference, folder, [seed]))
    except Disturbed as loss:
        print(f"LOST by seed {seed}: {loss}", flush=True)
        return Trial(target(seed), hit=True, left="see the log", resumed_from="see the log")
    print(found, flush=True)
    return found


if __name__ == "__main__":
    main()
