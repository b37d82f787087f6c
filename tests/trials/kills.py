"""Kills: a small job of four processes is ended by SIGKILL in a given phase, resumed, and compared with one that nobody disturbed.

Everything that is random about a trial is drawn from its seed: which phase is hit and which time that it comes, which rank, how long after the phase
began, and whether that rank dies alone (the others are then ended as torchrun does it) or all at once, as when the power goes. How long a phase takes
is for the machine to say: a kill that came too late is tried again sooner, and the last time the rank is held in the phase until it is killed.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from pentamesh.checkpoint.headers import read_header
from pentamesh.checkpoint.keep import newest
from pentamesh.checkpoint.manifest import name_of, verify
from pentamesh.checkpoint.names import latest
from pentamesh.checkpoint.phases import PHASES, Phase
from pentamesh.run.asked import read_asked
from pentamesh.run.folder import RunFolder
from pentamesh.run.launch import keep
from pentamesh.run.options import Options
from tests.run import toy
from tests.trials.worlds import ENDED, FAILED, Heard, Held, World, running

__all__ = ["Disturbed", "Target", "Trial", "Undisturbed", "contents", "hits", "target", "toy_job", "trial", "undisturbed"]

RANKS, STEPS, EVERY = 4, 8, 2
TIMEOUT_S = 120.0
# A kill that came too late is tried again with a seed of the same phase, that many further, and up to half as long after the phase began.
ATTEMPTS, SEEDS = 8, 6000
# A kill comes up to so long after a phase began: about as long as the phase takes here, so that it falls anywhere in it.
LATEST_S: dict[Phase, float] = {"train": 0.06, "copy": 0.006, "flush": 0.06, "publish": 0.01, "prune": 0.002, "restore": 0.04}
# An agent looks after its processes this often (pentamesh.run.launch, monitor_interval).
AGENT_S = 0.2


@dataclass(frozen=True)
class Target:
    """When a run is killed: `delay_s` after `rank` began `phase` for the `nth` time, or `held` there; `everyone` or that rank alone."""

    seed: int
    phase: Phase
    nth: int
    rank: int
    delay_s: float
    everyone: bool
    agent_s: float
    is_held: bool = False

    @property
    def held(self) -> Held | None:
        """Where the rank waits for its end, if it does."""
        return (self.rank, self.phase, self.nth) if self.is_held else None

    def __str__(self) -> str:
        who = "all ranks" if self.everyone else f"rank {self.rank}"
        return f"seed {self.seed}: {who} killed {1e3 * self.delay_s:.1f} ms into {self.phase} {self.nth} of rank {self.rank}"


def target(seed: int) -> Target:
    """What a seed stands for. Phases take turns, and within each one rank and all ranks do."""
    draw = random.Random(seed)
    phase = PHASES[seed % len(PHASES)]
    # The first prune has nothing to remove.
    first, last = {"train": (1, STEPS), "restore": (1, 1), "prune": (2, STEPS // EVERY)}.get(phase, (1, STEPS // EVERY))
    nth = draw.randint(first, last)
    rank = 0 if phase in ("publish", "prune") else draw.randrange(RANKS)
    everyone = seed // len(PHASES) % 2 == 1
    num_late = seed // SEEDS
    is_held = num_late >= ATTEMPTS - 1
    delay_s = 0.0 if is_held else draw.uniform(0, LATEST_S[phase] / 2**num_late)
    return Target(seed, phase, nth, rank, delay_s, everyone, draw.uniform(0.01, AGENT_S), is_held)


@dataclass(frozen=True)
class Undisturbed:
    """A run that nobody disturbed: its folder, the tensors of its last checkpoint and its losses."""

    folder: RunFolder
    tensors: dict[str, bytes]
    losses: list[tuple[int, float]]


@dataclass(frozen=True)
class Trial:
    """What became of a run that was killed. `hit` says whether the kill fell into the phase that was meant; the rest is known where it did."""

    target: Target
    hit: bool
    left: str = ""
    resumed_from: str = ""
    equal: bool = False

    def __str__(self) -> str:
        if not self.hit:
            return f"{self.target}: too late"
        return f"{self.target}; {self.left} was left, gone on from {self.resumed_from}{'' if self.equal else ', OTHER THAN UNDISTURBED'}"


class Disturbed(AssertionError):
    """Something was lost; the seed is in its text."""


def toy_job(folder: Path, num_ranks: int = RANKS, **changes: Any) -> Path:
    """The job file of a run of so many processes that saves every second step and keeps one checkpoint."""
    toy.model_folder(folder / "model", hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    checkpoint = {"every": EVERY, "keep": 1, "export": False}
    training = {"steps": STEPS, "evaluate_every": None}
    given: dict[str, Any] = {"hardware": f"{num_ranks}xCPU", "training": training, "checkpoint": checkpoint, "data__held_out": None}
    return toy.job(folder, batch={"seq_len": 128, "micro_batch": 1, "global_batch": num_ranks}, **given | changes)


def undisturbed(folder: Path, num_ranks: int = RANKS) -> Undisturbed:
    """Make the job in `folder`, and run it to its end."""
    folder.mkdir(parents=True, exist_ok=True)
    made = keep(read_asked(toy_job(folder, num_ranks)), Options(), even_so=False)
    with running(made.path, num_ranks, folder / "log.txt", resume=False) as world:
        _to_the_end(world, folder / "log.txt", "undisturbed")
    return Undisturbed(made, contents(made.checkpoints / name_of(STEPS)), losses(made))


def trial(reference: Undisturbed, folder: Path, aim: Target) -> Trial:
    """Kill a run as aimed, in `folder`, see what is there, resume it to its end and compare. Raises Disturbed where anything was lost."""
    run = RunFolder(folder / "run")
    shutil.copytree(reference.folder.path, run.path, ignore=shutil.ignore_patterns("checkpoints", "*.jsonl", "receipt.json", "run.lock"))
    log = folder / "log.txt"
    if aim.phase == "restore":
        draw = random.Random(aim.seed)
        before = replace(aim, phase="train", nth=draw.randint(STEPS - 3, STEPS), is_held=False)
        _struck(run, log, before, resume=False)
    if not _struck(run, log, aim, resume=aim.phase == "restore"):
        return Trial(aim, hit=False)
    left = " ".join(sorted(path.name for path in run.checkpoints.glob("step-*"))) if run.checkpoints.is_dir() else ""
    found = _whole(run, aim)
    with running(run.path, RANKS, folder / "resumed.txt", resume=True) as world:
        _to_the_end(world, folder / "resumed.txt", str(aim))
    _expect(_resumed_from(folder / "resumed.txt") == found, aim, f"{left} was left and {found} is the newest that is whole; it was not gone on from")
    _all_is_as_if_undisturbed(reference, run, aim)
    return Trial(aim, hit=True, left=left or "nothing", resumed_from=found or "the start", equal=True)


def hits(reference: Undisturbed, folder: Path, seeds: Iterable[int]) -> Iterator[Trial]:
    """A trial in `folder` for each seed, and where the kill came too late, for the next seed of the same phase. Raises Disturbed."""
    for seed in seeds:
        for again in range(seed, seed + ATTEMPTS * SEEDS, SEEDS):
            place = folder / f"seed-{again}"
            found = trial(reference, place, target(again))
            shutil.rmtree(place)
            if found.hit:
                yield found
                break
        else:
            raise Disturbed(f"{ATTEMPTS} kills missed {target(seed).phase}, from seed {seed} on")


def _struck(run: RunFolder, log: Path, aim: Target, *, resume: bool) -> bool:
    """Run until it is killed as aimed, and return whether the kill fell into the phase. Raises Disturbed where a checkpoint is lost."""
    before = _newest_step(run)
    with running(run.path, RANKS, log, resume=resume, held=aim.held) as world:
        meant = _reached(world, aim)
        if meant is None:
            return False
        time.sleep(aim.delay_s)
        at_s = world.kill(aim.rank)
        for other in set(range(RANKS)) - {aim.rank} if aim.everyone else ():
            world.kill(other)
        world.end(0.0 if aim.everyone else aim.agent_s)
        for _ in world.listen(TIMEOUT_S):  # what they had said until then
            pass
        said = world.heard
    num_published = sum(heard.what == "publish" for heard in said[0])
    sure = before + EVERY * (num_published - 1)  # saves come one after the other: all but the last are over
    _expect(_newest_step(run) >= sure, aim, f"step {sure} had been published and is gone")
    return _in_phase(said, aim, meant, at_s) and not _over(run, aim)


def _reached(world: World, aim: Target) -> Heard | None:
    """Listen until the rank begins the phase for the nth time, and return that; None where the run ends before."""
    num = 0
    for rank, heard in world.listen(TIMEOUT_S):
        _expect(heard.what != FAILED, aim, f"rank {rank} failed before it was killed:\n{heard.more}")
        num += rank == aim.rank and heard.what == aim.phase
        if num == aim.nth:
            return heard
    return None


def _in_phase(said: list[list[Heard]], aim: Target, meant: Heard, at_s: float) -> bool:
    """Whether the phase was the last thing that the rank had begun on that thread when it died, and what comes after it had not begun elsewhere.

    Saves come one after the other, each copied, flushed by all ranks and published by the first, on whichever thread.
    """

    def begun(rank: int, phase: str) -> int:
        return sum(heard.what == phase and heard.at_s <= at_s for heard in said[rank])

    own = [heard for heard in said[aim.rank] if heard.thread == meant.thread and heard.at_s <= at_s]
    if own[-1] is not meant or begun(aim.rank, ENDED):
        return False
    if aim.phase in ("copy", "flush"):
        return (begun(aim.rank, "flush") if aim.phase == "copy" else begun(0, "publish")) < aim.nth
    return True


def _over(run: RunFolder, aim: Target) -> bool:
    """Whether the disk shows that a phase, after which its thread may have nothing more to say, had come to its end."""
    if aim.phase == "publish":
        return (found := latest(run.checkpoints)) is not None and found.name == name_of(EVERY * aim.nth)
    if aim.phase == "prune":
        return len(_finished(run)) == 1 and not [*run.checkpoints.glob("*.removed")]
    return False


def _finished(run: RunFolder) -> list[Path]:
    """Folders whose names say that they are finished checkpoints, the newest first; by this file's own rule, not by the product's."""
    found = [path for path in run.checkpoints.glob("step-*") if not path.name.endswith((".partial", ".removed"))]
    return sorted(found, key=lambda path: path.name.removesuffix(".replaced"), reverse=True)


def _newest_step(run: RunFolder) -> int:
    return int(found[0].name.removesuffix(".replaced").removeprefix("step-")) if (found := _finished(run)) else 0


def _whole(run: RunFolder, aim: Target) -> str:
    """The name of the newest finished checkpoint, or nothing where there is none. Raises Disturbed where one that is finished is not whole."""
    finished = _finished(run)
    problems = [str(problem) for path in finished for problem in verify(path)]
    _expect(not problems, aim, "\n".join(problems))
    found = newest(run.checkpoints)
    _expect(found == (finished[0] if finished else None), aim, f"{found} is taken for the newest checkpoint of {finished}")
    return found.name if found else ""


def _to_the_end(world: World, log: Path, who: str) -> None:
    for rank, heard in world.listen(TIMEOUT_S):
        if heard.what == FAILED:
            raise Disturbed(f"{who}: rank {rank} failed:\n{heard.more}")
    ended = [any(heard.what == ENDED for heard in said) for said in world.heard]
    if not all(ended):
        raise Disturbed(f"{who}: ranks {[rank for rank, has_ended in enumerate(ended) if not has_ended]} died:\n{log.read_text()}")


def _all_is_as_if_undisturbed(reference: Undisturbed, run: RunFolder, aim: Target) -> None:
    """Every tensor of the last checkpoint bit by bit, every line of the metrics, and nothing of the dead beside them."""
    found = contents(run.checkpoints / name_of(STEPS))
    _expect(found.keys() == reference.tensors.keys(), aim, "the last checkpoint has other tensors than without the kill")
    differing = [name for name in found if found[name] != reference.tensors[name]]
    _expect(not differing, aim, f"{len(differing)} tensors differ from those of an undisturbed run: {differing[:5]}")
    _expect(losses(run) == reference.losses, aim, f"the metrics are {losses(run)} and not {reference.losses}")
    names = {path.name for path in run.checkpoints.glob("step-*")}
    _expect(names == {name_of(STEPS)}, aim, f"what is left is {sorted(names)}")
    left = sorted(str(path.relative_to(run.path)) for path in run.path.rglob("*.partial"))
    _expect(not left, aim, f"dead runs left {left}")


def contents(checkpoint: Path) -> dict[str, bytes]:
    """The bits of every tensor of a checkpoint, put together from the parts that its files hold."""
    parts: dict[str, list[tuple[tuple[int, ...], torch.Tensor]]] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        entries = read_header(path).entries
        for name, tensor in load_file(path).items():
            parts.setdefault(name, []).append((entries[name].offset, tensor))
    return {name: _joined(found).contiguous().flatten().view(torch.uint8).numpy().tobytes() for name, found in parts.items()}


def _joined(parts: list[tuple[tuple[int, ...], torch.Tensor]]) -> torch.Tensor:
    ends = [[low + length for low, length in zip(offset, part.shape, strict=True)] for offset, part in parts]
    whole = torch.empty([max(lengths) for lengths in zip(*ends, strict=True)], dtype=parts[0][1].dtype)
    assert whole.numel() == sum(part.numel() for _, part in parts)
    for offset, part in parts:
        whole[tuple(slice(low, low + length) for low, length in zip(offset, part.shape, strict=True))] = part
    return whole


def losses(run: RunFolder) -> list[tuple[int, float]]:
    """Step and loss of every line of the metrics."""
    return [(row["step"], row["loss"]) for row in map(json.loads, run.metrics.read_text().splitlines())]


def _resumed_from(log: Path) -> str:
    found = re.search(r"resumed from (\S+): step", log.read_text())
    return found[1] if found else ""


def _expect(holds: bool, aim: Target, otherwise: str) -> None:
    if not holds:
        raise Disturbed(f"{aim}: {otherwise}")
