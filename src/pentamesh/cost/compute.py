"""Seconds that a device computes: matmuls and attention against its peak, everything else against its memory, and a floor of launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from pentamesh.cost import activations, saved
from pentamesh.cost.context import copying_bytes
from pentamesh.cost.experts import experts_flop_per_token, imbalance
from pentamesh.cost.holding import Holding, widths
from pentamesh.cost.saved import Saved, local_tokens
from pentamesh.job.device import Device, host_bytes_per_s
from pentamesh.job.job import Batch
from pentamesh.job.precision import ITEMSIZE, Precision
from pentamesh.layout.mesh import DATA_AXES
from pentamesh.layout.policy import Policy, head_piece, scores_at_once
from pentamesh.model.roles import Role
from pentamesh.model.spec import ModelSpec

__all__ = ["Work", "flop_per_token", "offloading_s", "peak_flop_per_s", "tokens_per_step", "work"]


class Efficiency(NamedTuple):
    """Shares of a device's peaks that training reaches.

    matmul      of the dense peak, over the shapes of a training step
    attention   of the dense peak, counting the causal half only
    memory      of the memory's bandwidth, for norms, rotations, activations, loss and optimizer
    launch_s    host time of one eager operation
    rounding    bytes per element that the optimizer reads and writes when it rounds stochastically
    """

    matmul: float
    attention: float
    memory: float
    launch_s: float
    rounding: float


EFFICIENCY = {
    # Best shapes reach 0.73-0.80 of the bf16 peak (A100, H100, B200; stas00/ml-engineering), sustained ones 0.55 (GB200, Azure). Attention:
    # FlashAttention-2, 180 of 312 TFLOP/s on A100, 328 of 989 on H100. Memory: BabelStream 0.86-0.95. Launch: 5-10 us an eager operation.
    # Rounding: counted, operand by operand.
    "cuda": Efficiency(matmul=0.62, attention=0.35, memory=0.85, launch_s=6e-6, rounding=354),
    # A two-process 135 M fine-tune on two cores ran at 0.77 of the fp32 GEMM peak, 0.56 of the bf16 one. Rounding: 5.5 ns an element and core.
    "cpu": Efficiency(matmul=0.75, attention=0.3, memory=0.7, launch_s=5e-6, rounding=154),
}
# Reads and writes per byte that autograd saves, eager kernels, forward and backward together, a third of them forward: counted, operation by
# operation, for a block of Llama 3.1 8B in bfloat16 (norms 108 bytes an element, MLP 32, rotation 44, sums 12). Fewer are saved than are moved.
TRAFFIC_PER_SAVED_BYTE = 12
# Bytes per logit that the loss reads and writes, in seven passes: cast, largest, difference, exponential, sum, product, cast back.
TRAFFIC_PER_LOGIT = 48
# Of a score that attention computes with a window or a cap, forward and backward: FLOP per element of a head in seven products (two forward), and
# bytes that are read and written by these, casts, masks, sums and exponentials in float32: counted, operation by operation.
FLOP_PER_SCORE = 14
TRAFFIC_PER_SCORE = {"plain": 162, "capped": 230}
# Bytes per element of the head's gradient to which a piece adds its part: that written and read, the sum read and written.
TRAFFIC_PER_ADDED = 12
# Eager operations of a block of this family: norms 12, attention 18, MLP 5, residuals 2, casts; twice as many in backward.
OPERATIONS_PER_BLOCK = 45
# More of a sparse one: the router 8, counting and ordering what it chose 12, sending it out and home 10, weights of rows 6.
OPERATIONS_PER_ROUTING = 36
FORWARD, BACKWARD = 1 / 3, 2 / 3
# Host time of a block's forward, and of its recomputation in backward, in forwards of one that is not checkpointed: saved-tensor hooks, and for
# `selective` a dispatch mode around every operation. Measured on blocks of eight tokens, 430 us without.
HOST = {"none": (1.0, 0.0), "selective": (4.2, 4.3), "full": (1.7, 2.1)}


class Work(NamedTuple):
    """Seconds of one rank: forward and backward of one micro-batch, and the optimizer once a step; and, of that forward, attention of one layer
    with how many are alike."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    attention: tuple[tuple[float, int], ...] = ()


