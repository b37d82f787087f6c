"""`python benchmarks/speed.py`: steps of `pentamesh train` beside those of a minimal loop written by hand, on two processes of this machine.

By hand means torch's own parts as its tutorials put them together: DistributedDataParallel, fully_shard block by block, or parallelize_module with a
plan for every projection and a loss over a vocabulary that is cut. torch's own context parallel has no CPU path: by hand each rank has one half of a
row, gathers the keys and values of both by `all_gather_single_autograd`, and torch's fused attention masks those that lie ahead. Experts are parted
by transformers' own expert parallel, beside its own full sharding.

Both sides train the same 512-wide, 8-layer Llama - or Qwen3-MoE with 8 experts - on the same tokens in the same processes, one step of each in turn,
so that what else the machine does falls on both alike. What is compared is the median over such pairs of the ratio of their speeds; its quartiles say
how noisy the machine was. Peak memory is measured apart, one side at a time in fresh processes, by the same counter.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from pentamesh.job.hardware import read_hardware
from pentamesh.job.job import Batch, ContextWay, Job, LayoutRequest, Model
from pentamesh.job.precision import PRECISIONS
from pentamesh.layout.mesh import Layout, Mesh, Shard
from pentamesh.model.read import read_model
from pentamesh.model.spec import ModelSpec
from pentamesh.plan.plan import Plan
from pentamesh.plan.search import plan
from pentamesh.run.data.batches import Micro
from pentamesh.run.data.share import Share
from pentamesh.run.initial import drawing
from pentamesh.run.optim import adamw
from pentamesh.run.peak import count_allocations, measured_peak
from pentamesh.run.place import parameters_of, place
from pentamesh.run.step import Trainee, take_step
from pentamesh.run.world import World, join
from pentamesh.run.worlds import run_world

RANKS = 2
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
# As wide in what a token meets of experts, 2 of 8.
SPARSE: dict[str, Any] = CONFIG | {
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "moe_intermediate_size": 688,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
Step = Callable[[], float]


@dataclass(frozen=True)
class Case:
    """A strategy, how it accumulates, how the hand-written loop reduces (`each` micro-batch or `once` a step), and what ours has to reach."""

    strategy: str
    grad_accum: int
    hand: str
    least_speed: float

    @property
    def is_tensor(self) -> bool:
        return self.strategy.startswith("tensor")

    @property
    def parts_experts(self) -> bool:
        return self.strategy == "experts"

    @property
    def context(self) -> ContextWay | None:
        """How rows are shared, where they are."""
        return next((way for way in get_args(ContextWay) if self.strategy == f"context_{way}"), None)

    @property
    def data_ranks(self) -> int:
        return 1 if self.is_tensor or self.context else RANKS

    @property
    def rows(self) -> tuple[int, int]:
        """Rows of a micro-batch, and tokens of each: 1,024 tokens in all, and more where ranks share them."""
        return (1, 2048) if self.context else (2, 512)


CASES = (
    Case("ddp", 1, "once", 0.97),
    Case("ddp", 4, "once", 0.97),
    Case("full_shard", 1, "once", 0.97),
    Case("full_shard", 4, "once", 1.07),
    Case("full_shard", 4, "each", 1.12),
    Case("tensor", 1, "once", 0.97),
    Case("tensor_sequence", 1, "once", 0.97),
    Case("context_ring", 1, "once", 0.97),
    Case("context_all_gather", 1, "once", 0.97),
    Case("context_ulysses", 1, "once", 0.97),
    Case("experts", 1, "once", 0.97),
)
MOST_MEMORY = 1.05


def micros(case: Case, share: Share, seed: int) -> list[Micro]:
    """The same full sequences for both sides, of each what `share` says is this rank's."""
    draw, (batch, length) = torch.Generator().manual_seed(1000 * seed + share.data_rank), case.rows
    here, found = torch.from_numpy(share.places(length)), []
    for _ in range(case.grad_accum):
        row = torch.randint(0, CONFIG["vocab_size"], (batch, length + 1), generator=draw)
        ids, labels = (t[:, here] for t in (row[:, :-1], row[:, 1:]))
        samples = torch.arange(batch).unsqueeze(1).expand(ids.shape)
        found.append(Micro(ids, labels, ids.numel(), ids.numel(), here.unsqueeze(0), samples=samples, sizes=torch.full((batch,), length)))
    return found


# Ours


def planned(model: ModelSpec, folder: Path, case: Case) -> Plan:
    """What `pentamesh train` would run on two processes of this machine."""
    shard: Shard = "parameters" if case.strategy == "full_shard" or case.parts_experts else "none"
    batch, length = case.rows
    job = Job(
        model=Model(name=str(folder)),
        method="pretrain",
        batch=Batch(seq_len=length, micro_batch=batch, global_batch=batch * case.grad_accum * case.data_ranks),
        precision="fp32",
        hardware=f"{RANKS}xCPU",
        # At accumulation 1 both free gathered blocks between forward and backward; with accumulation the choice is what is measured.
        layout=LayoutRequest(
            shard=shard,
            reshard_after_forward=True if shard == "parameters" and case.grad_accum == 1 else "auto",
            tensor=RANKS if case.is_tensor else 1,
            sequence_parallel=case.strategy == "tensor_sequence",
            context=RANKS if case.context else 1,
            context_attention=case.context or "auto",
            expert=RANKS if case.parts_experts else 1,
        ),
    )
    return plan(job, model, read_hardware(job.hardware), trained_only=True)


