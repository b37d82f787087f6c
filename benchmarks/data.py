"""`python benchmarks/data.py TOKENIZER`: preparing chat rows beside `datasets.Dataset.map` with the tokenizer's chat template, on the same file.

The peer reads the file into Arrow, then maps a function that calls `apply_chat_template(messages, tokenize=True, return_dict=True)`, with as many
processes as ours. As `peer` it keeps token ids, and all of them would be trained; as `marked` it also asks for the mask of the assistant's tokens,
from a template of SmolLM2 in which they are marked. Where TRL can be imported, `trl` is the preparation of its own SFTTrainer with that template and
`assistant_only_loss`. Ours judges every row, and finds the assistant's tokens with the template as it is. All are asked twice, the second time in a
new process.

Each side runs in processes of its own. Memory is the sum of the resident memory of all of them at its peak, sampled every 100 ms, less that of the
first process when it had imported its libraries; memory of processes that it starts counts whole, also what forked ones share.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MOST_BYTES, MOST_SECOND_S = 1e9, 1.0
SAMPLE_S = 0.1
SEQ_LEN = 2048
# How SmolLM2's template writes a turn, and the same with the assistant's part marked.
TURN = "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
MARKED = (
    "{{'<|im_start|>' + message['role'] + '\n'}}{% if message['role'] == 'assistant' %}{% generation %}{{message['content'] + '<|im_end|>'}}"
    "{% endgeneration %}{% else %}{{message['content'] + '<|im_end|>'}}{% endif %}{{'\n'}}"
)
Tokens = tuple[int, int]  # all, and those that are trained where a side knows


def rows(num: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Different conversations of two to six turns and some 1,000 characters: made-up words, as often as words of a language are (Zipf's law)."""
    draw = random.Random(seed)
    syllables = [a + b for a in "bcdfghlmnprstvw" for b in ("a", "e", "i", "o", "u", "an", "er", "is", "on", "ing")]
    words = ["".join(draw.choices(syllables, k=draw.choice((1, 1, 2, 2, 3)))) for _ in range(8000)]
    odds = list(accumulate(1 / (rank + 2) for rank in range(len(words))))
    for number in range(num):
        turns = []
        for turn in range(2 * draw.choice((1, 2, 2, 3))):
            said = draw.choices(words, cum_weights=odds, k=draw.randint(5, 40) if turn % 2 == 0 else draw.randint(10, 110))
            turns.append({"role": ("user", "assistant")[turn % 2], "content": f"{number}: {' '.join(said)}."})
        yield {"messages": turns}


# What is measured: each side imports, says so, and then returns the tokens that it made.


def ours(file: Path, tokenizer: Path, folder: Path, workers: int) -> Callable[[], Tokens]:
    from pentamesh.job.job import Job
    from pentamesh.run.data.prepare import prepare
    from pentamesh.run.source import tokenizer_of

    found = tokenizer_of(tokenizer)
    job = Job.model_validate({"model": {"name": "x"}, "data": {"train": str(file), "workers": workers}, "batch": {"seq_len": SEQ_LEN}})

    def work() -> Tokens:
        split = prepare(job, found, Path(), folder / "ours").report["splits"]["train"]
        return split["stored_tokens"], split["trained_tokens"]

    return work


def peer(file: Path, tokenizer: Path, folder: Path, workers: int, marked: bool = False) -> Callable[[], Tokens]:
    import datasets
    from pyarrow import compute

    from pentamesh.run.source import tokenizer_of

    datasets.disable_progress_bars()
    found: Any = tokenizer_of(tokenizer)
    if marked:
        found.chat_template = marked_template(found)

    def tokenized(row: dict[str, Any]) -> dict[str, Any]:
        made = found.apply_chat_template(row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=marked)
        ids, trained = made["input_ids"], made.get("assistant_masks", [])
        return {"input_ids": ids, "trained": trained, "num_tokens": len(ids), "num_trained": sum(trained)}

    def work() -> Tokens:
        read: Any = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(folder / ("marked" if marked else "peer")))
        made = read.map(tokenized, num_proc=workers if workers > 1 else None, remove_columns=["messages"])
        return tuple(compute.sum(made.data.column(name)).as_py() for name in ("num_tokens", "num_trained"))  # type: ignore[return-value]

    return work


def marked_template(tokenizer: Any) -> str:
    if TURN not in tokenizer.chat_template:
        raise SystemExit("the template is not that of SmolLM2: leave the side out (--only)")
    return tokenizer.chat_template.replace(TURN, MARKED)


def trl(file: Path, tokenizer: Path, folder: Path, workers: int) -> Callable[[], Tokens]:
    import datasets
    from trl.trainer.sft_trainer import SFTTrainer  # pyright: ignore[reportMissingImports]

    from pentamesh.run.source import tokenizer_of

    datasets.disable_progress_bars()
    found: Any = tokenizer_of(tokenizer)
    trainer = SimpleNamespace(_tokenizer=found, chat_template=marked_template(found), completion_only_loss=False)
    asked = SimpleNamespace(
        dataset_num_proc=workers if workers > 1 else None,
        dataset_text_field="text",
        assistant_only_loss=True,
        max_length=SEQ_LEN,
        truncation_mode="keep_start",
        shuffle_dataset=False,
    )

    def work() -> Tokens:
        read: Any = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(folder / "trl"))
        made = SFTTrainer._prepare_dataset(trainer, read, found, asked, False, None, "train")
        labels = made.data.column("labels").combine_chunks().flatten().to_numpy()
        return len(labels), int((labels != -100).sum())

    return work


