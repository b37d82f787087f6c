"""`python -m benchmarks.checkpoint_memory`: host memory while weights and checkpoints are loaded and exported, beside the largest shard of them.

A shard is what one rank holds, or one file: the larger of the two. What is compared is anonymous memory: pages that this process filled itself, which
stay in memory until they are given back. Files that are read through a mapping count for RSS too, but their pages are copies of what is on disk, and
the kernel takes them back as soon as anybody needs room; RSS stands beside it. Both are sampled every two milliseconds, above what there was before
anything was built, and the largest over all ranks is told.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pentamesh.checkpoint.export import export
from pentamesh.checkpoint.held import Held, held
from pentamesh.checkpoint.load import load
from pentamesh.checkpoint.save import save
from pentamesh.checkpoint.weights import Weights
from pentamesh.job.job import Optimizer
from pentamesh.job.precision import PRECISIONS
from pentamesh.layout.mesh import Layout, Mesh
from pentamesh.layout.policy import Policy
from pentamesh.layout.split import split
from pentamesh.model.families import describe
from pentamesh.model.roles import Role
from pentamesh.model.spec import ModelSpec
from pentamesh.run.initial import drawing
from pentamesh.run.optim import adamw
from pentamesh.run.place import Filler, local, parameters_of, place
from pentamesh.run.state import tensors
from pentamesh.run.step import Trainee
from pentamesh.run.world import World, join
from pentamesh.run.worlds import run_world

MOST_RATIO, SAMPLE_S, FILE_BYTES = 1.3, 0.002, 270_000_000
FULL_2, FULL_4, TENSOR_2 = Layout(Mesh(dp_shard=2), "parameters"), Layout(Mesh(dp_shard=4), "parameters"), Layout(Mesh(tp=2))
SIZES = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4}
# A fifth of all weights is the head, as in small models that do not tie it. It is read last, when the rank holds everything else.
LARGE = SIZES | {"vocab_size": 128_256, "num_hidden_layers": 24, "tie_word_embeddings": False}
SMALL = SIZES | {"vocab_size": 32_000, "num_hidden_layers": 6, "tie_word_embeddings": True}


@dataclass
class Growth:
    """The most that a block took above what there was before it; `held_bytes` is for the block to say: what it leaves on this rank."""

    anonymous_bytes: int = 0
    rss_bytes: int = 0
    held_bytes: int = 0


@contextmanager
def growth() -> Iterator[Growth]:
    """Watch this process's memory while the block runs."""
    found, ended = Growth(), threading.Event()
    thread = threading.Thread(target=_watch, args=(found, memory(), ended), daemon=True)
    thread.start()
    yield found
    ended.set()
    thread.join()


def memory() -> tuple[int, int]:
    """Anonymous and resident bytes of this process. Source: proc(5), statm: resident pages, and those of them that are of files."""
    resident, of_files = (int(pages) * os.sysconf("SC_PAGE_SIZE") for pages in Path("/proc/self/statm").read_text().split()[1:3])
    return resident - of_files, resident


def _watch(found: Growth, before: tuple[int, int], ended: threading.Event) -> None:
    last = False
    while not last:
        last = ended.wait(SAMPLE_S)
        anonymous, resident = memory()
        found.anonymous_bytes = max(found.anonymous_bytes, anonymous - before[0])
        found.rss_bytes = max(found.rss_bytes, resident - before[1])


def spec(config: dict[str, Any]) -> ModelSpec:
    model = describe(config | {"max_position_embeddings": 4096}, "made up")
    assert model is not None
    return model


def trainee_of(model: ModelSpec, layout: Layout, world: World, fill: Filler) -> Trainee:
    module = place(model, layout, Policy(), PRECISIONS["fp32"], world, fill)
    parameters = parameters_of(module)
    return Trainee(module, parameters, adamw(parameters, model, Optimizer(), PRECISIONS["fp32"], world, 0), model, Policy(), world)


def weights_saved(folder: Path, config: dict[str, Any], layout: Layout) -> Path:
    """A checkpoint of drawn weights alone: enough for a folder to be exported from it."""
    model, world = spec(config), join(layout, "cpu")
    parameters = parameters_of(place(model, layout, Policy(), PRECISIONS["fp32"], world, drawing(0)))
    splits = {tensor.name: split(tensor, Role.STATE, layout) for tensor in model.parameters}
    parts = [held(f"model.{name}", local(parameters[name].detach()), cut, world.rank) for name, cut in splits.items()]
    return save(folder, 1, {name: tensor for part in parts for name, tensor in part.items()}, {"made": "up"})


def saved(folder: Path, config: dict[str, Any], layout: Layout) -> Path:
    """A checkpoint of drawn weights and of moments that are zero."""
    world = join(layout, "cpu")
    return save(folder, 1, tensors(trainee_of(spec(config), layout, world, drawing(0))), {"made": "up"})


