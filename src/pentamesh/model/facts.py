"""Facts: what transformers builds for an architecture that no family describes - sizes, and the tensors of every block, written once.

They are read from the modules on the meta device (`pentamesh.run.trace`) and kept as JSON: of the catalogue's models in `facts/`, of others in
the user's cache. Names and shapes belong to the release of transformers that they name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
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
        tensors = tuple(
            TensorSpec(name, dims, _ACTS, kind, unit, tied.get(name), met=met)
            for part in found["parts"]
            for unit, block in _unfolded(part)
            for name, (kind, dims, met) in block
        )
        return Facts(found["transformers"], found["builds"], found["sizes"], tuple(found["windows"]), tensors, found["untrainable"])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise InputError(f"these are no facts of an architecture: {error!r}", where=where, hint="delete the file: it is made anew") from None


_Known = tuple[str, tuple[Dim, ...], tuple[int, int]]  # kind, dims, met


def _unfolded(part: dict[str, Any]) -> Iterator[tuple[str, list[tuple[str, _Known]]]]:
    """Every unit of a part, with the names of its parameters and what is known of them: a stack says for each layer which of its distinct blocks
    it is, and those are read once."""
    yield "", [(name, _known(*said)) for name, said in part.get("tensors", {}).items()]
    kinds = [{name: _known(*said) for name, said in kind.items()} for kind in part.get("kinds", ())]
    for index, kind in part.get("order", ()):
        unit = f"{part['path']}.{index}"
        yield unit, [(f"{unit}.{name}", known) for name, known in kinds[kind].items()]


def _known(kind: str, shape: list[int], met: Sequence[int] = (1, 1)) -> _Known:
    copies, of = met
    return kind, tuple(Dim(f"dim{position}", size) for position, size in enumerate(shape)), (copies, of)
