"""Facts: what transformers builds for an architecture that no family describes - sizes, and the tensors of every block, written once.

They are read from the modules on the meta device (`pentamesh.run.trace`) and kept as JSON: of the catalogue's models in `facts/`, of others in
the user's cache. Names and shapes belong to the release of transformers that they name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pentamesh.errors import InputError
from pentamesh.model.dims import Acts, Dim, TensorSpec
from pentamesh.model.roles import Role

__all__ = ["SCHEMA", "VERSION", "Facts", "fingerprint", "read_facts"]

SCHEMA, VERSION = "pentamesh.facts", 1
# Whatever a parameter does, it meets tokens of a batch: its gradient is a partial sum over the data axes.
_ACTS = Acts(Role.USE, ("batch", "seq"))
# What a config.json says beside the shapes of its tensors; all other keys count.
_INERT = {"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id"}


@dataclass(frozen=True)
class Facts:
    """An architecture as transformers builds it.

    windows      per layer how many tokens one token attends to: None for all before it, 0 where there is no softmax attention
    tensors      every parameter in the order of its modules; dims are `dim0`, `dim1`, since nobody has named them
    untrainable  what keeps the trainer from it; empty where nothing does
    """

    transformers: str
    builds: str
    sizes: dict[str, int]
    windows: tuple[int | None, ...]
    tensors: tuple[TensorSpec, ...]
    untrainable: str


def fingerprint(config: Mapping[str, Any]) -> str:
    """Sixteen hex digits of what shapes the tensors of a config.json: token ids, dtypes and the like do not count."""
    return hashlib.sha256(json.dumps(_shaping(config), sort_keys=True).encode()).hexdigest()[:16]


def _shaping(value: Any) -> Any:
    return {key: _shaping(inner) for key, inner in value.items() if key not in _INERT} if isinstance(value, Mapping) else value


def read_facts(text: str, where: str) -> Facts:
    """The facts in the JSON that `pentamesh.run.trace` wrote. Raises InputError for a file that holds none."""
    try:
        found = json.loads(text)
        if (found["schema"], found["version"]) != (SCHEMA, VERSION):
            raise InputError(f"this is {found['schema']} version {found['version']}, not {SCHEMA} version {VERSION}", where=where, hint="delete it")
        tied = found["tied"]
        tensors = tuple(_tensor(*described, tied) for part in found["parts"] for described in _unfolded(part))
        return Facts(found["transformers"], found["builds"], found["sizes"], tuple(found["windows"]), tensors, found["untrainable"])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise InputError(f"these are no facts of an architecture: {error!r}", where=where, hint="delete the file: it is made anew") from None


def _unfolded(part: dict[str, Any]) -> Iterator[tuple[str, str, list[Any]]]:
    """(name, unit, what is known) of every parameter of a part: a stack says for each layer which of its distinct blocks it is."""
    for name, known in part.get("tensors", {}).items():
        yield name, "", known
    for index, kind in part.get("order", ()):
        unit = f"{part['path']}.{index}"
        for name, known in part["kinds"][kind].items():
            yield f"{unit}.{name}", unit, known


def _tensor(name: str, unit: str, known: list[Any], tied: dict[str, str]) -> TensorSpec:
    kind, shape, *met = known
    dims = tuple(Dim(f"dim{position}", size) for position, size in enumerate(shape))
    return TensorSpec(name, dims, _ACTS, kind, unit, tied.get(name), met=tuple(met[0]) if met else (1, 1))
