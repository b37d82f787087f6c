"""Device and Link: what computes, and what joins one device to the next. The catalogue of GPUs is `gpus.json`, found by name here."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from pentamesh.errors import InputError

__all__ = ["Device", "Link", "capped", "find_gpu", "gpu_names", "gpus", "host_bytes_per_s", "intra_link"]

# Of PCIe's rate, what a copy from or to pinned memory reaches.
HOST_SHARE = 0.8
# How the links of gpus.json are called over which devices reach each other through the host's memory alone.
THROUGH_HOST = "through host memory"


@dataclass(frozen=True)
class Device:
    """One accelerator, or one process's share of a CPU.

    memory_bytes   what the label says (a vendor's GB of device memory is 2**30 bytes)
    usable_bytes   what a program can allocate, at the low end of what was reported
    flop_per_s     dense peak by dtype, with fp32 accumulation; no entry where the device cannot compute in it
    confidence     by fact: A measured or a vendor's figure that others confirm, B one source, C an estimate
    """

    name: str
    kind: Literal["cuda", "cpu"]
    memory_bytes: int
    usable_bytes: int
    memory_bytes_per_s: float
    flop_per_s: Mapping[str, float] = field(hash=False)
    tdp_w: float | None = None
    source: str = ""
    confidence: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Link:
    """A kind of connection.

    bytes_per_s   what one port sends, and receives at the same time; a port is a device inside a node, a NIC between nodes
    measured      True when that is a bus bandwidth which collectives reached, with no efficiency left to apply; else it is nominal
    latency_s     what one step of a ring adds, however few the bytes
    """

    name: str
    bytes_per_s: float
    latency_s: float
    source: str = ""
    measured: bool = False

    @property
    def is_through_host(self) -> bool:
        """Whether no device reads another's memory."""
        return self.name.endswith(THROUGH_HOST)


@cache
def _catalogue() -> dict[str, Any]:
    return json.loads((files("pentamesh.job") / "gpus.json").read_text(encoding="utf-8"))


def gpu_names() -> tuple[str, ...]:
    """Every GPU of the catalogue, by its full name."""
    return tuple(gpu["name"] for gpu in _catalogue()["gpus"])


def gpus() -> Iterator[Device]:
    """Every GPU of the catalogue."""
    return map(_device, _catalogue()["gpus"])


def _plain(name: str) -> str:
    """A name without case, separators, and the maker's words that people leave out."""
    words = re.sub(r"[\s_\-/()]+", " ", name.lower()).split()
    return "".join(word for word in words if word not in ("nvidia", "geforce", "tesla", "amd", "instinct", "intel", "habana"))


def find_gpu(name: str) -> tuple[Device, tuple[str, ...]]:
    """The device that `name` means, and what should be said about it: the variant taken for an ambiguous name, the catalogue's remarks.

    Raises InputError for an unknown name, with the nearest ones.
    """
    asked = _plain(name)
    for gpu in _catalogue()["gpus"]:
        notes = tuple(f"{gpu['name']}: {note}" for note in gpu["notes"])
        if asked in map(_plain, (gpu["name"], *gpu["aliases"])):
            return _device(gpu), notes
        if asked in map(_plain, gpu["stands_for"]):
            return _device(gpu), (_taken_for(name, gpu["name"]), *notes)
    raise InputError(f"{name!r} is not a GPU of the catalogue", hint=_nearest(asked))


def _taken_for(name: str, chosen: str) -> str:
    others = [other for other in gpu_names() if _model(other) == _model(chosen) and other != chosen]
    return f"{name} is taken as {chosen}" + (f"; write {' or '.join(others)} for another variant" if others else "")


def _model(name: str) -> str:
    """What the variants of a GPU share: `A100` of `A100-SXM-80GB`, `RTX-PRO-6000` of its three editions."""
    found = re.match(r".*?\d[^-]*", name)
    return found[0] if found else name


def _nearest(asked: str) -> str:
    spellings = {_plain(s): gpu["name"] for gpu in _catalogue()["gpus"] for s in (gpu["name"], *gpu["aliases"], *gpu["stands_for"])}
    near = list(dict.fromkeys(spellings[s] for s in difflib.get_close_matches(asked, spellings, n=3, cutoff=0.6)))
    return f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(gpu_names())}"


def _device(gpu: Mapping[str, Any]) -> Device:
    return Device(
        name=gpu["name"],
        kind="cuda",
        memory_bytes=round(gpu["memory_gib"] * 2**30),
        usable_bytes=round(gpu["usable_gib"] * 2**30),
        memory_bytes_per_s=gpu["memory_gb_per_s"] * 1e9,
        flop_per_s={dtype: tflop * 1e12 for dtype, tflop in gpu["tflop_per_s"].items()},
        tdp_w=gpu["tdp_w"],
        source=gpu["source"],
        confidence=gpu["confidence"],
    )


def capped(device: Device, power_cap_w: float) -> Device:
    """The device under a power limit: its peaks fall with the cube root of the power, its memory rate stays.

    Source: dynamic power of CMOS is f V^2 with V about proportional to f, so clocks go with power^(1/3). The RTX PRO 6000 loses 13% of its
    rated clock from 600 to 300 W where this gives 21%, nearer to what a long GEMM sustains; an estimate, marked C.
    """
    share = (power_cap_w / device.tdp_w) ** (1 / 3) if device.tdp_w else 1.0
    peaks = {dtype: flop_per_s * share for dtype, flop_per_s in device.flop_per_s.items()}
    return replace(device, flop_per_s=peaks, tdp_w=power_cap_w, confidence={**device.confidence, "peak": "C", "float32": "C"})


def intra_link(device: Device, devices_per_node: int, p2p: bool | None = None) -> Link:
    """What joins the devices of one node: the maker's link, PCIe from device to device, or PCIe through host memory where P2P is off.

    `p2p` overrides whether the driver allows P2P over PCIe. Raises InputError where that means nothing.
    """
    gpu = next(g for g in _catalogue()["gpus"] if g["name"] == device.name)
    if gpu["link"] is not None:
        if p2p is not None:
            raise InputError(f"p2p = {str(p2p).lower()} says nothing about {device.name}: it has {gpu['link']}", hint="leave p2p out")
        return _link(gpu["link"], devices_per_node)
    direct = gpu["p2p"] if p2p is None else p2p
    return _link(f"PCIe{gpu['pcie']} {'P2P' if direct else THROUGH_HOST}", devices_per_node)


def host_bytes_per_s(device: Device) -> float:
    """What a GPU copies to pinned host memory, and what it copies back: 0.8 of PCIe x16 in one direction, an estimate.

    Where the catalogue does not say how a GPU meets its host, PCIe4 is taken; several GPUs behind one switch share it.
    """
    gpu = next(g for g in _catalogue()["gpus"] if g["name"] == device.name)
    return HOST_SHARE * _link(f"PCIe{gpu.get('pcie', 4)} P2P", 1).bytes_per_s


def _link(name: str, devices_per_node: int) -> Link:
    row = next(link for link in _catalogue()["links"] if link["name"] == name)
    gb_per_s = row["gb_per_s"]
    if per_peer := row.get("gb_per_s_per_peer"):
        # Every pair has its own wire: a node of few devices leaves the other wires of each unused.
        gb_per_s = min(gb_per_s, per_peer * max(devices_per_node - 1, 1))
    elif devices_per_node <= 4:
        gb_per_s = row.get("gb_per_s_up_to_4", gb_per_s)
    return Link(name, gb_per_s * 1e9, row["latency_us"] * 1e-6, row["source"], row.get("measured", False))
