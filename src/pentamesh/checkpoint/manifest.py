"""Manifest: what a checkpoint says of itself, and whether its folder still is what was written.

    <run>/checkpoints/step-00000050/
        manifest.json                                  written last: a folder without it was never finished
        shard-00001-model-00001-of-00002.safetensors   what rank 0 wrote, in files of about a gigabyte
        ...

`manifest.json` holds schema, version and step; the facts that the run gave (counters, data, precision, layout, plan, world_size); dtype and whole
shape of every tensor; size and SHA-256 of every file; and the SHA-256 of itself.

Tensors are named after Hugging Face's parameters: `model.<name>`, `optimizer.<name>.exp_avg`, `.exp_avg_sq`, `.step`; what each rank has
for itself ends in its number: `rng.<rank>`, `rng_cuda.<rank>`. Nothing in the folder is a pickle; a file that the manifest does not name
is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentamesh.checkpoint.disk import forget
from pentamesh.errors import InputError, Problem, RunFailed

__all__ = [
    "MANIFEST",
    "PER_RANK",
    "SCHEMA",
    "VERSION",
    "File",
    "Manifest",
    "TensorFacts",
    "check_back",
    "encloses",
    "file_facts",
    "is_of_step",
    "misnamed",
    "name_of",
    "verify",
]

SCHEMA, VERSION, MANIFEST = "pentamesh.checkpoint", 1, "manifest.json"
# Tensors that each rank has for itself: another number of ranks leaves some unread.
PER_RANK = re.compile(r"^rng(_[a-z]+)?\.\d+$")
_BLOCK_BYTES = 2**24
_MOST = 2**63 - 1
_MAX_NAME_BYTES = 255  # of Linux and macOS (NAME_MAX)
_OF_STEP = re.compile(r"step-(\d{8,})(?:\.|$)")
_OWN_KEYS = ("schema", "version", "step", "num_tensors", "tensors", "files", "sha256")
# Names under which torch and others keep pickles; `.metadata` is what torch's default checkpoint reader unpickles.
_PICKLES = re.compile(r"^\.metadata$|^__\d+_\d+\.distcp$|\.(pt|pth|bin|pkl|pickle|ckpt|distcp)$")


@dataclass(frozen=True)
class TensorFacts:
    """dtype in the words of safetensors, and whole shape."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class File:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The contents of manifest.json."""

    step: int
    facts: dict[str, Any]
    tensors: dict[str, TensorFacts]
    files: dict[str, File]

    def __post_init__(self) -> None:
        if clash := sorted(self.facts.keys() & set(_OWN_KEYS)):
            raise ValueError(f"{', '.join(clash)} of the facts are the manifest's own keys")

    def text(self) -> str:
        """The file's text. Raises ValueError for facts that JSON does not have, NaN among them."""
        body: dict[str, Any] = {"schema": SCHEMA, "version": VERSION, "step": self.step, **self.facts}
        body |= {"num_tensors": len(self.tensors), "tensors": {n: vars(t) for n, t in sorted(self.tensors.items())}}
        body["files"] = {n: vars(f) for n, f in sorted(self.files.items())}
        body = json.loads(json.dumps(body, allow_nan=False))  # as a reader will see it: text for keys, lists for tuples
        return json.dumps(body | {"sha256": _digest(body)}, indent=1) + "\n"

    @classmethod
    def read(cls, checkpoint: Path) -> Manifest:
        """The manifest of a checkpoint folder. Raises InputError where there is none, or it was altered, or is of another version."""
        path = checkpoint / MANIFEST
        try:
            found = json.loads(path.read_text())
            json.dumps(found, ensure_ascii=False, allow_nan=False).encode()  # neither NaN nor halves of characters, of which we write none
            if found["schema"] != SCHEMA or found["version"] != VERSION:
                raise InputError(f"{path.name} is {found['schema']} version {found['version']}, not {SCHEMA} version {VERSION}", where=str(path))
            if found.pop("sha256") != _digest(found):
                raise InputError(f"{path.name} is not as it was written: its own SHA-256 differs", where=str(path))
            return cls._from(found)
        except OSError as error:
            raise InputError(f"{path.name} cannot be read ({error.strerror}): this is no finished checkpoint", where=str(checkpoint)) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{path.name} is not a checkpoint's manifest: {error}", where=str(path)) from error

    @classmethod
    def _from(cls, found: dict[str, Any]) -> Manifest:
        """Raises ValueError, KeyError, TypeError or AttributeError for what no checkpoint says."""
        return cls(
            step=_whole(found["step"], "its step"),
            facts={key: value for key, value in found.items() if key not in _OWN_KEYS},
            tensors={name: _tensor(name, t["dtype"], t["shape"]) for name, t in found["tensors"].items()},
            files={name: File(_whole(f["bytes"], f"the size of {name}"), str(f["sha256"])) for name, f in found["files"].items()},
        )

    @property
    def num_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


def _tensor(name: str, dtype: Any, shape: Any) -> TensorFacts:
    if not isinstance(dtype, str) or not isinstance(shape, list):
        raise TypeError(f"dtype and shape of {name} are {dtype!r} and {shape!r}, not a text and a list")
    if math.prod(sizes := [_whole(size, f"a size of {name}") for size in shape]) > _MOST:
        raise ValueError(f"{name} is {shape}, more than any disk holds")
    return TensorFacts(dtype, tuple(sizes))


