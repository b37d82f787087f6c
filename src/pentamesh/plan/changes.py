"""What would make a job fit: each change really tried, the smallest that works of each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pentamesh.cost.holding import Holding, resting
from pentamesh.cost.needs import BEST_FIRST, Verdict
from pentamesh.cost.predict import Prediction, predict
from pentamesh.errors import InputError
from pentamesh.job.device import gpus
from pentamesh.job.hardware import Hardware
from pentamesh.job.job import Job
from pentamesh.job.precision import PRECISIONS
from pentamesh.layout.mesh import SHARDS, Layout
from pentamesh.model.spec import ModelSpec
from pentamesh.plan.candidates import layouts, policies
from pentamesh.units import format_bytes

__all__ = ["changes_that_fit"]

# More than this many nodes is no small change.
MAX_NODES = 128
# GPUs that a usual node can take.
GPUS_A_NODE = 8
SHORTEST = 512


def changes_that_fit(job: Job, model: ModelSpec, hardware: Hardware, found: Sequence[Prediction]) -> tuple[str, ...]:
    """Sentences, each a change after which the job fits or nearly does (which it says). A shorter sequence or a smaller micro-batch only where
    the states themselves fit."""
    asked = _Asked(model, hardware)
    smallest = min(found, key=lambda p: p.memory.peak_bytes.high)
    framework = smallest.memory.parts_bytes["framework"]
    states_fit = min(p.memory.states_bytes for p in found) + framework < hardware.device.usable_bytes
    tries: list[Iterator[str]] = [_layout(job, asked), _expert(job, asked), _precision(job, asked), _method(job, asked)]
    if states_fit:
        tries.append(_length(job, asked))
    if hardware.device.kind == "cuda":
        tries += [_more(job, asked), _bigger(hardware, smallest)]
    return tuple(sentence for one in tries for sentence in one)


class _Asked:
    """A model on a machine, to be tried with other jobs and other machines."""

    def __init__(self, model: ModelSpec, hardware: Hardware) -> None:
        self.model, self.hardware = model, hardware

    def verdict(self, job: Job, hardware: Hardware | None = None) -> Verdict:
        """The verdict of the layout that holds least, or of context inside a node and of parted experts where that is not enough and the plan would
        try it; the global batch is rounded up to what the ranks divide."""
        hardware = hardware or self.hardware
        ranks = job.batch.micro_batch * hardware.num_devices
        rounded = job.batch.model_copy(update={"global_batch": -(-job.batch.global_batch // ranks) * ranks})
        job = job.model_copy(update={"batch": rounded})
        try:
            able = sorted(layouts(job, self.model, hardware), key=lambda layout: (-SHARDS.index(layout.shard), -layout.mesh.dp_shard))
        except InputError:
            return "does_not_fit"
        # What is cut most holds least; under adapters it may gather more than cutting saves.
        tried = able if job.method in ("lora", "qlora") else [*able[:1], *self._cut_along_sequences(job, hardware), *self._parted(job, hardware)]
        found = [self._judge(job, layout, hardware) for layout in tried]
        return next(verdict for verdict in BEST_FIRST if verdict in found)

    def _cut_along_sequences(self, job: Job, hardware: Hardware) -> list[Layout]:
        """The highest context degree, in every way, where the plan may choose one."""
        if not self.model.is_described or job.layout.context is not None:
            return []
        able = [one for one in layouts(job, self.model, hardware, ("context",)) if one.mesh.cp > 1 and one.shard == "parameters"]
        most = max((one.mesh.cp for one in able), default=1)
        return [one for one in able if one.mesh.cp == most]

    def _parted(self, job: Job, hardware: Hardware) -> list[Layout]:
        """Full shard with experts parted, by every degree that the plan may choose."""
        if self.model.experts is None or job.layout.expert is not None:
            return []
        axes = (("expert",), ("expert", "nodes")) if hardware.num_nodes > 1 else (("expert",),)
        return [one for some in axes for one in layouts(job, self.model, hardware, some) if one.mesh.ep > 1 and one.shard == "parameters"]

    def _judge(self, job: Job, layout: Layout, hardware: Hardware) -> Verdict:
        """Where what rests is too much already, nobody asks for what passes through."""
        held, precision = Holding(self.model, layout, job.method), PRECISIONS[job.precision]
        rests = max(sum(resting(held, precision, stage).values()) for stage in range(layout.mesh.pp))
        if rests > hardware.device.usable_bytes:
            return "does_not_fit"
        return predict(held, next(policies(layout, job, self.model, lean=True)), precision, job.batch, hardware).verdict

    def tried(self, job: Job, sentence: str, hardware: Hardware | None = None) -> Iterator[str]:
        """The sentence when the change works, with a word where it is at the edge."""
        found = self.verdict(job, hardware)
        if found != "does_not_fit":
            yield sentence + (" (at risk: at the edge of memory)" if found == "at_risk" else "")

    def tried_shorter(self, job: Job, sentence: str) -> Iterator[str]:
        """As `tried`, and where the change is not enough, together with the longest sequence that halving leaves and that fits."""
        if found := list(self.tried(job, sentence)):
            yield from found
        else:
            yield from self.shortened(job, f"{sentence}, together with ")

    def shortened(self, job: Job, before: str = "") -> Iterator[str]:
        """The longest sequence that halving leaves and that fits."""
        length = job.batch.seq_len // 2
        while length >= SHORTEST:
            batch = job.batch.model_copy(update={"seq_len": length})
            if found := list(self.tried(job.model_copy(update={"batch": batch}), f"{before}seq_len = {length}")):
                yield from found
                return
            length //= 2


def _layout(job: Job, asked: _Asked) -> Iterator[str]:
    """What the request itself rules out."""
    free = job.layout
    if free.activation_checkpointing == "none":
        free = free.model_copy(update={"activation_checkpointing": "auto"})
        yield from asked.tried(job.model_copy(update={"layout": free}), "activation checkpointing (layout.activation_checkpointing: full)")
    if job.layout.shard not in ("auto", "parameters") and asked.hardware.num_devices > 1:
        whole = free.model_copy(update={"shard": "parameters", "replicate": None})
        yield from asked.tried(job.model_copy(update={"layout": whole}), "full shard (layout.shard: parameters)")
    if (job.layout.replicate or 1) > 1:
        whole = free.model_copy(update={"replicate": None})
        yield from asked.tried(job.model_copy(update={"layout": whole}), "one copy cut over all ranks (layout.replicate left out)")


def _precision(job: Job, asked: _Asked) -> Iterator[str]:
    if job.precision != "bf16-pure" and job.method in ("full", "pretrain"):
        sentence = "precision: bf16-pure (bf16 weights, gradients and states with stochastic rounding: 8 bytes a parameter instead of 16)"
        yield from asked.tried_shorter(job.model_copy(update={"precision": "bf16-pure"}), sentence)
    if job.precision == "fp32":
        yield from asked.tried(job.model_copy(update={"precision": "bf16"}), "precision: bf16 (activations half as large)")


def _method(job: Job, asked: _Asked) -> Iterator[str]:
    """Adapters in place of full fine-tuning; pre-training has no base to adapt, and adapters freeze all of it."""
    if job.training.freeze:
        return
    if job.method == "full":
        yield from asked.tried_shorter(
            job.model_copy(update={"method": "lora"}), "method: lora (a frozen base of 2 bytes a parameter, adapters beside it)"
        )
    if job.method in ("full", "lora"):
        yield from asked.tried_shorter(job.model_copy(update={"method": "qlora"}), "method: qlora (a 4-bit base, about 0.52 bytes a parameter)")


def _length(job: Job, asked: _Asked) -> Iterator[str]:
    """The states fit: what passes through is too much."""
    if asked.hardware.device.kind == "cuda" and not job.layout.activation_offload:
        layout = job.layout.model_copy(update={"activation_offload": True, "activation_checkpointing": "full"})
        sentence = "layout.activation_offload: true (inputs of recomputed blocks wait in host memory)"
        yield from asked.tried(job.model_copy(update={"layout": layout}), sentence)
    yield from _context(job, asked)
    if job.batch.micro_batch > 1:
        batch = job.batch.model_copy(update={"micro_batch": 1})
        yield from asked.tried(job.model_copy(update={"batch": batch}), "micro_batch = 1, with more accumulation")
    yield from asked.shortened(job)


def _context(job: Job, asked: _Asked) -> Iterator[str]:
    """The smallest context degree inside a node, where the job names none."""
    if job.layout.context is not None:
        return
    free = job.layout.model_copy(update={"data": None, "replicate": None})
    for degree in (2**i for i in range(1, asked.hardware.devices_per_node.bit_length())):
        layout = free.model_copy(update={"context": degree})
        found = list(asked.tried(job.model_copy(update={"layout": layout}), f"layout.context: {degree} (each sequence cut over {degree} GPUs)"))
        if found:
            yield from found
            return


def _expert(job: Job, asked: _Asked) -> Iterator[str]:
    """Fewer experts on each GPU, where the job says of how many."""
    experts, given = asked.model.experts, job.layout.expert
    if experts is None or given is None:
        return
    degrees = (n for n in range(given + 1, asked.hardware.num_devices + 1) if experts.count % n == 0)
    for degree in degrees:
        layout = job.layout.model_copy(update={"expert": degree})
        found = list(asked.tried(job.model_copy(update={"layout": layout}), f"layout.expert: {degree} (the experts of a layer over {degree} GPUs)"))
        if found:
            yield from found
            return


def _more(job: Job, asked: _Asked) -> Iterator[str]:
    """The smallest number of GPUs of this kind: more in the node, then more nodes."""
    hardware = asked.hardware
    layout = job.layout.model_copy(update={"data": None, "replicate": None})
    if layout.shard != "auto":
        layout = layout.model_copy(update={"shard": "parameters"})
    free = job.model_copy(update={"layout": layout})
    per_node = max(hardware.devices_per_node, GPUS_A_NODE)

    def node(count: int) -> Hardware:
        return replace(hardware, devices_per_node=count)

    def nodes(count: int) -> Hardware:
        return replace(hardware, num_nodes=count, devices_per_node=per_node)

    if hardware.num_nodes == 1 and hardware.devices_per_node < per_node:
        count = _smallest(lambda n: asked.verdict(free, node(n)) != "does_not_fit", hardware.devices_per_node, per_node)
        if count:
            yield from asked.tried(free, f"{count} x {hardware.device.name} in one node, with what is held cut over them", node(count))
            return
    count = _smallest(lambda n: asked.verdict(free, nodes(n)) != "does_not_fit", hardware.num_nodes, MAX_NODES)
    if count:
        gpus = f"{count} nodes of {per_node} x {hardware.device.name} ({count * per_node} GPUs), with what is held cut over all"
        yield from asked.tried(free, gpus, nodes(count))


def _smallest(works: Callable[[int], bool], fails: int, limit: int) -> int | None:
    """The smallest number above `fails` that works, by doubling and then halving; None up to `limit`."""
    low, high = fails, fails
    while high < limit:
        low, high = high, min(2 * high, limit)
        if works(high):
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if works(middle) else (middle, high)
            return high
    return None


def _bigger(hardware: Hardware, smallest: Prediction) -> Iterator[str]:
    """The smallest GPU of the catalogue that holds the leanest candidate: what a rank needs does not depend on the GPU."""
    devices = sorted((gpu for gpu in gpus() if _maker(gpu.name) == _maker(hardware.device.name)), key=lambda d: d.usable_bytes)
    peak = smallest.memory.peak_bytes.high
    bigger = next((d for d in devices if d.usable_bytes >= peak and d.usable_bytes > hardware.device.usable_bytes), None)
    if bigger:
        yield f"{hardware.num_devices} x {bigger.name} ({format_bytes(bigger.usable_bytes)} usable each)"


def _maker(name: str) -> str:
    """Whose GPU it is, by the catalogue's names: a job for one maker's stack is no small change away from another's."""
    return next((maker for prefix, maker in (("MI", "AMD"), ("Gaudi", "Intel")) if name.startswith(prefix)), "NVIDIA")
