"""Why a layout was chosen and why another was not, in sentences with numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pentamesh.cost.experts import imbalance
from pentamesh.cost.holding import widths
from pentamesh.cost.needs import BEST_FIRST
from pentamesh.cost.predict import Prediction
from pentamesh.job.division import CONTEXT_WAYS
from pentamesh.job.precision import ITEMSIZE
from pentamesh.layout.legal import problems
from pentamesh.layout.mesh import Layout
from pentamesh.layout.stages import stage_layers
from pentamesh.model.roles import Role
from pentamesh.units import format_bytes, format_count, format_seconds

__all__ = ["NAMES", "WAYS", "reasons", "why_not"]

NAMES = {
    "ddp": "DDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "full_shard": "full shard",
    "hybrid_shard": "hybrid shard",
    "multi_axis": "several axes",
}

# How context ranks attend, by the value of `layout.context_attention`.
WAYS = {"ring": "keys passed round a ring", "all_gather": "keys gathered on each", "ulysses": "heads exchanged for tokens"}

# What pre-training over many axes reaches when all is tuned: 38-43% for 405B on 8,192 to 16,384 H100. Source: Llama 3 (arXiv 2407.21783), table 4.
GOOD_MFU = 0.4
# bf16 weights, fp32 gradients, fp32 masters and moments. Source: Megatron-LM, distributed optimizer, "bf16 param, fp32 grads".
MEGATRON_BYTES_A_PARAMETER = 18


def reasons(chosen: Prediction, found: Sequence[Prediction]) -> tuple[str, ...]:
    """Why `chosen` won, the strongest reason first."""
    return (
        *_frozen(chosen),
        *_states(chosen, found),
        *_copies(chosen, found),
        *_stages(chosen),
        *_context(chosen, found),
        *_experts(chosen, found),
        *_recompute(chosen, found),
        *_offload(chosen),
        *_async_tensor(chosen),
        *_speed(chosen),
        *_communication(chosen),
        *_machinery(chosen, found),
        *_balance(chosen),
        *_uncertain(chosen),
    )


def why_not(p: Prediction, chosen: Prediction) -> str:
    """What one candidate lost by."""
    usable, peak = p.memory.usable_bytes, p.memory.peak_bytes
    if p.verdict == "does_not_fit":
        if p.memory.host_usable_bytes is not None and p.memory.host_bytes > p.memory.host_usable_bytes:
            host = format_bytes(p.memory.host_usable_bytes)
            return f"lets {format_bytes(p.memory.host_bytes)} a {_rank(p)} wait in host memory; {host} are usable"
        if p.memory.states_bytes > usable:
            return f"weights, gradients and optimizer alone are {format_bytes(p.memory.states_bytes)} a {_rank(p)}; {format_bytes(usable)} are usable"
        return f"needs {format_bytes(peak.expected)} a {_rank(p)}; {format_bytes(usable)} are usable"
    if p.verdict == "at_risk" and chosen.verdict == "fits":
        return f"may need {format_bytes(peak.high)} a {_rank(p)}; {format_bytes(usable)} are usable"
    slower = p.time.step_s.expected / chosen.time.step_s.expected - 1
    if slower > 0.005:
        return f"{slower:.0%} slower: {_waits(p)}"
    if slower < -0.005:
        return f"only {-slower:.0%} faster, and more machinery"
    return "as fast, and more machinery"


def _balance(chosen: Prediction) -> Iterator[str]:
    policy = chosen.policy
    if chosen.held.model.experts is not None:
        by = {
            "none": "nothing keeps the loads of experts even (experts.balance)",
            "loss": f"an auxiliary loss of weight {policy.balance_by:g} keeps the loads of experts even",
            "bias": f"biases that move {policy.balance_by:g} a step keep the loads of experts even",
        }
        yield by[policy.balance]


_RECOMPUTED = {"none": "", "selective": ", norms and activation functions twice", "full": ", blocks twice forward"}


def _rank(p: Prediction) -> str:
    return "GPU" if p.hardware.device.kind == "cuda" else "process"


def _ranks(p: Prediction) -> str:
    return "GPUs" if p.hardware.device.kind == "cuda" else "processes"


def _waits(p: Prediction) -> str:
    exposed = p.time.exposed_communication_s
    if exposed > 0.2 * p.time.step_s.expected:
        return f"{format_seconds(exposed)} a step waiting for communication"
    return f"{format_seconds(p.time.compute_s)} a step computing" + _RECOMPUTED[p.policy.recompute]


def _states(chosen: Prediction, found: Sequence[Prediction]) -> Iterator[str]:
    """Whether one GPU can hold a whole replica, and what cutting it does."""
    layout, memory, one = chosen.held.layout, chosen.memory, f"one {chosen.hardware.device.name}"
    usable, states, strategy = format_bytes(memory.usable_bytes), format_bytes(memory.states_bytes), NAMES[layout.strategy]
    whole = next((p for p in found if p.held.layout.strategy == "ddp"), None)
    cut = f"cut over {layout.mesh.degree('pp', 'dp_shard', 'cp', 'tp')} it is {states}"
    if layout.strategy == "ddp":
        yield _uncut(chosen)
    elif whole is None:
        yield f"weights, gradients and optimizer are {states} a {_rank(chosen)} under {strategy}; {usable} are usable"
    elif whole.memory.states_bytes > memory.usable_bytes:
        replica = f"{_bytes_a_parameter(chosen)} is {format_bytes(whole.memory.states_bytes)} on every {_rank(chosen)} under DDP"
        yield f"{replica}: {usable} of {one} cannot hold it; {cut}"
    elif whole.verdict != "fits":
        yield f"a whole replica under DDP may need {format_bytes(whole.memory.peak_bytes.high)} of the {usable} of {one}; {cut} of states"
    else:
        yield f"a whole replica fits {one}, and {strategy} is faster by the numbers: {cut}"


def _uncut(chosen: Prediction) -> str:
    memory, one = chosen.memory, f"one {chosen.hardware.device.name}"
    states, peak = format_bytes(memory.states_bytes), format_bytes(memory.peak_bytes.expected)
    fit = {"fits": "fit", "at_risk": "may fit", "does_not_fit": "do not fit"}[chosen.verdict]
    said = f"{_bytes_a_parameter(chosen)} is {states} of weights, gradients and optimizer; with activations the {peak} {fit} "
    return said + f"the {format_bytes(memory.usable_bytes)} of {one}" + (": nothing has to be cut" if chosen.verdict == "fits" else "")


def _bytes_a_parameter(p: Prediction) -> str:
    held = p.held
    if held.is_adapted:
        trained = sum(t.numel * u.count for u in held.trained_units for t in u.tensors)
        return f"a frozen base of {format_count(held.model.num_parameters)} parameters and {format_count(trained)} trained ones ({held.method})"
    width = widths(p.precision, held.layout, held.method)
    if held.model.num_trained_parameters < held.model.num_parameters:
        frozen = width.weight + width.state - 2 * ITEMSIZE[p.precision.state]
        return f"{width.weight + width.gradient + width.state} bytes a trained parameter and {frozen} a frozen one ({p.precision.name})"
    return f"{width.weight + width.gradient + width.state} bytes a parameter ({p.precision.name})"


def _frozen(p: Prediction) -> Iterator[str]:
    """What is frozen, and what that spares."""
    model = p.held.model
    if model.num_trained_parameters == model.num_parameters:
        return
    trained = f"{format_count(model.num_trained_parameters)} of {format_count(model.num_parameters)} parameters are trained"
    below = sum(u.count for u in model.kinds if not u.reached)
    spared = f"; the first {below} of {model.num_layers} blocks have no backward and keep no activations" if below else ""
    yield f"{trained}: the others rest as they are, without gradient and optimizer state{spared}"


def _copies(chosen: Prediction, found: Sequence[Prediction]) -> Iterator[str]:
    """Why no copy in every node, where several nodes are cut over."""
    hybrid = [p.memory for p in found if p.held.layout.strategy == "hybrid_shard"]
    if chosen.held.layout.strategy == "full_shard" and hybrid and hybrid[0].states_bytes > chosen.memory.usable_bytes:
        yield f"hybrid shard, with a copy in every node, is {format_bytes(hybrid[0].states_bytes)} a {_rank(chosen)}: it fits none"


def _stages(p: Prediction) -> Iterator[str]:
    """What a pipeline holds and how it fills."""
    held, pp = p.held, p.held.layout.mesh.pp
    if pp == 1:
        return
    layers, micros = stage_layers(held.model.num_layers, pp), p.policy.grad_accum
    if len(set(layers)) > 1:
        counted = " and ".join(f"{layers.count(n)} stages of {n}" for n in dict.fromkeys(layers))
        yield f"{held.model.num_layers} layers do not divide by pipeline = {pp}: {counted}"
    yield f"{micros:,} micro-batches make the bubble of {pp} stages {pp - 1}/{micros} = {(pp - 1) / micros:.2%} of the computing"
    numel = max(held.stage_numel(Role.WEIGHT, stage) for stage in range(pp))
    if p.precision.name == "bf16" and not held.layout.cuts_state:
        kept = format_bytes(MEGATRON_BYTES_A_PARAMETER * numel)
        yield f"the fullest {_rank(p)} holds {format_count(numel)} parameters at 16 bytes; Megatron-LM keeps bf16 weights beside, 18 bytes: {kept}"


def _context(chosen: Prediction, found: Sequence[Prediction]) -> Iterator[str]:
    """How context ranks attend, and what the other ways would take."""
    layout = chosen.held.layout
    if layout.mesh.cp == 1:
        return
    said = f"each sequence is cut over {layout.mesh.cp} {_ranks(chosen)}, with {WAYS[layout.context]}"
    others = [other for way in CONTEXT_WAYS if way != layout.context for other in _other_way(chosen, replace(layout, context=way), found)]
    yield "; ".join((said, *others))


def _other_way(chosen: Prediction, layout: Layout, found: Sequence[Prediction]) -> Iterator[str]:
    """What a layout that differs in how it attends would take, or why it cannot be; nothing where nobody asked."""
    twins = [p for p in found if p.held.layout == layout]
    if wrong := problems(chosen.held.model, layout, chosen.batch):
        yield f"not with {WAYS[layout.context]}: {wrong[0].what}"
    elif twins:
        best = min(twins, key=lambda p: (BEST_FIRST.index(p.verdict), p.time.step_s.expected))
        fits = BEST_FIRST.index(best.verdict) <= BEST_FIRST.index(chosen.verdict)
        takes = (
            f"{format_seconds(best.time.step_s.expected)} a step" if fits else f"up to {format_bytes(best.memory.peak_bytes.high)} a {_rank(best)}"
        )
        yield f"with {WAYS[layout.context]} it takes {takes}"


def _experts(chosen: Prediction, found: Sequence[Prediction]) -> Iterator[str]:
    """How far the experts of a layer are parted, what it would take to gather them all, and what uneven routers would take."""
    model, ep = chosen.held.model, chosen.held.layout.mesh.ep
    if model.experts is None or ep == 1:
        return
    sent = sum(c.bytes_per_rank for c in chosen.communication if (c.axis, c.kind) == ("ep", "all_to_all"))
    said = (
        f"the {model.experts.count} experts of a layer are parted over {ep} {_ranks(chosen)}, {model.experts.count // ep} on each: rows of "
        f"{format_bytes(sent)} a {_rank(chosen)} and step go to them and home"
    )
    yield said + "".join(_whole_experts(chosen, found))
    yield from _unevenness(chosen)


def _whole_experts(chosen: Prediction, found: Sequence[Prediction]) -> Iterator[str]:
    """What the chosen layout would take with all experts on every rank, where that was judged and fits as well."""
    mesh = replace(chosen.held.layout.mesh, ep=1)
    twins = [p for p in found if p.held.layout == replace(chosen.held.layout, mesh=mesh)]
    if not twins:
        return
    best = min(twins, key=lambda p: (BEST_FIRST.index(p.verdict), p.time.step_s.expected if p.verdict == chosen.verdict else 0))
    if BEST_FIRST.index(best.verdict) > BEST_FIRST.index(chosen.verdict):
        yield f"; with all on each it takes up to {format_bytes(best.memory.peak_bytes.high)} a {_rank(best)}"
    else:
        yield f"; with all on each it takes {format_seconds(best.time.step_s.expected)} a step"


def _unevenness(p: Prediction) -> Iterator[str]:
    """What is reckoned with where routers send more rows to some ranks than to others."""
    rows, num_bytes = imbalance(p.held.model, p.held.layout), p.memory.parts_bytes["experts"]
    if not num_bytes:
        return  # when memory is fullest there are no rows
    worst = num_bytes * (rows.high / rows.expected - 1)
    spared = p.memory.peak_bytes.high - worst <= p.memory.usable_bytes < p.memory.peak_bytes.high
    risk = ": only such a router would not fit" if p.verdict == "at_risk" and spared else ""
    yield (
        f"the fullest {_rank(p)} is reckoned to get {rows.expected:g} times the rows of an even share, {format_bytes(num_bytes)}; "
        f"a router that sends it {rows.high:g} times as many would take {format_bytes(worst)} more{risk}"
    )


def _recompute(chosen: Prediction, found: Sequence[Prediction]) -> Iterator[str]:
    twins = [p for p in found if p.held.layout == chosen.held.layout and p.policy.recompute == "none"]
    if not twins or chosen.policy.recompute == "none":
        return
    kept = format_bytes(min(p.memory.peak_bytes.expected for p in twins))
    again = format_bytes(chosen.memory.peak_bytes.expected)
    what = "blocks are" if chosen.policy.recompute == "full" else "blocks but for matmuls and attention are"
    yield f"{what} computed again in backward: with their activations kept a {_rank(chosen)} needs {kept}, with them recomputed {again}"


def _offload(p: Prediction) -> Iterator[str]:
    if p.policy.offload and p.hardware.device.kind == "cpu":
        yield "activation_offload changes nothing on a CPU, whose activations are in host memory already"
    elif p.policy.offload:
        memory = p.memory
        room = f" of {format_bytes(memory.host_usable_bytes)} usable there" if memory.host_usable_bytes else ""
        yield (
            f"inputs of blocks wait for backward in host memory: {format_bytes(memory.host_bytes)} a {_rank(p)}{room}, "
            f"and {format_seconds(p.offloading_s)} a step to copy them there and back"
        )


def _async_tensor(p: Prediction) -> Iterator[str]:
    if p.policy.async_tensor and p.hardware.device.kind == "cpu":
        yield "async_tensor_parallel changes nothing on a CPU, which has no symmetric memory"
    elif p.policy.async_tensor:
        yield "the stream is sent in parts beside the matmuls that use it; the times count it as if they waited, an upper bound"


def _speed(p: Prediction) -> Iterator[str]:
    time = p.time
    yield (
        f"a step takes {format_seconds(time.step_s.expected)} ({format_seconds(time.step_s.low)} to {format_seconds(time.step_s.high)}): "
        f"{format_seconds(time.compute_s)} computing"
        + (f", {format_seconds(time.exposed_communication_s)} waiting for communication" if time.exposed_communication_s else "")
        + (f", {format_seconds(time.bubble_s)} of pipeline bubble" if time.bubble_s else "")
    )
    if _is_several(p) and p.mfu < GOOD_MFU:
        yield f"that is {p.mfu:.0%} MFU; at {GOOD_MFU:.0%} a step would take {time.step_s.expected * p.mfu / GOOD_MFU:,.0f} s"


def _communication(p: Prediction) -> Iterator[str]:
    if not p.communication:
        return
    top = max(p.communication, key=lambda c: c.exposed_s)
    share = top.exposed_s / p.time.step_s.expected
    if share > 0.1:
        yield f"{top.kind} over {top.axis} is {share:.0%} of the step: {format_bytes(top.bytes_per_rank)} a {_rank(p)} through {top.link}"


def _machinery(chosen: Prediction, found: Sequence[Prediction]) -> Iterator[str]:
    """What several axes buy over the data axes alone, or would."""
    several = _is_several(chosen)
    others = [p for p in found if _is_several(p) is not several and p.verdict == chosen.verdict]
    if others and chosen.verdict != "does_not_fit":
        best = min(others, key=lambda p: p.time.step_s.expected)
        more = best.time.step_s.expected / chosen.time.step_s.expected - 1
        which = f"of the data axes alone, {NAMES[best.held.layout.strategy]}" if several else f"with more axes, {best.held.layout.mesh}"
        yield f"{which} takes {format_seconds(best.time.step_s.expected)}, {abs(more):.0%} {'more' if more > 0 else 'less'}"
    if untrained := [name for axis, name in _UNTRAINED.items() if chosen.held.layout.mesh.degree(axis) > 1]:
        yield f"{' and '.join(untrained)} parallel: planned and not trained yet"


_UNTRAINED = {"pp": "pipeline"}


def _is_several(p: Prediction) -> bool:
    return p.held.layout.strategy == "multi_axis"


def _uncertain(p: Prediction) -> Iterator[str]:
    memory = p.memory
    if p.verdict == "at_risk":
        yield (
            f"at risk: {format_bytes(memory.peak_bytes.expected)} expected, up to {format_bytes(memory.peak_bytes.high)}; "
            f"{format_bytes(memory.usable_bytes)} are usable"
        )
    if p.held.model.max_positions and p.batch.seq_len > p.held.model.max_positions:
        yield f"seq_len = {p.batch.seq_len} is beyond the {p.held.model.max_positions} positions this model was trained for"
    if p.policy.compile:
        yield "compiled blocks need less time and memory than this: fused kernels are planned as eager ones, an upper bound"
    if p.held.is_adapted:
        yield "adapters are planned at rank 16 on every projection of every block, with activations as in full training (an upper bound)"