def ours(case: Case, folder: Path, world_of: Callable[[Plan], World]) -> tuple[Step, Plan]:
    model = read_model(str(folder))
    chosen = planned(model, folder, case)
    world, precision = world_of(chosen), PRECISIONS["fp32"]
    module = place(model, chosen.layout, chosen.policy, precision, world, drawing(0))
    parameters = parameters_of(module)
    trainee = Trainee(module, parameters, adamw(parameters, model, chosen.job.optimizer, precision, world, 0), model, chosen.policy, world)
    count = iter(range(10**9))
    return lambda: take_step(trainee, micros(case, world.share, next(count)), 1.0).loss, chosen


# By hand


def by_hand(case: Case, folder: Path) -> Step:
    """The loop that torch's tutorials teach: HF module and loss, data or tensor parallel, clip, fused AdamW."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    config.use_cache = False
    attention = "by_hand" if case.context else "sdpa"
    ALL_ATTENTION_FUNCTIONS.register("by_hand", _gathered_attention)
    if case.parts_experts:
        own = {"distributed_config": DistributedConfig(fsdp_size=RANKS, ep_size=RANKS)}
        module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **own).train()
        _sum_on_gloo(module)
    else:
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    if case.is_tensor:
        _parallelize(module, sequence=case.strategy == "tensor_sequence")
    elif case.strategy == "ddp" or case.context:
        module = DistributedDataParallel(module, gradient_as_bucket_view=True, static_graph=case.grad_accum == 1)
    elif not case.parts_experts:
        for layer in module.model.layers:
            fully_shard(layer)
        fully_shard(module)
        _sum_on_gloo(module)
    groups: list[dict[str, Any]] = [{"params": kind} for kind in _kinds(module.parameters())]
    optimizer = torch.optim.AdamW(groups, lr=2e-5, betas=(0.9, 0.95), fused=True)
    count, mesh = iter(range(10**9)), Mesh(cp=RANKS) if case.context else Mesh(tp=RANKS) if case.is_tensor else Mesh(dp_replicate=RANKS)
    share = Share(Layout(mesh, context="ulysses"), dist.get_rank())  # halves of rows, not folded

    def step() -> float:
        rows, total = micros(case, share, next(count)), 0.0
        for index, row in enumerate(rows):
            last = index == len(rows) - 1
            total += _backward(module, row, case, last)
        _clip(list(module.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def _sum_on_gloo(module: nn.Module) -> None:
    """gloo has no averaging reduction."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)


def _gathered_attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    """Of one half of each row, with the keys and values of both."""
    from torch.distributed._functional_collectives import all_gather_single_autograd

    length = query.shape[2]
    group: Any = dist.group.WORLD
    asked, given = (all_gather_single_autograd(t.contiguous(), 2, group) for t in (key, value))
    behind = torch.arange(RANKS * length) <= torch.arange(length).unsqueeze(1) + dist.get_rank() * length
    out = nn.functional.scaled_dot_product_attention(query, asked, given, attn_mask=behind)
    return out.transpose(1, 2).contiguous(), None


