"""Hardware by one line, by its facts, and by asking the machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pentamesh.errors import InputError
from pentamesh.job import machine
from pentamesh.job.device import Device, find_gpu, gpu_names, intra_link
from pentamesh.job.hardware import read_hardware


@pytest.mark.parametrize(
    ("line", "nodes", "per_node", "name", "nics", "inter"),
    [
        ("8xRTX-5090", 1, 8, "RTX-5090", 0, None),
        ("1xH100", 1, 1, "H100-SXM-80GB", 0, None),
        ("h100", 1, 1, "H100-SXM-80GB", 0, None),
        ("4xRTX-4090", 1, 4, "RTX-4090", 0, None),
        ("8x4090", 1, 8, "RTX-4090", 0, None),
        ("2x8xRTX-Pro-6000@200gbps", 2, 8, "RTX-PRO-6000-Blackwell-WS", 1, 25e9),
        ("8x8xH100@8x400gbps", 8, 8, "H100-SXM-80GB", 8, 50e9),
        ("2 x 8 x h200 @ 8 x 50 GB/s", 2, 8, "H200-SXM-141GB", 8, 50e9),
        ("2x8xB200@8xNDR", 2, 8, "B200-SXM", 8, 50e9),
        ("8xNVIDIA GeForce RTX 5090", 1, 8, "RTX-5090", 0, None),
        ("8xNVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 1, 8, "RTX-PRO-6000-Blackwell-Max-Q", 0, None),
        ("8xNVIDIA_A100-SXM4-80GB", 1, 8, "A100-SXM-80GB", 0, None),
    ],
)
def test_one_line(line: str, nodes: int, per_node: int, name: str, nics: int, inter: float | None) -> None:
    found = read_hardware(line)
    assert (found.num_nodes, found.devices_per_node, found.num_devices) == (nodes, per_node, nodes * per_node)
    assert (found.device.name, found.device.kind, found.nics_per_node) == (name, "cuda", nics)
    assert (found.inter.bytes_per_s if found.inter else None) == inter


def test_how_many_nics_changes_the_answer_eightfold_and_the_default_is_stated() -> None:
    one, eight = read_hardware("2x8xH100@400gbps"), read_hardware("2x8xH100@8x400gbps")
    assert one.inter_bytes_per_s_per_device * 8 == eight.inter_bytes_per_s_per_device == 50e9
    assert any("one NIC a node is assumed; write @8x400gbps" in note for note in one.notes)
    assert not any("assumed" in note for note in eight.notes)


def test_an_ambiguous_name_says_what_it_was_taken_for() -> None:
    notes = read_hardware("8xRTX-Pro-6000").notes
    assert "RTX-Pro-6000 is taken as RTX-PRO-6000-Blackwell-WS" in notes[0]
    assert "RTX-PRO-6000-Blackwell-Max-Q or RTX-PRO-6000-Blackwell-Server" in notes[0]
    assert "A100-PCIe-80GB" in read_hardware("8xA100").notes[0]
    assert not any("taken as" in note for note in read_hardware("8xA100-SXM-80GB").notes)


def test_facts_of_the_brief() -> None:
    card = read_hardware("8xRTX-5090").device
    assert card.flop_per_s["bfloat16"] == 209.5e12
    assert card.usable_bytes == round(31.34 * 2**30)
    assert read_hardware("1xH100").device.flop_per_s["bfloat16"] == 989.5e12
    assert read_hardware("1xRTX-PRO-6000").device.flop_per_s["bfloat16"] == 503.8e12
    assert read_hardware("1xRTX-PRO-6000-Max-Q").device.tdp_w == 300
    assert "float8" not in read_hardware("1xA100").device.flop_per_s


@pytest.mark.parametrize(
    ("line", "gb_per_s", "measured"), [("8xRTX-5090", 28, True), ("4xRTX-5090", 35, True), ("8xRTX-PRO-6000", 63, False), ("8xH100", 450, False)]
)
def test_links_inside_a_node(line: str, gb_per_s: float, measured: bool) -> None:
    link = read_hardware(line).intra
    assert (link.bytes_per_s, link.measured) == (gb_per_s * 1e9, measured)
    assert "NCCL" in link.source.upper() or not measured


def test_a_mesh_of_wires_grows_with_the_devices() -> None:
    rates = [read_hardware(f"{n}xMI300X").intra.bytes_per_s for n in (1, 2, 4, 8)]
    assert rates == [64e9, 64e9, 192e9, 448e9]


@pytest.mark.parametrize("name", gpu_names())
def test_every_gpu_is_complete(name: str) -> None:
    device, _ = find_gpu(name)
    assert device.name == name
    assert 0.9 * device.memory_bytes < device.usable_bytes <= device.memory_bytes
    assert device.flop_per_s["float32"] < device.flop_per_s["bfloat16"] == device.flop_per_s["float16"]
    assert device.source
    assert set(device.confidence) == {"peak", "usable", "float32"}
    assert set(device.confidence.values()) <= set("ABC")
    link = intra_link(device, 8)
    assert link.bytes_per_s > 1e10
    assert link.source


def test_no_name_means_two_gpus() -> None:
    catalogue = json.loads((Path(machine.__file__).parent / "gpus.json").read_text())["gpus"]
    for gpu in catalogue:
        for name in (gpu["name"], *gpu["aliases"], *gpu["stands_for"]):
            assert find_gpu(name)[0].name == gpu["name"]


def test_gpus_of_the_published_table_are_known(shared: Path) -> None:
    import csv

    with (shared / "published" / "gpus_and_links.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "gpu"]
    differ = []
    for row in rows:
        name = row["name"].replace("GH200-96/141", "GH200-96GB")
        device, _ = find_gpu(name)
        share = 0.5 if row["name"] == "MI250X" else 1.0  # one of its two dies
        peak = float(row["bf16_dense_tflops"].lstrip("~").split("-")[0].split(" ")[0]) * share
        if device.flop_per_s["bfloat16"] != pytest.approx(peak * 1e12):
            differ.append((name, device.flop_per_s["bfloat16"], peak))
    assert len(rows) >= 27
    assert differ == []


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("8xRTX-5091", "'RTX-5091' is not a GPU of the catalogue"),
        ("8x", "'8x' does not say which hardware"),
        ("8", "'8' does not say which hardware"),
        ("", "'' does not say which hardware"),
        ("8xH100@", "'8xH100@' does not say which hardware"),
        ("0xH100", "'0xH100' asks for 0 devices"),
        ("2x0xH100@200gbps", "asks for 0 devices"),
        ("2x8xH100", "2 nodes, and nothing says what joins them"),
        ("2x8xH100@400G", "'400G' is not a data rate"),
        ("2x8xH100@fast", "'fast' is not a data rate"),
        ("2x8xH100@0x200gbps", "carries nothing"),
        ("2x8xH100@0gbps", "carries nothing"),
        ("2x8xH100@1e400gbps", "is no rate of a link"),
        ("2x8xH100@1e-300gbps", "is no rate of a link"),
        ("1000000xH100", "more than 262,144 devices"),
        ("9999x9999xCPU@1gbps", "more than 262,144 devices"),
        ("9" * 5000 + "xCPU", "more than 262,144 devices"),
        ({"gpu": "H100", "nodes": 10**6}, "more than 262,144 devices"),
        ({"gpus": 8}, "`hardware` lacks `gpu`"),
        ({"gpu": "H100", "gpus": -1}, "gpus = -1 is not a whole number of at least 1"),
        ({"gpu": "H100", "nodes": 2, "fabric": "8x400gbps", "nics": 4}, "has 8 NICs a node and nics says 4"),
        ({"gpu": "H100", "nics": 4}, "nics = 4 without a fabric"),
        ({"gpu": "H100", "p2p": True}, "p2p = true says nothing about H100-SXM-80GB"),
        ({"gpu": "CPU", "power_cap_w": 100}, "say nothing about a CPU"),
        ({"gpu": "H100", "power_cap_w": 900}, "power_cap_w = 900 is above the 700 W"),
        ({"gpu": "H100", "host_ram": "lots"}, "host_ram = 'lots' is not an amount of memory"),
    ],
)
def test_what_is_no_hardware(written: str | dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        read_hardware(written)
    assert said in str(caught.value)
    assert all(p.where.startswith("hardware") for p in caught.value.problems)


def test_all_that_is_wrong_with_a_line_is_said() -> None:
    with pytest.raises(InputError) as caught:
        read_hardware("2x8xRTX-5091@fast")
    assert len(caught.value.problems) == 2


def test_facts_change_the_machine() -> None:
    plain = read_hardware("8xRTX-PRO-6000")
    told = read_hardware({"gpus": 8, "gpu": "RTX-PRO-6000", "power_cap_w": 300, "host_ram": "512 GB", "nvme": "4 TB", "p2p": False})
    assert told.device.flop_per_s["bfloat16"] == pytest.approx(plain.device.flop_per_s["bfloat16"] * 0.5 ** (1 / 3))
    assert (told.device.tdp_w, told.device.confidence["peak"]) == (300, "C")
    assert told.intra.bytes_per_s < plain.intra.bytes_per_s
    assert (told.host_ram_bytes, told.nvme_bytes) == (512 * 10**9, 4 * 10**12)
    assert read_hardware({"gpu": "5090", "gpus": 8, "p2p": True}).intra.name == "PCIe5 P2P"


def test_processes_share_one_cpu() -> None:
    one, two = read_hardware("1xCPU"), read_hardware("2xCPU")
    assert one.device.kind == two.device.kind == "cpu"
    assert two.device.memory_bytes == one.device.memory_bytes // 2
    assert two.device.flop_per_s["float32"] == one.device.flop_per_s["float32"] / 2
    assert two.intra.name == "gloo loopback"
    assert any("share this machine's CPU" in note for note in two.notes)


def test_json_has_all_of_it() -> None:
    found = json.loads(json.dumps(read_hardware("2x8xH100@400gbps").to_json()))
    assert found["num_devices"] == 16
    assert found["inter"]["bytes_per_s"] == 50e9
    assert found["device"]["flop_per_s"]["bfloat16"] == 989.5e12
    assert found["description"] == "2 nodes of 8 x H100-SXM-80GB (84.9 GB usable, NVLink4, 1 x 400 Gb/s a node)"


def _listed(monkeypatch: pytest.MonkeyPatch, listing: str) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(machine, "_run", lambda command: listing)


def test_auto_asks_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    _listed(monkeypatch, "NVIDIA H100 80GB HBM3, 81559\nNVIDIA H100 80GB HBM3, 81559\n")
    found = read_hardware("auto")
    assert (found.num_devices, found.device.name, found.intra.name) == (2, "H100-SXM-80GB", "NVLink4")
    assert found.device.memory_bytes == 81559 * 2**20
    assert found.device.usable_bytes < found.device.memory_bytes


def test_auto_counts_what_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    _listed(monkeypatch, "NVIDIA GeForce RTX 4090, 24564\nNVIDIA GeForce RTX 5090, 32607\nNVIDIA GeForce RTX 5090, 32607\n")
    with pytest.raises(InputError, match="this machine has different GPUs: RTX-4090, RTX-5090"):
        read_hardware("auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    assert (read_hardware("auto").num_devices, read_hardware("auto").device.name) == (2, "RTX-5090")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert read_hardware("auto").device.kind == "cpu"


def test_auto_on_a_gpu_that_is_not_catalogued(monkeypatch: pytest.MonkeyPatch) -> None:
    _listed(monkeypatch, "NVIDIA Quadro P400, 2048\n")
    with pytest.raises(InputError, match="'NVIDIA Quadro P400' is not a GPU of the catalogue"):
        read_hardware("auto")


def test_auto_says_when_the_driver_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise subprocess.CalledProcessError(9, "nvidia-smi", output="NVIDIA-SMI has failed")

    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(machine.subprocess, "run", fails)
    with pytest.raises(InputError, match="NVIDIA-SMI has failed"):
        read_hardware("auto")


def test_auto_without_a_gpu_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    found = read_hardware("auto")
    assert (found.device.kind, found.num_devices) == ("cpu", min(2, machine.num_cores()))


def test_a_device_can_be_a_key() -> None:
    assert isinstance(find_gpu("H100")[0], Device)
    assert len({read_hardware("8xH100"), read_hardware("8xH100")}) == 1


@pytest.mark.parametrize(
    ("flags", "float32", "bfloat16"),
    [("avx2 avx512f avx512_bf16", 95e9, 215e9), ("avx2 avx512f", 95e9, 95e9 / 8), ("avx2", 60e9, 7.5e9), (None, 95e9, 215e9)],
)
def test_a_cpu_computes_by_its_instructions(
    flags: str | None, float32: float, bfloat16: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    if flags is not None:
        info.write_text(f"processor\t: 0\nflags\t\t: fpu {flags} sse\n")
    monkeypatch.setattr(machine, "CPUINFO", info)
    monkeypatch.setattr(machine, "num_cores", lambda: 2)
    machine._instructions.cache_clear()
    found = read_hardware("2xCPU")
    machine._instructions.cache_clear()
    assert found.device.flop_per_s == {"float32": float32, "bfloat16": bfloat16}
    assert any("precision = fp32 is faster" in note for note in found.notes) is (bfloat16 < float32)