def flop_per_token(held: Holding, seq_len: int) -> float:
    """Model FLOP that the method needs per token: 6 per matmul parameter and 12 L s a d, or under adapters 4 and the same attention.

    A frozen weight has no gradient: its third of the work falls away, and adapters add their own 6; below everything that is trained there is
    no backward. Source: PaLM (arXiv 2204.02311) appendix B; QLoRA (arXiv 2305.14314).
    """
    whole = held.model.flop_per_token(seq_len)
    if not held.is_adapted:
        attention, share = held.model.attention_flop_per_token(seq_len), _goes_back(held.model)
        head = 6 * _head_numel(held.model)
        return whole - BACKWARD * ((whole - attention - head) * (1 - share.blocks) + head * (1 - share.head) + attention * (1 - share.layers))
    trained = sum(t.numel for u in held.trained_units for t in u.tensors for _ in range(u.count))
    return whole - 2 * held.model.matmul_parameters + 6 * trained


class _Share(NamedTuple):
    """Of a backward in which everything is trained, what there is: of the blocks' matmuls, of their layers, and of the head."""

    blocks: float
    layers: float
    head: float


@lru_cache(maxsize=64)
def _goes_back(model: ModelSpec) -> _Share:
    """A matmul's backward is the gradient of its input, where anything before it is trained, and that of its weight, where that is."""
    if model.num_trained_parameters == model.num_parameters:
        return _Share(1.0, 1.0, 1.0)
    places = {t.name: place for place, t in enumerate(model.parameters)}
    whole, there = Counter[bool](), Counter[bool]()
    for t in model.tensors:
        if t.kind == "matmul":
            passes = model.first_trained < places.get(t.name, len(places))  # a tied head reads the stream last of all
            whole[bool(t.unit)] += 2 * t.met_numel
            there[bool(t.unit)] += (passes + t.trained) * t.met_numel
    blocks = [unit for unit in model.kinds if not unit.is_root]
    layers = sum(u.count for u in blocks if u.reached) / max(1, sum(u.count for u in blocks))
    return _Share(there[True] / max(1, whole[True]), layers, there[False] / max(1, whole[False]))


def _head_numel(model: ModelSpec) -> int:
    return sum(t.met_numel for t in model.tensors if t.kind == "matmul" and not t.unit)


def peak_flop_per_s(device: Device, precision: Precision) -> float:
    """Dense peak of the device in the compute dtype; that of float32 where it knows no narrower one."""
    return device.flop_per_s.get(precision.compute) or device.flop_per_s["float32"]


def work(held: Holding, policy: Policy, precision: Precision, batch: Batch, device: Device) -> Work:
    """Seconds of the busiest rank. Recompute adds a forward to every backward, of the blocks only, and `selective` none of their matmuls."""
    dear_s, cheap_s = _blocks_s(held, precision, batch.micro_batch, batch.seq_len, device)
    head_s = _head_s(held, precision, batch.micro_batch, batch.seq_len, device)
    operations = held.stage_num_layers(0) * OPERATIONS_PER_BLOCK + held.stage_kinds(0)[True] * OPERATIONS_PER_ROUTING
    launch_s = operations * EFFICIENCY[device.kind].launch_s
    forward, again = (times * launch_s for times in HOST[policy.recompute])
    forward_s = max((dear_s + cheap_s + head_s) * FORWARD, forward)
    repeated_s = {"none": 0.0, "selective": cheap_s, "full": dear_s + cheap_s}[policy.recompute]
    share = _goes_back(held.model)
    backward_s = max((dear_s * share.blocks + cheap_s * share.layers + head_s * share.head) * BACKWARD, 2 * launch_s * share.layers)
    backward_s += max(repeated_s * FORWARD, again) * share.layers
    carried_s = offloading_s(held, policy, precision, batch, device)
    return Work(forward_s + carried_s, backward_s + carried_s, _optimizer_s(held, precision, device), _attentions(held, precision, batch, device))