def _whole(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError(f"{what} is {value!r}, not a whole number from 0 to 2^63")
    return value


def verify(checkpoint: Path, share: tuple[int, int] = (0, 1), *, hashed: Callable[[int], object] = lambda _: None) -> list[Problem]:
    """Everything in which a checkpoint's folder is not what its manifest says; none when it is whole.

    Of the checksums only every n-th is computed, for a `share` (i, n); names, links and sizes are looked at for all files. `hashed` hears the
    bytes of each file whose checksum was computed.
    """
    if checkpoint.is_symlink() or not checkpoint.is_dir():
        return [Problem(f"{checkpoint.name} is not a checkpoint folder", str(checkpoint))]
    try:
        manifest = Manifest.read(checkpoint)
    except InputError as error:
        return [*_foreign(checkpoint, None), *error.problems]
    problems = [*misnamed(checkpoint, manifest.step), *_foreign(checkpoint, manifest), *_resized(checkpoint, manifest)]
    return problems or list(_altered(checkpoint, manifest, share, hashed))


def name_of(step: int) -> str:
    """The folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def is_of_step(name: str) -> bool:
    """Whether a folder of this name passes for a checkpoint, or for what a run is writing or removing."""
    return _OF_STEP.match(name) is not None


def misnamed(checkpoint: Path, step: int) -> Iterator[Problem]:
    """A folder that bears the name of another step: by their names steps are told apart, kept and removed."""
    named = _OF_STEP.match(checkpoint.name)
    if named and int(named[1]) != step:
        yield Problem(f"{checkpoint.name} is not the name of step {step}", str(checkpoint), f"name it {name_of(step)}, if it is the right one")


def encloses(checkpoint: Path, target: Path) -> Iterator[Problem]:
    """A folder to be written that would lie in this checkpoint, or in another: it would not be whole any more."""
    for parent in target.resolve().parents:
        if parent == checkpoint.resolve() or (_OF_STEP.match(parent.name) and (parent / MANIFEST).is_file()):
            what = f"{target.name} would lie in the checkpoint {parent.name}, which holds what was saved and nothing else"
            yield Problem(what, str(target), "name a folder that does not exist yet")


def _foreign(checkpoint: Path, manifest: Manifest | None) -> Iterator[Problem]:
    """Entries of the folder that do not belong: pickles and links always, others where the manifest is known."""
    for path in sorted(checkpoint.iterdir()):
        if _PICKLES.search(path.name):
            hint = "a pickle can run code while it is read; Pentamesh writes none and opens none. Remove it if you know where it came from"
            yield Problem(f"{path.name} is a pickle and not part of the checkpoint", str(path), hint)
        elif path.is_symlink() or not path.is_file():
            yield Problem(f"{path.name} is a link or a folder, not a file of the checkpoint", str(path))
        elif manifest is not None and path.name != MANIFEST and path.name not in manifest.files:
            yield Problem(f"{path.name} is not in {MANIFEST}", str(path))


def _resized(checkpoint: Path, manifest: Manifest) -> Iterator[Problem]:
    for name, file in manifest.files.items():
        path = checkpoint / name
        if not name.isprintable() or len(name.encode()) > _MAX_NAME_BYTES or not name or Path(name).name != name:
            yield Problem(f"{name if name.isprintable() else repr(name)} in {MANIFEST} is not the plain name of a file", str(checkpoint))
        elif not path.is_file():
            yield Problem(f"{name} is missing ({file.bytes:,} bytes)", str(checkpoint))
        elif (found := path.stat().st_size) != file.bytes:
            yield Problem(f"{name} has {found:,} bytes, {file.bytes:,} were written", str(path))


def _altered(checkpoint: Path, manifest: Manifest, share: tuple[int, int], hashed: Callable[[int], object]) -> Iterator[Problem]:
    mine, num_shares = share
    for name in sorted(manifest.files)[mine::num_shares]:
        try:
            found = file_facts(checkpoint / name).sha256
        except OSError as error:
            yield Problem(f"{name} cannot be read: {error.strerror}", str(checkpoint / name))
            continue
        hashed(manifest.files[name].bytes)
        if found != manifest.files[name].sha256:
            yield Problem(f"{name} is not as it was written: its SHA-256 differs", str(checkpoint / name))


def file_facts(path: Path) -> File:
    """Size and SHA-256 of a file, read from it: from the disk, where this system can be made to forget what it has in memory."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        forget(file)
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
        forget(file)
    return File(size, digest.hexdigest())


def check_back(path: Path, written: File) -> None:
    """Read back what was written. Raises RunFailed where the disk gives something else."""
    if (found := file_facts(path)) != written:
        was, came = (f"{file.bytes:,} bytes, SHA-256 {file.sha256[:12]}" for file in (written, found))
        what = f"{path.name} is not what was written: {was}, came back as {came}"
        raise RunFailed(what, where=str(path.parent), hint="the disk or the memory of this machine is damaged")


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
