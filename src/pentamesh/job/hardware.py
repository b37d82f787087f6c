"""Hardware: the machine a job runs on, from `8xRTX-5090`, `2x8xH100@8x400gbps`, `2xCPU`, `auto`, or a mapping of the same facts."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from pentamesh.errors import InputError, Problem
from pentamesh.job.check import faults
from pentamesh.job.device import Device, Link, capped, find_gpu, intra_link
from pentamesh.job.job import MAX_DEVICES, Machine
from pentamesh.job.machine import (
    SHARE_FOR_THE_SYSTEM,
    computes_bfloat16,
    cpu_device,
    gloo_link,
    num_processes,
    this_machines_fabric,
    this_machines_gpus,
)
from pentamesh.units import format_bytes, parse_bytes_per_s

__all__ = ["Device", "Hardware", "Link", "read_hardware", "started_hardware"]

T = TypeVar("T")

GRAMMAR = "write it like `8xRTX-5090`, `2x8xH100@8x400gbps` (nodes x GPUs x name @ NICs a node x rate of each), `2xCPU` or `auto`"
# NVIDIA's names for InfiniBand at four lanes, in bits per second.
FABRICS = {"edr": "100gbps", "hdr": "200gbps", "ndr": "400gbps", "xdr": "800gbps"}
# A ring step over 4 nodes of 8 B200: 400 us fitted over 62 steps. Source: published NCCL curves over EFA, fit of formula T = alpha + wire / B.
FABRIC_LATENCY_S = 6.5e-6
# What joins nodes where nothing on this machine says it: a rate that is seldom too high.
ASSUMED_FABRIC = "100gbps"


@dataclass(frozen=True)
class Hardware:
    """The machine: `num_nodes` nodes alike, each with `devices_per_node` devices alike.

    `intra` joins the devices of a node; `inter` is one of the node's `nics_per_node` NICs, None for a single node.
    `notes` says what was assumed.
    """

    num_nodes: int
    devices_per_node: int
    device: Device
    intra: Link
    inter: Link | None = None
    nics_per_node: int = 0
    host_ram_bytes: int | None = None
    nvme_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def inter_bytes_per_s_per_device(self) -> float:
        """What each device of a node sends between nodes while all of them do; 0 where there is no fabric."""
        return self.inter.bytes_per_s * self.nics_per_node / self.devices_per_node if self.inter else 0.0

    @property
    def host_usable_bytes_per_device(self) -> int | None:
        """Each device's share of what a node's host memory has for programs; None where nobody said how much that is."""
        return int(self.host_ram_bytes * (1 - SHARE_FOR_THE_SYSTEM)) // self.devices_per_node if self.host_ram_bytes else None

    def __str__(self) -> str:
        nodes = f"{self.num_nodes} nodes of " if self.num_nodes > 1 else ""
        fabric = f", {self.nics_per_node} x {self.inter.name} a node" if self.inter else ""
        return f"{nodes}{self.devices_per_node} x {self.device.name} ({format_bytes(self.device.usable_bytes)} usable, {self.intra.name}{fabric})"

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values, with what follows from them."""
        derived = {"num_devices": self.num_devices, "inter_bytes_per_s_per_device": self.inter_bytes_per_s_per_device}
        return {"description": str(self), **asdict(self), **derived}


def read_hardware(written: str | Mapping[str, Any] | Machine, where: str = "hardware") -> Hardware:
    """The hardware that a line or a mapping describes. Raises InputError with every problem found."""
    if isinstance(written, str) and written.strip().lower() == "auto":
        return _this_machine()
    found = _parts(written, where) if isinstance(written, str) else _facts(written, where)
    if found.nodes * found.gpus > MAX_DEVICES:
        raise InputError(f"{found.nodes} x {found.gpus} are more than {MAX_DEVICES:,} devices", where=where, hint=GRAMMAR)
    problems: list[Problem] = []

    def attempt(read: Callable[[Machine], T]) -> T | None:
        try:
            return read(found)
        except InputError as error:
            problems.extend(replace(problem, where=problem.where or where) for problem in error.problems)
        except ValueError as error:
            problems.append(Problem(str(error), where))
        return None

    node, fabric = attempt(_node), attempt(_fabric)
    if node is None or fabric is None:
        raise InputError(*problems)
    (device, intra, said), (inter, nics, also_said) = node, fabric
    notes = (*said, *also_said)
    if found.nvme:
        notes = (*notes, "nvme is recorded; no plan offloads to it yet")
    return Hardware(found.nodes, found.gpus, device, intra, inter, nics, found.host_ram, found.nvme, notes)


def started_hardware(nodes: int, processes_per_node: int) -> Hardware:
    """What processes that somebody started find themselves on: this kind of machine, as often as there are nodes. The first one says what joins
    them if it is assumed. Raises InputError."""
    found = read_hardware("auto")
    if found.device.kind == "cpu":
        node = read_hardware(f"{processes_per_node}xCPU")
    else:  # as the driver reports it
        node = replace(found, devices_per_node=processes_per_node, intra=intra_link(found.device, processes_per_node))
    if nodes == 1:
        return node
    fabric = this_machines_fabric()
    if fabric is None and os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"nothing here says what joins the {nodes} nodes: {ASSUMED_FABRIC} assumed; `hardware` can say it\n")
    inter, nics, notes = _fabric(Machine(nodes=nodes, gpus=processes_per_node, gpu=found.device.name, fabric=fabric or ASSUMED_FABRIC))
    return replace(node, num_nodes=nodes, inter=inter, nics_per_node=nics, notes=(*node.notes, *notes))