def _attentions(held: Holding, precision: Precision, batch: Batch, device: Device) -> tuple[tuple[float, int], ...]:
    """The forward of attention of one layer, whatever its rank on the context axis (what each attends to is even), and how many layers are alike."""
    tokens = local_tokens(held.layout, batch.micro_batch, batch.seq_len) / held.layout.mesh.tp
    found = _attention_s(held, batch.micro_batch, batch.seq_len, peak_flop_per_s(device, precision), device)
    return tuple((tokens * of_token * FORWARD, count) for of_token, count in found)


def offloading_s(held: Holding, policy: Policy, precision: Precision, batch: Batch, device: Device) -> float:
    """Copying a stage's block inputs of one micro-batch to the host, or back. Nothing hides it: copies share the stream that computes.

    Source: torch.autograd.graph.save_on_cpu.
    """
    if not policy.offload or device.kind == "cpu":
        return 0.0
    return _listed_bytes(held, activations.kept, batch.micro_batch, batch.seq_len, precision.compute, policy.recompute) / host_bytes_per_s(device)


def _listed_bytes(held: Holding, listed: Callable[..., tuple[Saved, ...]], *asked: object) -> int:
    """What a function of `activations` lists of the blocks of a stage."""
    kinds = held.stage_kinds(0).items()
    found = sum((saved.held(listed, held.model, held.layout, *asked, sparse=sparse) * count for sparse, count in kinds), saved.Amount())
    return round(found.at(1.0))


@lru_cache(maxsize=256)
def _blocks_s(held: Holding, precision: Precision, micro_batch: int, seq_len: int, device: Device) -> tuple[float, float]:
    """Forward and backward of a stage's blocks: matmuls and causal attention, and apart from them the traffic of everything else."""
    mesh, model, reach = held.layout.mesh, held.model, EFFICIENCY[device.kind]
    tokens = local_tokens(held.layout, micro_batch, seq_len) / mesh.tp
    share, layers = held.stage_num_layers(0) / model.num_layers, held.stage_num_layers(0)
    whole = flop_per_token(held, seq_len) if held.is_adapted else model.flop_per_token(seq_len)
    matmul = whole - model.attention_flop_per_token(seq_len) - 6 * _head_numel(model) - experts_flop_per_token(model) * _updated(held)
    peak, bytes_per_s = peak_flop_per_s(device, precision), device.memory_bytes_per_s * reach.memory
    attention_s = sum(of_layer * count for of_layer, count in _attention_s(held, micro_batch, seq_len, peak, device))
    dear_s = tokens * share * (matmul / reach.matmul / peak + attention_s) + _experts_s(held, tokens, precision, device)
    shape = (micro_batch, seq_len, precision.compute)
    meeting_s = copying_bytes(model, held.layout, *shape) * layers / bytes_per_s
    return dear_s + meeting_s, TRAFFIC_PER_SAVED_BYTE * _listed_bytes(held, activations.block, *shape) / bytes_per_s


def _updated(held: Holding) -> float:
    """Of the three products with an expert's matrix, the share that the method needs: under adapters it has no gradient."""
    return FORWARD * 2 if held.is_adapted else 1.0


def _experts_s(held: Holding, tokens: float, precision: Precision, device: Device) -> float:
    """Experts of the rank that most rows come to, forward and backward. Where few come to each they wait for its matrices, all of which are read
    forward and backward, and whose gradients are written: as for any matmul the larger of the two, its arithmetic and its traffic."""
    model, reach = held.model, EFFICIENCY[device.kind]
    if model.experts is None:
        return 0.0
    sparse = held.stage_kinds(0)[True]
    flop = tokens * experts_flop_per_token(model) * sparse / len(model.experts.layers) * imbalance(model, held.layout).expected
    traffic = 3 * ITEMSIZE[precision.compute] * held.experts_numel * sparse
    flop, traffic = flop * _updated(held), traffic * _updated(held)
    return max(flop / reach.matmul / peak_flop_per_s(device, precision), traffic / (device.memory_bytes_per_s * reach.memory))


