"""`place`: the planned layout made real. The only file that makes DTensors.

Modules stay Hugging Face's, built without weights; each rank then fills its own part from the model folder (or draws it), never more.
What was built is checked against the plan on every rank before the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pentamesh.checkpoint.together import together
from pentamesh.errors import Drift, Problem
from pentamesh.job.precision import Precision
from pentamesh.layout.mesh import COPY_AXES, Layout
from pentamesh.layout.policy import DDP_BUCKET_BYTES, Policy
from pentamesh.layout.rules import on_expert_view, sharding_of
from pentamesh.layout.split import Split, split
from pentamesh.model.dims import TensorSpec
from pentamesh.model.roles import Role
from pentamesh.model.spec import ModelSpec
from pentamesh.run.attention import ATTENTION
from pentamesh.run.balance import even_out
from pentamesh.run.compiled import compile_blocks, compiled_parts, overlap_tensor_moves
from pentamesh.run.data.batches import collate
from pentamesh.run.data.samples import Samples
from pentamesh.run.experts import EXPERTS, dispatching
from pentamesh.run.head import join_head_and_loss
from pentamesh.run.lean import keep_less
from pentamesh.run.loss import weighted_loss
from pentamesh.run.recompute import recompute
from pentamesh.run.rotary import rotate_as_wide
from pentamesh.run.router import route_by, routers
from pentamesh.run.shown import Getter, cast_to, show
from pentamesh.run.tensor import AXIS, cross_borders, cut
from pentamesh.run.world import World

__all__ = ["Filler", "build", "check", "local", "parameters_of", "place", "torch_dtype", "unwrapped"]

# Fills a rank's local part of a parameter: read from a folder, or drawn at random.
Filler = Callable[[TensorSpec, Split, int, torch.Tensor], None]


# Marks a parameter that several modules share, with its name.
TIED = "_pentamesh_tied_as"


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of a name (`bfloat16`)."""
    return getattr(torch, name)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a parameter or gradient."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def build(model: ModelSpec, dtype: torch.dtype) -> PreTrainedModel:
    """The model's modules: parameters on the meta device, buffers (rotary frequencies) real and as direct construction makes them."""
    config = {key: value for key, value in model.config.items() if key not in ("auto_map", "quantization_config")}
    config = AutoConfig.for_model(**config)
    config.use_cache = False
    config.output_router_logits = False  # experts' loads are the policy's to keep even
    with init_empty_weights(include_buffers=False):
        own = {"attn_implementation": ATTENTION, "experts_implementation": EXPERTS} if model.is_described else {"attn_implementation": "sdpa"}
        built = AutoModelForCausalLM.from_config(config, dtype=dtype, **own)
    for parameter in built.parameters():
        parameter.data = parameter.data.to(dtype)  # whatever it insists on: masters and casts are the precision's to say
    built.tie_weights()
    return built.train()


def place(model: ModelSpec, layout: Layout, policy: Policy, precision: Precision, world: World, fill: Filler) -> nn.Module:
    """The trainable module of this rank: built, laid out, filled and checked.

    Raises Drift when a parameter's shape, placement or dtype is not the plan's.
    """
    built = build(model, torch_dtype(precision.weight))
    if layout.mesh.degree("tp", "ep") > 1:
        cut(built, model, layout, world)
    for tensor in model.parameters:
        built.get_parameter(tensor.name).requires_grad_(tensor.trained)
    if model.is_described:
        rotate_as_wide(built)
        keep_less(built, compiled=compiled_parts(model) if policy.compile else ())
        route_by(built, model)
        even_out(built, routers(built), model, policy, world)
    parted = world.group(("ep",)).group_name if layout.mesh.ep > 1 else ""
    dispatching(built, parted, deep=policy.dispatch == "deepep")
    recompute(built, policy, world.device)
    if policy.async_tensor and world.device.type == "cuda":
        overlap_tensor_moves(world.group(AXIS))
    if policy.compile:
        compile_blocks(built, model)
    if layout.cuts_state:
        _fully_shard(built, model, policy, precision, world)
    _materialise(built, model, world)
    together("reading weights", lambda: _fill(built, model, layout, world, fill))
    check(built, model, layout, precision, world)
    if not layout.cuts_state and precision.compute != precision.weight:
        _show_casts(built, torch_dtype(precision.compute))
    if layout.mesh.tp > 1:
        cross_borders(built, model, layout, world)
    if model.is_described:
        join_head_and_loss(built, model, world)
    return built if layout.cuts_state or layout.mesh.degree(*COPY_AXES) == 1 else _replicate(built, model, policy, world)