def _this_machine() -> Hardware:
    """What `auto` means: the GPUs that nvidia-smi lists, else the CPU and as many processes as `num_processes` says."""
    devices, notes = this_machines_gpus()
    if not devices:
        return read_hardware(f"{num_processes()}xCPU")
    if len(names := sorted({device.name for device in devices})) > 1:
        raise InputError(
            f"this machine has different GPUs: {', '.join(names)}", where="hardware", hint="leave one kind visible with CUDA_VISIBLE_DEVICES"
        )
    least = min(devices, key=lambda device: device.usable_bytes)
    return Hardware(1, len(devices), least, intra_link(least, len(devices)), notes=notes)


def _parts(text: str, where: str) -> Machine:
    """The parts of one line."""
    name, at, fabric = text.strip().partition("@")
    match = re.fullmatch(r"(?:(\d+)\s*x\s*)?(?:(\d+)\s*x\s*)?(\S.*?)\s*", name, re.IGNORECASE)
    if not match or (at and not fabric.strip()) or re.fullmatch(r"\d{1,3}|\d+\s*x", match[3], re.IGNORECASE):
        raise InputError(Problem(f"{text!r} does not say which hardware", where, GRAMMAR))
    counts = [int(count[:10]) for count in match.groups()[:2] if count]  # ten digits are too many devices, and thousands no number to Python
    if 0 in counts:
        raise InputError(Problem(f"{text!r} asks for 0 devices", where, GRAMMAR))
    nodes, gpus = [1, 1, *counts][-2:]
    return Machine(nodes=nodes, gpus=gpus, gpu=match[3], fabric=fabric.strip() or None)


def _facts(written: Mapping[str, Any] | Machine, where: str) -> Machine:
    if isinstance(written, Machine):
        return written
    if found := list(faults(Machine, written, lambda path: ".".join((where, *path[1:])), ("hardware",))):
        raise InputError(*(problem for _, problem in found))
    return Machine.model_validate(dict(written))


def _node(found: Machine) -> tuple[Device, Link, tuple[str, ...]]:
    """The device of a node, the link between them, and what was assumed about them."""
    if found.gpu.strip().lower() == "cpu":
        if found.power_cap_w is not None or found.p2p is not None:
            raise InputError("power_cap_w and p2p say nothing about a CPU", hint="leave them out")
        notes = (f"{found.gpus} processes share this machine's CPU and its memory",)
        slow = "this CPU has no instructions for bf16, and computes in it at an eighth of the speed of fp32: precision = fp32 is faster"
        return cpu_device(found.gpus, found.host_ram), gloo_link(), notes if computes_bfloat16() else (*notes, slow)
    device, notes = find_gpu(found.gpu)
    if found.power_cap_w is not None:
        if found.power_cap_w > (device.tdp_w or 0):
            raise InputError(f"power_cap_w = {found.power_cap_w:g} is above the {device.tdp_w:g} W of {device.name}", hint="leave it out")
        device = capped(device, found.power_cap_w)
        notes = (*notes, f"peaks at {found.power_cap_w:g} W are estimated by the cube root of the power")
    link = intra_link(device, found.gpus, found.p2p)
    if link.is_through_host and found.gpus > 1:
        notes = (*notes, f"no P2P over PCIe on {device.name} with the stock driver: {link.bytes_per_s / 1e9:g} GB/s {link.name}")
    return device, link, notes


def _fabric(found: Machine) -> tuple[Link | None, int, tuple[str, ...]]:
    """One NIC of the fabric, how many a node has, and what was assumed."""
    if found.fabric is None:
        if found.nodes > 1:
            raise InputError(
                f"{found.nodes} nodes, and nothing says what joins them",
                hint="add the NICs a node has and the rate of each: `@200gbps` (one) or `@8x400gbps`; it changes the answer eightfold",
            )
        if found.nics is not None:
            raise InputError(f"nics = {found.nics} without a fabric", hint="add `fabric: 400gbps`, the rate of each")
        return None, 0, ()
    counted = re.match(r"\s*(\d+)\s*x", found.fabric, re.IGNORECASE)
    rate = found.fabric[counted.end() :].strip() if counted else found.fabric.strip()
    nics = int(counted[1]) if counted else found.nics or 1
    if found.nics is not None and nics != found.nics:
        raise InputError(f"fabric: {found.fabric} has {nics} NICs a node and nics says {found.nics}", hint="say it once")
    bytes_per_s = parse_bytes_per_s(FABRICS.get(rate.lower(), rate))
    if not nics or not bytes_per_s:
        raise InputError(f"fabric: {found.fabric} carries nothing", hint=GRAMMAR)
    source = "the rate as given; latency of a ring step from published NCCL curves over 4 nodes"
    notes = () if counted or found.nics else (f"one NIC a node is assumed; write @{found.gpus}x{rate} for one a device",)
    if found.nodes == 1:
        notes = ("one node: the fabric carries nothing",)
    return Link(f"{bytes_per_s * 8 / 1e9:g} Gb/s", bytes_per_s, FABRIC_LATENCY_S, source), nics, notes