def _attention_s(held: Holding, micro_batch: int, seq_len: int, peak: float, device: Device) -> list[tuple[float, int]]:
    """Attention of one token in one layer, forward and backward, and how many layers are alike; of a model of no described family in all at once."""
    model, reach = held.model, EFFICIENCY[device.kind]
    if not model.is_described:
        return [(model.attention_flop_per_token(seq_len) / 2 / reach.attention / peak, 1)]
    windows = Counter(window if window and window < seq_len else None for window in model.windows or (None,) * model.num_layers)
    return [(_layer_attention_s(held, micro_batch, seq_len, window, peak, device), count) for window, count in windows.items()]


def _layer_attention_s(held: Holding, micro_batch: int, seq_len: int, window: int | None, peak: float, device: Device) -> float:
    """By fused kernels the causal half of what a token attends to, with a window or a cap every score of pentamesh.run.attention, which is written
    and read."""
    model, reach = held.model, EFFICIENCY[device.kind]
    each = (model.head_dim + model.given_dim) / 2  # elements of a query and of what it sees, their mean
    if not window and not model.score_cap:
        return 12 * seq_len * model.num_heads * each / 2 / reach.attention / peak
    heads = micro_batch * -(-model.num_heads // held.layout.mesh.tp)
    scores = model.num_heads * scores_at_once(heads, seq_len, window, device.kind)[1] / (1 if window else 2)
    traffic = TRAFFIC_PER_SCORE["capped" if model.score_cap else "plain"] * scores
    return FLOP_PER_SCORE * each * scores / reach.matmul / peak + traffic / (device.memory_bytes_per_s * reach.memory)


@lru_cache(maxsize=256)
def _head_s(held: Holding, precision: Precision, micro_batch: int, seq_len: int, device: Device) -> float:
    """Forward and backward of the head and the loss."""
    reach, tokens = EFFICIENCY[device.kind], local_tokens(held.layout, micro_batch, seq_len)
    logits = tokens * held.model.vocab / held.layout.mesh.tp
    flop = 6 * held.head_numel * tokens
    pieces = -(-tokens // head_piece(tokens, held.model.vocab, held.layout.mesh.tp, device.kind))
    # Whole logits of an undescribed model, and a frozen head, add nothing up.
    added = TRAFFIC_PER_ADDED * held.head_numel * pieces if pieces > 1 and held.model.is_described and held.trains_head else 0
    return flop / (peak_flop_per_s(device, precision) * reach.matmul) + (TRAFFIC_PER_LOGIT * logits + added) / (
        device.memory_bytes_per_s * reach.memory
    )


def _optimizer_s(held: Holding, precision: Precision, device: Device) -> float:
    """AdamW reads gradient, weight and state and writes weight and state: bound by memory. Stochastic rounding is not fused."""
    width = widths(precision, held.layout, held.method)
    updated = held.stage_numel(Role.STATE, 0, trained=True)
    if precision.stochastic_rounding:
        return updated * EFFICIENCY[device.kind].rounding / (device.memory_bytes_per_s * EFFICIENCY[device.kind].memory)
    casts = (ITEMSIZE[precision.weight] + ITEMSIZE[precision.compute]) * updated if precision.weight != precision.compute else 0
    traffic = updated * (2 * width.weight + width.gradient + 2 * width.state) + casts
    return traffic / (device.memory_bytes_per_s * EFFICIENCY[device.kind].memory)


def tokens_per_step(held: Holding, batch: Batch, policy: Policy) -> int:
    """Tokens of one global batch."""
    return batch.micro_batch * batch.seq_len * policy.grad_accum * held.layout.mesh.degree(*DATA_AXES)