def _fully_shard(built: nn.Module, model: ModelSpec, policy: Policy, precision: Precision, world: World) -> None:
    """Cut every unit over the shard axes (and copy it over the replicate axis), each gathered and reduced as one; experts that are parted are on a
    mesh of their own, beside the rest of their block.

    ZeRO-1, ZeRO-2 and full shard differ in how long what is gathered stays and when gradients are reduced, which is the policy's to say.
    """
    mesh = world.mesh["dp_replicate", "shard"] if world.layout.mesh.dp_replicate > 1 else world.mesh["shard"]
    compute = torch_dtype(precision.compute) if precision.compute != precision.weight else None
    mixed = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch_dtype(precision.reduce), cast_forward_inputs=False)
    units, elsewhere = [built.get_submodule(unit) for unit in model.units if unit], _experts_elsewhere(built, model, world)
    for module in (*units, built):
        # The root is used again at once by backward; FSDP never reshards it in between.
        reshard = policy.reshard and module is not built
        fully_shard(module, mesh=mesh, mp_policy=mixed, reshard_after_forward=reshard, shard_placement_fn=elsewhere)
    for module in built.modules():
        if isinstance(module, FSDPModule):
            # Gradients are sums over tokens, divided once by the global count in the loss. Gloo has no averaging reduction either.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    _end_prefetch(built, model)


