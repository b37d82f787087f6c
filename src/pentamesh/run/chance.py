"""Chance: the random state of a rank, which a run that goes on takes up where the ranks are what they were, and seeds anew where they are not."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from pentamesh.errors import InputError
from pentamesh.layout.mesh import DATA_AXES, Mesh
from pentamesh.run.world import World

__all__ = ["random_state", "saved_by", "seed_anew", "set_random_state"]

# The axes along which ranks differ in what they compute: of the data axes it is all one how many copies and shards they make.
_PLACES = (("pp",), DATA_AXES, ("cp",), ("tp",), ("ep",))


def random_state(world: World) -> dict[str, torch.Tensor]:
    """This rank's random state, by the names under which a checkpoint keeps it."""
    found = {f"rng.{world.rank}": torch.get_rng_state()}
    if world.device.type == "cuda":
        found[f"rng_cuda.{world.rank}"] = torch.cuda.get_rng_state(world.device)
    return found


def set_random_state(found: dict[str, torch.Tensor], world: World) -> None:
    """Go on from what `random_state` gave."""
    torch.set_rng_state(found[f"rng.{world.rank}"])
    if world.device.type == "cuda":
        torch.cuda.set_rng_state(found[f"rng_cuda.{world.rank}"], world.device)


def seed_anew(seed: int, step: int, rank: int) -> None:
    """Begin a stream of random numbers, on all devices, that is of this seed, step and rank and of nothing else."""
    drawn = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(drawn[:8], "little") >> 1)  # torch takes a signed number


def saved_by(layout: Any, mesh: Mesh) -> str | None:
    """The mesh that a checkpoint's manifest gives as its `layout`, in words, where its ranks are not those of `mesh`; else None."""
    try:
        wrote = Mesh.of(layout)
    except (InputError, KeyError, TypeError):
        return "a layout that its manifest does not give"
    alike = all(wrote.degree(*axes) == mesh.degree(*axes) for axes in _PLACES)
    return None if alike else str(wrote)
