"""Compiled blocks compute what eager ones do, by one graph for all blocks and lengths, and move what was planned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pentamesh.errors import InputError
from pentamesh.layout.mesh import DATA_AXES, Mesh
from pentamesh.run.compiled import check_compiler
from pentamesh.run.ledger import differences
from pentamesh.run.verify import Outcome, Trial, errors, outcome, predicted_ledger
from pentamesh.run.world import join
from pentamesh.run.worlds import run_world
from tests.proof.toys import TOYS, reduced, trial, trial_on


def counted(wanted: Trial) -> tuple[Outcome, int, int]:
    """A trial, with the graphs that were compiled for it and the places where one had to be broken."""
    from torch._dynamo.utils import counters

    found = outcome(wanted)
    return found, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def _has_compiler() -> None:
    try:
        check_compiler("")
    except InputError as error:
        pytest.skip(f"nothing to compile with: {error.problems[0].what}")


# Full and hybrid shard are compiled by the launch lines of tests/test_recipes.py, whose ledgers have to be as planned too.
DDP, TENSOR = (
    trial("llama", "ddp", 2, 1, compile=True, recompute="selective"),
    trial_on(TOYS["llama-untied"], Mesh(tp=2), "parameters", True, grad_accum=1, compile=True, recompute="full"),
)
RING = trial_on(TOYS["llama-untied"], Mesh(cp=2), "none", False, "ring", grad_accum=1, compile=True, recompute="selective")
ALL_GATHER = trial_on(TOYS["llama-untied"], Mesh(cp=2), "parameters", False, "all_gather", grad_accum=1, compile=True)
ULYSSES = trial_on(TOYS["llama-untied"], Mesh(cp=2), "parameters", False, "ulysses", grad_accum=1, compile=True, recompute="full")
# Between the router's choice and what experts make of it nothing is compiled; the first block is dense, and its MLP another graph than attention.
EXPERTS = trial_on(TOYS["deepseek-v3"], Mesh(dp_shard=2, ep=2), "parameters", False, grad_accum=1, compile=True, recompute="full")
CASES = {
    "ddp": (DDP, "fp32"),
    "ddp, cast": (DDP, "bf16"),
    "tensor and sequence": (TENSOR, "fp32"),
    "ring": (RING, "fp32"),
    "all-gather": (ALL_GATHER, "fp32"),
    "Ulysses": (ULYSSES, "fp32"),
    "experts": (EXPERTS, "fp32"),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", reduced(CASES, lambda name: name not in ("all-gather", "Ulysses")))
def test_compiled_is_eager(name: str) -> None:
    """In bf16 fused kernels round less often than eager ones: there only the graphs and what moves are held."""
    _has_compiler()
    case, precision = CASES[name]
    wanted = replace(case, precision=precision, global_batch=case.policy.micro_batch * case.layout.mesh.degree(*DATA_AXES))
    found, graphs, breaks = run_world(counted, 2, wanted, timeout_s=500)[0]
    eager = run_world(outcome, 2, replace(wanted, policy=replace(wanted.policy, compile=False)))[0]
    worst = errors(found, eager)
    if precision == "fp32":
        assert worst["loss"] < 1e-5, worst
        assert worst["first_gradient"] < 1e-5, worst
    # Of blocks with experts the attention is compiled, a dense MLP and what is shared.
    assert (graphs, breaks) == (3 if name == "experts" else 1, 0), "three blocks, three lengths"
    assert not differences(predicted_ledger(wanted, found), found.ledger)


def fused(wanted: Trial) -> tuple[Outcome, int]:
    """A trial whose blocks send the stream beside their matmuls, by torch's stand-ins for symmetric memory, and how often they do."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric
    from torch._inductor import config
    from torch._inductor.fx_passes import micro_pipeline_tp, post_grad

    from pentamesh.run.compiled import overlap_tensor_moves

    dist.is_nccl_available = lambda: True
    config.fx_graph_cache = False
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", symmetric._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", symmetric._fused_matmul_reduce_scatter_fallback, "CPU")
    count = 0

    def counted(graph: torch.fx.Graph) -> None:
        nonlocal count
        micro_pipeline_tp.micro_pipeline_tp_pass(graph)
        count += sum("symm_mem" in str(node.target) for node in graph.nodes)

    post_grad.micro_pipeline_tp_pass = counted
    overlap_tensor_moves(join(wanted.layout, "cpu").group(("tp",)))
    return outcome(wanted), count


@pytest.mark.timeout(600)
def test_the_stream_crosses_beside_matmuls() -> None:
    """Forward, two gathers with the matmuls behind them and two scatters with those before; in backward the mirror images of the scatters."""
    _has_compiler()
    wanted = trial_on(TOYS["llama"], Mesh(tp=2), "none", True, grad_accum=1, compile=True)
    wanted = replace(wanted, precision="fp32", global_batch=2, num_steps=2)
    found, count = run_world(fused, 2, wanted, timeout_s=500)[0]
    worst = errors(found, run_world(outcome, 2, replace(wanted, policy=replace(wanted.policy, compile=False)))[0])
    assert worst["loss"] < 1e-5, worst
    assert worst["first_gradient"] < 1e-5, worst
    assert count == 6, "the two sums of partial gradients have no one matmul before them"
    assert not differences(predicted_ledger(wanted, found), found.ledger)


def test_no_compiler_is_said_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(InputError, match="the C\\+\\+ compiler g\\+\\+ is not on PATH") as caught:
        check_compiler("job.yaml")
    assert caught.value.problems[0].where == "job.yaml training.compile"


def test_headers_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    paths: Any = {"include": str(tmp_path)}
    monkeypatch.setattr("sysconfig.get_paths", lambda: paths)
    with pytest.raises(InputError, match=r"Python\.h is not there"):
        check_compiler("job.yaml")