def folder_loaded(folder: Path, config: dict[str, Any], layout: Layout) -> Growth:
    """The weights of a Hugging Face folder into float32 parameters, as a run loads them."""
    model, world = spec(config), join(layout, "cpu")
    with growth() as found:
        weights = Weights.open(folder)
        weights.check(model)
        module = place(model, layout, Policy(), PRECISIONS["fp32"], world, weights.read_into)
        found.held_bytes = sum(local(parameter).nbytes for parameter in parameters_of(module).values())
    return found


def checkpoint_loaded(checkpoint: Path, config: dict[str, Any], layout: Layout) -> Growth:
    """A checkpoint into weights and optimizer state of a layout that did not write it."""
    model, world = spec(config), join(layout, "cpu")
    with growth() as found:
        made = trainee_of(model, layout, world, lambda _, cut, rank, part: None)
        state = {name: tensor for name, tensor in tensors(made).items() if not name.startswith("rng")}
        load(checkpoint, state)
        found.held_bytes = sum(_held_bytes(t) for t in state.values())
    return found


def _held_bytes(tensor: torch.Tensor) -> int:
    return sum(tensor.part(box).nbytes for box in tensor.boxes) if isinstance(tensor, Held) else tensor.nbytes


def exported(checkpoint: Path, config: dict[str, Any], target: Path) -> Growth:
    """A checkpoint to a Hugging Face folder of several files, by one process that holds nothing else."""
    with growth() as found:
        export(checkpoint, spec(config), None, target, max_shard_bytes=FILE_BYTES)
    return found


def row(what: str, grown: list[Growth], folders: list[Path]) -> dict[str, Any]:
    """One line: the largest of all ranks, and the shard that it is compared with."""
    largest_file = max(path.stat().st_size for folder in folders for path in folder.glob("*.safetensors"))
    on_rank, anonymous, rss = (max(getattr(one, name) for one in grown) for name in ("held_bytes", "anonymous_bytes", "rss_bytes"))
    shard = max(on_rank, largest_file)
    return {
        "what": what,
        "ranks": len(grown),
        "held_bytes": on_rank,
        "largest_file_bytes": largest_file,
        "anonymous_bytes": anonymous,
        "rss_bytes": rss,
        "ratio": anonymous / shard,
        "rss_ratio": rss / shard,
    }


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Every case, one after the other; what a case does not need any more stays until the end."""

    drawn_folder = folder / "drawn"
    large = run_world(weights_saved, 2, folder / "large", LARGE, FULL_2, timeout_s=600)[0]
    export(large, spec(LARGE), None, drawn_folder, "bfloat16", max_shard_bytes=FILE_BYTES)
    loads = run_world(folder_loaded, 2, drawn_folder, LARGE, FULL_2, timeout_s=600)
    yield row("a folder of bfloat16 files as float32, full shard over 2", loads, [drawn_folder])

    checkpoint = run_world(saved, 4, folder / "small", SMALL, FULL_4, timeout_s=600)[0]
    for name, layout in (("tensor parallel over 2", TENSOR_2), ("full shard over 2", FULL_2), ("one process", Layout())):
        loads = run_world(checkpoint_loaded, layout.mesh.num_ranks, checkpoint, SMALL, layout, timeout_s=600)
        yield row(f"a checkpoint of full shard over 4, {name}", loads, [checkpoint])
    target = folder / "exported"
    yield row("its export", run_world(exported, 1, checkpoint, SMALL, target, timeout_s=600), [checkpoint, target])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where about 6 GB are written and removed again (the system's folder for such things)")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    given = parser.parse_args()
    found = []
    print(f"{'':58}  held a rank  largest file  anonymous  of the shard        RSS")
    with tempfile.TemporaryDirectory(prefix="pentamesh-memory-", dir=given.folder) as folder:
        for each in rows(Path(folder)):
            found.append(each)
            on_rank, file, anonymous, rss = (each[f"{name}_bytes"] / 1e6 for name in ("held", "largest_file", "anonymous", "rss"))
            print(f"{each['what']:58} {on_rank:9,.0f} MB {file:10,.0f} MB {anonymous:7,.0f} MB {each['ratio']:12.2f}x {rss:7,.0f} MB", flush=True)
    print(f"at most {max(each['ratio'] for each in found):.2f}x the largest shard; {MOST_RATIO:g}x is allowed")
    if given.json:
        given.json.write_text(json.dumps({"schema": "pentamesh.benchmark_checkpoint_memory", "version": 1, "rows": found}, indent=2) + "\n")
    return int(any(each["ratio"] > MOST_RATIO for each in found))


if __name__ == "__main__":
    raise SystemExit(main())
