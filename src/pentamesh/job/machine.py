"""This machine as hardware: its GPUs as `nvidia-smi` lists them, or its CPU shared by a few processes."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path

from pentamesh.errors import InputError
from pentamesh.job.device import Device, Link, find_gpu

__all__ = ["computes_bfloat16", "cpu_device", "gloo_link", "num_processes", "this_machines_fabric", "this_machines_gpus"]

# One x86-64 core, torch's GEMM. With AVX-512: 93-98 GFLOP/s in fp32, and where it has instructions for bf16 205-226; with AVX2: 60 in fp32. Without
# such instructions bf16 is widened and narrowed in software, at an eighth of the speed of fp32. A copy of 512 MiB: 40 GB/s.
CORE_FLOP_PER_S = {"avx512f": 95e9, "avx2": 60e9}
CORE_BFLOAT16_FLOP_PER_S, WITHOUT_BFLOAT16 = 215e9, 1 / 8
CORE_MEMORY_BYTES_PER_S = 40e9
CPU_SOURCE = "measured: GEMM on one x86-64 core with AVX-512 (95 GFLOP/s fp32, 215 bf16) and with AVX2 (60 and 7) - an order of magnitude for others"
CPUINFO = Path("/proc/cpuinfo")
SYSTEM = Path("/sys/class")
# What the system and other programs keep of the host memory.
SHARE_FOR_THE_SYSTEM = 0.1


def num_processes() -> int:
    """Processes that `auto` starts on a CPU: two where there are two cores, the fewest over which anything is cut. More of them would only
    share the same cores, since each process's operations already use several."""
    return min(2, num_cores())


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_memory_bytes() -> int:
    """Memory of this machine, or of the container when that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total


def cpu_device(processes: int, host_ram_bytes: int | None = None) -> Device:
    """What one of `processes` has when they share the memory and the cores of this machine's CPU evenly."""
    memory = (host_ram_bytes or host_memory_bytes()) // processes
    cores = num_cores() / processes
    return Device(
        name="CPU",
        kind="cpu",
        memory_bytes=memory,
        usable_bytes=int(memory * (1 - SHARE_FOR_THE_SYSTEM)),
        memory_bytes_per_s=CORE_MEMORY_BYTES_PER_S * cores,
        flop_per_s={dtype: flop_per_s * cores for dtype, flop_per_s in _core_flop_per_s().items()},
        source=CPU_SOURCE,
        confidence={"peak": "C", "usable": "B"},
    )


def computes_bfloat16() -> bool:
    """Whether this machine's CPU has instructions for bfloat16; taken for granted where the system does not list them."""
    return not (found := _instructions()) or bool(found & {"avx512_bf16", "amx_bf16"})


def _core_flop_per_s() -> dict[str, float]:
    found = _instructions()
    wide = next((speed for name, speed in CORE_FLOP_PER_S.items() if name in found), CORE_FLOP_PER_S["avx2" if found else "avx512f"])
    return {"float32": wide, "bfloat16": CORE_BFLOAT16_FLOP_PER_S if computes_bfloat16() else wide * WITHOUT_BFLOAT16}


@cache
def _instructions() -> frozenset[str]:
    """The instruction sets of this machine's CPU; none where the system does not list them. Source: Linux on x86-64, /proc/cpuinfo."""
    lines = _said(CPUINFO).splitlines()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


def gloo_link() -> Link:
    """The loopback between processes of one machine."""
    # All-reduce of 64 MiB over 2 processes: 1.7 GB/s on the wire; of 4 bytes: 150 us, two steps of a ring.
    return Link("gloo loopback", 1.7e9, 75e-6, "measured: all-reduce over 2 processes on one x86-64 machine - an order of magnitude", measured=True)


def this_machines_gpus() -> tuple[list[Device], tuple[str, ...]]:
    """The visible GPUs of this machine and what to say about them; none where there is no `nvidia-smi`.

    Raises InputError where the driver does not answer, or a GPU is not in the catalogue.
    """
    if shutil.which("nvidia-smi") is None:
        return [], ()
    listed = _run(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"])
    rows = _visible([line.rsplit(",", 1) for line in listed.splitlines() if line.strip()])
    found = [(find_gpu(name.strip()), memory.strip()) for name, memory in rows]
    devices = [_reported(device, memory) for (device, _), memory in found]
    return devices, tuple(dict.fromkeys(note for (_, notes), _ in found for note in notes))


def this_machines_fabric() -> str | None:
    """What joins this machine to others, as `hardware` writes it (`8x400gbps`): its active InfiniBand ports, else its fastest wire; None where the
    system says nothing.

    Source: Linux, /sys/class/infiniband/*/ports/*/{rate,state} in Gb/s and /sys/class/net/*/speed in Mb/s.
    """
    ports = [_said(port / "rate") for port in SYSTEM.glob("infiniband/*/ports/*") if "ACTIVE" in _said(port / "state")]
    rates = [int(rate) for port in ports if (rate := port.split(" ")[0]).isdigit()]
    if rates:
        return f"{rates.count(max(rates))}x{max(rates)}gbps"
    wires = [_said(wire / "speed") for wire in SYSTEM.glob("net/*") if (wire / "device").exists() and _said(wire / "operstate") == "up"]
    speeds = [int(speed) for speed in wires if speed.isdigit() and int(speed) >= 1000]
    return f"{speeds.count(max(speeds))}x{max(speeds) // 1000}gbps" if speeds else None


def _said(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a wire that is down has no speed
        return ""


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stdout", "") or getattr(error, "stderr", "") or str(error)).strip()
        raise InputError(f"nvidia-smi is here and does not list the GPUs: {said}", hint="write `2xCPU` to use the CPU, or name the GPUs") from error


def _visible(rows: list[list[str]]) -> list[list[str]]:
    """The rows that CUDA_VISIBLE_DEVICES leaves, when it lists them by number."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return rows
    numbers = [part.strip() for part in chosen.split(",") if part.strip()]
    if not all(number.isdigit() for number in numbers):  # UUIDs, or -1 for none
        return [] if numbers[:1] == ["-1"] else rows[: len(numbers)]
    return [rows[int(number)] for number in numbers if int(number) < len(rows)]


def _reported(device: Device, memory_mib: str) -> Device:
    """The catalogue's device with the memory that the driver reports; never more usable than that."""
    if not memory_mib.isdigit():
        return device
    memory = int(memory_mib) * 2**20
    return replace(device, memory_bytes=memory, usable_bytes=min(device.usable_bytes, memory))