def _experts_elsewhere(built: nn.Module, model: ModelSpec, world: World) -> Callable[[nn.Parameter], ShardPlacementResult | None] | None:
    """For parameters that live on the expert view, where there are any: over which ranks, and along which dim, they are cut."""
    parted = {built.get_parameter(t.name): t for t in model.parameters if on_expert_view(t, world.layout)}
    if not parted:
        return None
    if world.layout.mesh.dp_replicate > 1:
        info: FSDPMeshInfo = HSDPMeshInfo(world.expert_mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    else:
        info = FSDPMeshInfo(world.expert_mesh["edp"], shard_mesh_dim=0)

    def place(parameter: nn.Parameter) -> ShardPlacementResult | None:
        tensor = parted.get(parameter)
        return None if tensor is None else ShardPlacementResult(Shard(sharding_of(tensor, Role.STATE, world.layout)[0]), info)

    return place


def _end_prefetch(built: nn.Module, model: ModelSpec) -> None:
    """Let the last unit that goes back gather nothing ahead: the one before it has no backward. It is told to gather itself, which is there."""
    blocks = [unit for unit in dict.fromkeys(t.unit for t in model.parameters) if unit]
    reached = [unit for unit in blocks if unit in model.reached]
    if len(reached) < len(blocks):
        last: Any = built.get_submodule(reached[0]) if reached else built
        last.set_modules_to_backward_prefetch([last])


def _show_casts(built: nn.Module, dtype: torch.dtype) -> None:
    """Let every module compute with `dtype` copies of its parameters, as sharded blocks do; the parameters themselves stay masters.

    Tied modules share one copy over the whole forward, so that the two parts of its gradient are summed before they reach the master, as
    sharding does it.
    """
    copies: dict[str, torch.Tensor] = {}

    def shared(name: str, owner: str) -> Getter:
        def getter(module: nn.Module) -> torch.Tensor:
            if owner not in copies:
                copies[owner] = cast_to(name, dtype)(module)
            return copies[owner]

        return getter

    for module in built.modules():
        owners = {name: getattr(parameter, TIED, None) for name, parameter in module.named_parameters(recurse=False)}
        if owners:
            show(module, {name: shared(name, owner) if owner else cast_to(name, dtype) for name, owner in owners.items()})
    built.register_forward_hook(lambda *_: copies.clear(), always_call=True)


def _materialise(built: nn.Module, model: ModelSpec, world: World) -> None:
    """Give every parameter storage on the device; buffers keep their values, ties stay ties."""
    buffers = {name: buffer.clone() for name, buffer in built.named_buffers()}
    built.to_empty(device=world.device)
    for name, buffer in built.named_buffers():
        buffer.copy_(buffers[name])
    for tensor in model.tensors:
        if tensor.tied_to is not None:
            module, _, name = tensor.name.rpartition(".")
            owner = built.get_parameter(tensor.tied_to)
            setattr(owner, TIED, tensor.tied_to)
            built.get_submodule(module)._parameters[name] = owner


def _fill(built: nn.Module, model: ModelSpec, layout: Layout, world: World, fill: Filler) -> None:
    for tensor in model.parameters:
        held = split(tensor, Role.STATE, layout)  # what the optimizer updates is cut as its state is
        with torch.no_grad():
            fill(tensor, held, world.rank, local(built.get_parameter(tensor.name)))
    for tensor in model.buffers:
        fill(tensor, split(tensor, Role.STATE, layout), world.rank, built.get_buffer(tensor.name))


def _replicate(built: nn.Module, model: ModelSpec, policy: Policy, world: World) -> DistributedDataParallel:
    """DDP over data and context. The graph is static where torch allows to say so: not with accumulation, which skips reductions."""
    replicated = DistributedDataParallel(
        built,
        process_group=world.group(COPY_AXES),
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        forward_sync_buffers=False,  # rotary frequencies are constants
        init_sync=False,  # every rank has filled the same weights
        bucket_cap_mb=DDP_BUCKET_BYTES // 2**20,
        gradient_as_bucket_view=True,
        static_graph=policy.grad_accum == 1 and policy.recompute == "none",
    )
    _settle(replicated, model, policy, world)
    return replicated


def _settle(replicated: DistributedDataParallel, model: ModelSpec, policy: Policy, world: World) -> None:
    """Let DDP rebuild its buckets now, on a few tokens that count for nothing.

    It orders them anew after the first backward passes it sees, and the order decides how sums are rounded: a resumed run, which would start
    with the first order again, would not continue an undisturbed one bit by bit. A static graph is known after two passes, and the new order
    is taken up by the third forward.
    """
    # As many sequences as a micro-batch has, and another number of tokens: what is compiled for them serves any length.
    length = (policy.micro_batch + 1) * world.layout.seq_multiple
    sample = Samples(np.zeros(length + 1, np.int32), np.ones(length + 1, bool), np.array([[0, length + 1]]), length, length, pad_id=0)
    micro = collate(sample, [(0,)] * policy.micro_batch, world.share).to(world.device)
    for _ in range(3):
        weighted_loss(replicated, micro, model, world, weight=0.0).backward()
    replicated.zero_grad(set_to_none=False)


def check(built: nn.Module, model: ModelSpec, layout: Layout, precision: Precision, world: World) -> None:
    """Compare every parameter with the plan: all named, none left over, local shape, placement and dtype as `split` says, and trained or not. Raises
    Drift."""
    found = dict(built.named_parameters(remove_duplicate=True))
    expected = {tensor.name: tensor for tensor in model.parameters}
    problems = [Problem(f"{name} is in the model and not in the plan", f"rank {world.rank}") for name in found.keys() - expected.keys()]
    problems += [Problem(f"{name} is in the plan and not in the model", f"rank {world.rank}") for name in expected.keys() - found.keys()]
    for name in sorted(found.keys() & expected.keys()):
        held = split(expected[name], Role.STATE, layout)
        wanted = (held.local_shape(world.rank), _placements(held, layout), torch_dtype(precision.weight), expected[name].trained)
        built_as = (tuple(local(found[name]).shape), _placements_of(found[name]), found[name].dtype, found[name].requires_grad)
        if wanted != built_as:
            problems.append(Problem(f"{held}: planned {wanted}, built {built_as}", f"rank {world.rank}"))
    if problems:
        raise Drift(*problems)


def _placements(held: Split, layout: Layout) -> tuple[str, ...]:
    """The placements, by name, of what fully_shard cuts of a tensor: over data and context, of the part that the other axes leave to this rank."""
    if not layout.cuts_state:
        return ()
    copies = ("Replicate",) if layout.mesh.dp_replicate > 1 else ()
    position, _ = sharding_of(held.tensor, Role.STATE, layout)
    return (*copies, f"Shard({position})")


def _placements_of(parameter: torch.Tensor) -> tuple[str, ...]:
    if not isinstance(parameter, DTensor):
        return ()
    return tuple("Replicate" if isinstance(p, Replicate) else f"Shard({p.dim})" if isinstance(p, Shard) else repr(p) for p in parameter.placements)


def parameters_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters, frozen ones too, by Hugging Face name, whatever wraps the module."""
    return dict(unwrapped(module).named_parameters())


def unwrapped(module: nn.Module) -> nn.Module:
    """What DDP may stand around."""
    return module.module if isinstance(module, DistributedDataParallel) else module