def _parallelize(module: Any, *, sequence: bool) -> None:
    """The plan of torch's tutorial on tensor parallel, for Hugging Face's names: one for every projection, and logits that stay cut."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module

    mesh, stream = init_device_mesh("cpu", (RANKS,)), Shard(1) if sequence else Replicate()
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=stream)
    block: dict[str, Any] = {f"self_attn.{letter}_proj": columns for letter in "qkv"} | {"self_attn.o_proj": rows}
    block |= {"mlp.gate_proj": columns, "mlp.up_proj": columns, "mlp.down_proj": rows}
    root: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "lm_head": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence:
        entry = {"input_kwarg_layouts": {"hidden_states": stream}, "desired_input_kwarg_layouts": {"hidden_states": Replicate()}}
        block |= {"self_attn": PrepareModuleInput(**entry), "mlp": PrepareModuleInput(input_layouts=stream, desired_input_layouts=Replicate())}
        block |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), SequenceParallel())
        root["model.norm"] = SequenceParallel()
    for layer in module.model.layers:
        parallelize_module(layer, mesh, block)
    parallelize_module(module, mesh, root)


def _kinds(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """DTensors of each mesh, and others, apart: no operation takes both."""
    from torch.distributed.tensor import DTensor

    kinds: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(kinds.values())


def _clip(parameters: list[torch.Tensor]) -> None:
    from torch.distributed.tensor import DTensor

    kinds = _kinds(p.grad for p in parameters if p.grad is not None)
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in map(nn.utils.get_total_norm, kinds)]
    factor = torch.clamp(1.0 / (torch.stack(norms).norm() + 1e-6), max=1.0).item()
    for grads in kinds:
        torch._foreach_mul_(grads, factor)


def _backward(module: Any, row: Micro, case: Case, last: bool) -> float:
    from contextlib import nullcontext

    from torch.distributed.tensor.parallel import loss_parallel

    sync = last or case.hand == "each"
    if case.strategy == "full_shard":
        module.set_requires_gradient_sync(sync)
    own = loss_parallel() if case.is_tensor else module.no_sync() if case.strategy == "ddp" and not sync else nullcontext()
    with own:
        logits = module(input_ids=row.input_ids, position_ids=row.positions).logits
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), row.labels.flatten()) / case.grad_accum
        loss.backward()
    return float(loss.detach())


# Measuring


def pairs(case: Case, folder: Path, num_pairs: int) -> tuple[list[tuple[float, float]], str]:
    """Seconds of one step of ours and one by hand, in turn; who goes first alternates."""
    torch.set_num_threads(1)
    mine, chosen = ours(case, folder, lambda p: join(p.layout, "cpu"))
    theirs = by_hand(case, folder)
    for step in (mine, theirs) * 2:
        step()
    found = []
    for index in range(num_pairs):
        taken = {}
        for name, step in ((("ours", mine), ("hand", theirs)), (("hand", theirs), ("ours", mine)))[index % 2]:
            dist.barrier()
            started = time.perf_counter()
            step()
            dist.barrier()
            taken[name] = time.perf_counter() - started
        found.append((taken["ours"], taken["hand"]))
    return found, str(chosen.policy)


def peak(case: Case, folder: Path, side: str) -> int:
    """The peak of a steady step of one side alone."""
    count_allocations()
    torch.set_num_threads(1)
    step = ours(case, folder, lambda p: join(p.layout, "cpu"))[0] if side == "ours" else by_hand(case, folder)
    for _ in range(2):
        step()
    return _peak_of(step)


def _peak_of(step: Step) -> int:
    with measured_peak(torch.device("cpu")) as found:
        step()
    return found.peak_bytes or 0


def measure(case: Case, folder: Path, num_pairs: int) -> dict[str, Any]:
    seconds, policy = run_world(pairs, RANKS, case, folder, num_pairs, timeout_s=3600)[0]
    ratios = sorted(hand / own for own, hand in seconds)
    quartiles = statistics.quantiles(ratios, n=4)
    tokens = case.data_ranks * math.prod(case.rows) * case.grad_accum
    own_peak, hand_peak = (max(run_world(peak, RANKS, case, folder, side, timeout_s=600)) for side in ("ours", "hand"))
    return asdict(case) | {
        "policy": policy,
        "ours_tokens_per_s": tokens / statistics.median(own for own, _ in seconds),
        "hand_tokens_per_s": tokens / statistics.median(hand for _, hand in seconds),
        "speed_ratio": statistics.median(ratios),
        "speed_ratio_quartiles": [quartiles[0], quartiles[2]],
        "num_pairs": len(ratios),
        "ours_peak_bytes": own_peak,
        "hand_peak_bytes": hand_peak,
        "memory_ratio": own_peak / hand_peak,
    }


def model_folder(case: Case) -> Path:
    """The model of a case; where transformers parts its experts, which it does as it loads, with random weights."""
    folder = Path(".cache/benchmarks") / ("sparse" if case.parts_experts else "model")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SPARSE if case.parts_experts else CONFIG))
    if case.parts_experts:
        run_world(_save_random, 1, folder)
    return folder


def _save_random(folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).save_pretrained(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15, help="pairs of steps a case")
    parser.add_argument("--only", help="cases whose name contains this (`ddp-1`)")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    given = parser.parse_args()
    machine = {"cpu": platform.processor() or platform.machine(), "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}
    print(f"{RANKS} processes, fp32, {machine}")
    rows = []
    for case in CASES:
        if given.only and given.only not in f"{case.strategy}-{case.grad_accum}-{case.hand}":
            continue
        row = measure(case, model_folder(case), given.pairs)
        rows.append(row)
        low, high = row["speed_ratio_quartiles"]
        print(
            f"{case.strategy:18} {case.rows[0]} x {case.rows[1]} tokens, accumulation {case.grad_accum}, by hand reduced {case.hand:4}: "
            f"{row['ours_tokens_per_s']:6.0f} against {row['hand_tokens_per_s']:6.0f} tok/s = {row['speed_ratio']:.3f}x "
            f"(quartiles {low:.3f}-{high:.3f}; at least {case.least_speed}), memory {row['memory_ratio']:.3f}x (at most {MOST_MEMORY})",
            flush=True,
        )
    if given.json:
        given.json.write_text(json.dumps({"schema": "pentamesh.benchmark", "version": 1, "machine": machine, "rows": rows}, indent=2) + "\n")
    missed = [r for r in rows if r["speed_ratio"] < r["least_speed"] or r["memory_ratio"] > MOST_MEMORY]
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
