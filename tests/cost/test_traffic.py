"""The timed ledger has the rows of `rhythm`, and hides no more than there is computing."""

from __future__ import annotations

import itertools

import pytest

from pentamesh.cost.compute import work
from pentamesh.cost.holding import Holding
from pentamesh.cost.traffic import communication, flows
from pentamesh.job.hardware import read_hardware
from pentamesh.job.job import Batch
from pentamesh.job.precision import PRECISIONS
from pentamesh.layout.crossings import ledger
from pentamesh.layout.mesh import Layout, Mesh
from pentamesh.layout.policy import Policy
from pentamesh.layout.rhythm import rhythm
from pentamesh.model.read import read_model
from pentamesh.model.roles import Role

BF16 = PRECISIONS["bf16"]
MACHINE = read_hardware("8xH100")
LAYOUTS = [
    Layout(Mesh(dp_replicate=8), "none"),
    Layout(Mesh(dp_shard=8), "parameters"),
    Layout(Mesh(dp_replicate=2, dp_shard=4), "parameters"),
    Layout(Mesh(dp_shard=4, tp=2), "parameters", sequence_parallel=True),
    Layout(Mesh(dp_shard=2, cp=2, tp=2), "parameters"),
]
POLICIES = [
    Policy(grad_accum=4, recompute=recompute, reshard=reshard, keep_gathered=keep, reduce=reduce)
    for recompute, (reshard, keep), reduce in itertools.product(("none", "full"), ((True, False), (False, True)), ("once", "each"))
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rows_are_those_of_the_rhythm(layout: Layout) -> None:
    model = read_model("smollm2-135m")
    for policy in POLICIES:
        found = sorted(flow.row for flow in flows(Holding(model, layout), policy, BF16, 512, MACHINE))
        assert found == ledger(rhythm(model, layout, policy, BF16, 512))


STAGED = [
    Layout(Mesh(pp=2, dp_replicate=4), "none"),
    Layout(Mesh(pp=4, dp_shard=2), "optimizer"),
    Layout(Mesh(pp=2, dp_shard=2, tp=2), "parameters", sequence_parallel=True),
]


@pytest.mark.parametrize("layout", STAGED, ids=str)
@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3.1-8b"])
def test_a_stage_moves_its_own_parameters_only(name: str, layout: Layout) -> None:
    """The first stage: its share of the blocks and the embedding. Its rows are those of the rhythm, and the norm is summed over stages."""
    model, policy, data = read_model(name), Policy(reshard=True), {"dp_replicate", "dp_shard"}
    held = Holding(model, layout)
    found = [flow.row for flow in flows(held, policy, BF16, 512, MACHINE)]
    expected = ledger(rhythm(model, layout, policy, BF16, 512))
    assert sorted(r for r in found if set(r.axes) <= data or "pp" in r.axes) == [r for r in expected if set(r.axes) <= data or "pp" in r.axes]
    reduced = sum(r.bytes * r.count for r in found if r.phase == "backward" and r.kind != "all_gather" and set(r.axes) <= data)
    assert reduced == 4 * held.stage_numel(Role.USE, 0)
    assert held.stage_numel(Role.USE, 0) < 0.7 * sum(held.stage_numel(Role.USE, stage) for stage in range(layout.mesh.pp))
    (norm,) = (r for r in found if r.phase == "step" and "pp" in r.axes)
    assert (norm.kind, norm.bytes) == ("all_reduce", 8)


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.recompute}-{p.reshard}-{p.reduce}")
def test_exposed_lies_between_the_edge_and_all(layout: Layout, policy: Policy) -> None:
    held, batch = Holding(read_model("llama-3.1-8b"), layout), Batch()
    computing = work(held, policy, BF16, batch, MACHINE.device)
    found = flows(held, policy, BF16, batch.seq_len, MACHINE)
    table = communication(found, policy, computing, "cuda", bucketed=layout.shard == "none")
    total, exposed = sum(c.seconds for c in table), sum(c.exposed_s for c in table)
    assert total == pytest.approx(sum(flow.seconds for flow in found))
    assert 0 < exposed < total
    assert total - exposed <= policy.grad_accum * (computing.forward_s + computing.backward_s)


def test_nothing_hides_on_cpu() -> None:
    held, machine, policy = Holding(read_model("smollm2-135m"), Layout(Mesh(dp_replicate=2))), read_hardware("2xCPU"), Policy(grad_accum=4)
    computing = work(held, policy, BF16, Batch(), machine.device)
    table = communication(flows(held, policy, BF16, 512, machine), policy, computing, "cpu", bucketed=True)
    assert sum(c.exposed_s for c in table) == pytest.approx(sum(c.seconds for c in table))


def test_adapters_reduce_adapters_only() -> None:
    model, policy = read_model("llama-3.1-8b"), Policy(grad_accum=4)
    layout = Layout(Mesh(dp_replicate=8), "none")
    full = flows(Holding(model, layout), policy, BF16, 4096, MACHINE)
    lora = flows(Holding(model, layout, "lora"), policy, BF16, 4096, MACHINE)
    assert sum(f.row.wire_bytes for f in lora) < 0.01 * sum(f.row.wire_bytes for f in full)
    sharded = Layout(Mesh(dp_shard=8), "parameters")
    gathered = {
        method: sum(f.row.wire_bytes for f in flows(Holding(model, sharded, method), policy, BF16, 4096, MACHINE) if f.row.kind == "all_gather")
        for method in ("full", "lora", "qlora")
    }
    assert gathered["full"] < gathered["lora"] < 1.02 * gathered["full"]
    assert gathered["qlora"] < 0.3 * gathered["full"]