SIDES: dict[str, Callable[..., Callable[[], Tokens]]] = {"ours": ours, "peer": peer, "marked": partial(peer, marked=True)}
if find_spec("trl"):
    SIDES["trl"] = trl


def side(name: str, *given: Any) -> None:
    """The process of one side: told by a line on its input to go on, so that what it has imported can be looked at."""
    work = SIDES[name](*given)
    print("imported", flush=True)
    sys.stdin.readline()
    started, used = time.perf_counter(), time.process_time()
    tokens, trained = work()
    workers = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = time.process_time() - used + workers.ru_utime + workers.ru_stime
    print(json.dumps({"seconds": time.perf_counter() - started, "cpu_s": cpu_s, "tokens": tokens, "trained": trained}), flush=True)


# Measuring


@dataclass(frozen=True)
class Run:
    """One start of a side; `cpu_s` is of all its processes, and does not depend on what else the machine does."""

    seconds: float
    cpu_s: float
    tokens: int
    trained: int
    imported_bytes: int
    peak_bytes: int


def run(name: str, arguments: list[str]) -> Run:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, __file__, *arguments, "--side", name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdin
        assert process.stdout
        if process.stdout.readline() != "imported\n":
            raise SystemExit(f"{name} did not start")
        imported, peaks, ended = resident(process.pid), [0], threading.Event()
        sampler = threading.Thread(target=watch, args=(process.pid, peaks, ended), daemon=True)
        sampler.start()
        process.stdin.write("go\n")
        process.stdin.flush()
        said = process.stdout.readline()
        ended.set()
        sampler.join()
    if not said:
        raise SystemExit(f"{name} failed")
    return Run(**json.loads(said), imported_bytes=imported, peak_bytes=peaks[0] - imported)


def watch(pid: int, peaks: list[int], ended: threading.Event) -> None:
    while not ended.wait(SAMPLE_S):
        peaks[0] = max(peaks[0], sum(map(resident, tree(pid))))


def resident(pid: int) -> int:
    """Bytes of a process in memory; none when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def tree(pid: int) -> Iterator[int]:
    """A process and all that it has started."""
    yield pid
    try:
        children = [child for thread in Path(f"/proc/{pid}/task").iterdir() for child in (thread / "children").read_text().split()]
    except OSError:
        return
    for child in children:
        yield from tree(int(child))


def told(name: str, num_rows: int, first: Run, second: Run) -> str:
    return (
        f"{name:6} {num_rows / first.seconds:7,.0f} rows/s ({first.seconds:.1f} s), {num_rows / first.cpu_s:,.0f} rows a CPU second, "
        f"{first.tokens:,} tokens, {first.trained:,} marked as trained, memory {first.peak_bytes / 1e6:,.0f} MB "
        f"above {first.imported_bytes / 1e6:,.0f} MB of libraries, second start {second.seconds:.2f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tokenizer", type=Path, help="folder of a model or of its tokenizer, with a chat template")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes that tokenise, on both sides")
    parser.add_argument("--only", choices=SIDES, help="measure one side")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    folder = Path(".cache/benchmarks/data").absolute()
    file = folder / f"chat-{given.rows}.jsonl"
    if given.side:
        side(given.side, file, given.tokenizer, folder, given.workers)
        return 0
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with file.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows(given.rows))
    print(f"{given.rows:,} conversations, {file.stat().st_size / 1e6:,.0f} MB, {given.workers} processes that tokenise", flush=True)
    arguments = [str(given.tokenizer), "--rows", str(given.rows), "--workers", str(given.workers)]
    found: dict[str, tuple[Run, Run]] = {}
    for name in [given.only] if given.only else SIDES:
        found[name] = run(name, arguments), run(name, arguments)
        print(told(name, given.rows, *found[name]), flush=True)
    if given.json:
        numbers = {name: [asdict(run) for run in runs] for name, runs in found.items()}
        given.json.write_text(json.dumps({"schema": "pentamesh.benchmark", "version": 1, "rows": given.rows, "sides": numbers}, indent=2) + "\n")
    return 1 if missed(found) else 0


def missed(found: dict[str, tuple[Run, Run]]) -> bool:
    """Whether ours takes more than it may, or the sides did not make the same tokens and marks."""
    if "ours" not in found:
        return False
    first, second = found["ours"]
    unlike = any(runs[0].tokens != first.tokens or runs[0].trained not in (0, first.trained) for runs in found.values())
    return unlike or first.peak_bytes > MOST_BYTES or second.seconds > MOST_SECOND_S


if __name__ == "__main__":
    raise SystemExit(main())
