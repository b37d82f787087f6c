"""Keys that are each right and together impossible: what cannot be planned, and what cannot be trained yet."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple, get_args

from pentamesh.job.division import ContextWay, divisors, uneven_batch, uneven_sequence
from pentamesh.job.hardware import Hardware
from pentamesh.job.job import Job, RowField
from pentamesh.job.repository import HOW, is_repository

__all__ = ["Conflict", "impossible", "untrainable"]


class Conflict(NamedTuple):
    """What does not go together: the keys, the first of them where it is to be mended."""

    keys: tuple[str, ...]
    what: str
    hint: str


def impossible(job: Job, hardware: Hardware | None) -> Iterator[Conflict]:
    """What can never run as it was written. `hardware` is None where it is this machine, or is itself wrong."""
    yield from _new_tokens(job)
    yield from _length(job)
    yield from _frozen(job)
    yield from _pushed(job)
    yield from _batch(job)
    yield from _optimizer(job)
    yield from _sources(job)
    yield from _columns(job)
    yield from _held_out(job)
    yield from _kept(job)
    yield from _streaming(job)
    yield from _sharding(job)
    yield from _offload(job)
    yield from _sequence(job)
    yield from _balance(job)
    yield from _dispatch(job)
    if hardware is not None:
        yield from _devices(job, hardware)


def _length(job: Job) -> Iterator[Conflict]:
    training, optimizer = job.training, job.optimizer
    if training.steps is not None and training.epochs is not None:
        what = f"steps = {training.steps} and epochs = {training.epochs:g} both say how long to train"
        yield Conflict(("training.epochs", "training.steps"), what, "keep one of them")
    if training.steps is not None and optimizer.warmup_steps > training.steps:
        what = f"warmup_steps = {optimizer.warmup_steps} is more than steps = {training.steps}"
        yield Conflict(("optimizer.warmup_steps", "training.steps"), what, f"use warmup_steps = {training.steps // 10} or train longer")


def _new_tokens(job: Job) -> Iterator[Conflict]:
    tokens = job.model.new_tokens
    for token in dict.fromkeys(tokens):
        if (count := tokens.count(token)) > 1:
            yield Conflict(("model.new_tokens",), f"{token!r} is {count} times among new_tokens", "name it once")
        if not token.strip():
            yield Conflict(("model.new_tokens",), f"{token!r} is white space alone, which text would be split at", "leave it out")


def _frozen(job: Job) -> Iterator[Conflict]:
    if job.training.freeze and job.method in ("lora", "qlora"):
        what = f"freeze with method = {job.method}, which freezes every weight of the model and trains adapters"
        yield Conflict(("training.freeze", "method"), what, "leave freeze out, or use method: full")


def _pushed(job: Job) -> Iterator[Conflict]:
    kept = job.checkpoint
    if kept.push_to_hub is None:
        if not kept.private:
            yield Conflict(("checkpoint.private", "checkpoint.push_to_hub"), "private = false and nothing is pushed", "add push_to_hub: org/name")
        return
    if not is_repository(kept.push_to_hub):
        yield Conflict(("checkpoint.push_to_hub",), f"{kept.push_to_hub!r} is no name of a repository on the hub", HOW)
    if not kept.export:
        what = "push_to_hub with export = false: what is pushed is the exported folder"
        yield Conflict(("checkpoint.push_to_hub", "checkpoint.export"), what, "leave export out, or push_to_hub")


def _batch(job: Job) -> Iterator[Conflict]:
    data = job.layout.data or 1
    if found := uneven_batch(job.batch.global_batch, job.batch.micro_batch, data):
        keys = ("batch.global_batch", "batch.micro_batch", *(["layout.data"] if data > 1 else []))
        yield Conflict(keys, found.what, found.hint)
    if job.batch.packing and job.batch.group_by_length:
        what = "group_by_length with packing, whose sequences are all nearly full"
        yield Conflict(("batch.group_by_length", "batch.packing"), what, "keep one of them")


def _optimizer(job: Job) -> Iterator[Conflict]:
    if job.optimizer.schedule == "constant" and job.optimizer.min_lr_ratio > 0:
        what = f"min_lr_ratio = {job.optimizer.min_lr_ratio:g} and a constant schedule, which never comes down to it"
        yield Conflict(("optimizer.min_lr_ratio", "optimizer.schedule"), what, "leave it out, or use schedule: cosine or linear")


def _sources(job: Job) -> Iterator[Conflict]:
    if job.data.split is not None and isinstance(job.data.train, tuple):
        what = f"split = {job.data.split} beside a list of sources, each of which has its own"
        yield Conflict(("data.split", "data.train"), what, f"give it to its source: `- {{rows: org/name, split: {job.data.split}}}`")


# Who speaks and what is said, in either form of turns.
SPEAKING = (("role", "content"), ("from", "value"))


def _columns(job: Job) -> Iterator[Conflict]:
    """One field of the files under two of our names, which would be read as one of them alone. Of several sources each may have its own fields."""
    columns = job.data.columns
    of_rows = {ours: theirs for ours, theirs in columns.items() if ours in get_args(RowField)}
    of_turns = {ours: theirs for ours, theirs in columns.items() if ours not in of_rows}
    kinds = [{} if isinstance(job.data.train, tuple) else of_rows]
    for pair, other in zip(SPEAKING, SPEAKING[::-1], strict=True):
        if any(key in of_turns for key in pair):
            kinds.append({key: key for key in pair} | {ours: theirs for ours, theirs in of_turns.items() if ours not in other})
    for one, two in (fields for names in kinds for fields in combinations(names.items(), 2)):
        if one[1] == two[1]:
            keys = tuple(f"data.columns.{ours}" for ours, _ in (one, two) if ours in columns)
            what = f"{one[0]} and {two[0]} are both called {one[1]!r}"
            yield Conflict(keys, what, f"say what the files call {two[0] if two[0] not in columns else one[0]}, by data.columns, or leave one out")


def _held_out(job: Job) -> Iterator[Conflict]:
    share = job.data.held_out
    if isinstance(share, float) and not 0 < share < 1:
        what = f"held_out = {share:g} is no share of the training rows"
        yield Conflict(("data.held_out",), what, "a share lies between 0 and 1 (0.05); a file is given by its name")
    if job.training.evaluate_every is not None and share is None:
        what = f"evaluate_every = {job.training.evaluate_every} and no held-out rows to evaluate on"
        yield Conflict(("training.evaluate_every", "data.held_out"), what, "add data.held_out: 0.05, or leave evaluate_every out")


def _kept(job: Job) -> Iterator[Conflict]:
    kept = job.checkpoint
    if kept.keep_best and job.data.held_out is None:
        what = "keep_best and no held-out rows to tell the best by"
        yield Conflict(("checkpoint.keep_best", "data.held_out"), what, "add data.held_out: 0.05, or leave keep_best out")
    if kept.keep_every is None:
        return
    if kept.every is None:
        what = f"keep_every = {kept.keep_every} and no `every`: the last step alone is saved"
        yield Conflict(("checkpoint.keep_every", "checkpoint.every"), what, f"add checkpoint.every: {kept.keep_every}, or leave keep_every out")
    elif kept.keep_every % kept.every:
        what = f"keep_every = {kept.keep_every} is no multiple of every = {kept.every}, the steps that are saved"
        hint = f"use keep_every = {-(-kept.keep_every // kept.every) * kept.every}"
        yield Conflict(("checkpoint.keep_every", "checkpoint.every"), what, hint)


def _streaming(job: Job) -> Iterator[Conflict]:
    """A stream is not counted before it is read, so that nothing can be a share of it."""
    data, how = job.data, "leave data.streaming out, which prepares all rows before the first step"
    if not data.streaming:
        if data.shuffle_rows != type(data).model_fields["shuffle_rows"].default:
            what = f"shuffle_rows = {data.shuffle_rows} without streaming, where rows are shuffled over all of the data"
            yield Conflict(("data.shuffle_rows", "data.streaming"), what, "leave shuffle_rows out, or add data.streaming: true")
        return
    if job.training.epochs is not None:
        what = f"epochs = {job.training.epochs:g} with streaming, where nobody knows how many rows there are before all are read"
        yield Conflict(("training.epochs", "data.streaming"), what, f"give training.steps, or {how}")
    if isinstance(data.held_out, float):
        what = f"held_out = {data.held_out:g} with streaming: a share is drawn from all rows"
        yield Conflict(("data.held_out", "data.streaming"), what, f"name a file or a split of a hub data set in data.held_out, or {how}")
    for name, rows in data.sources.items():
        if rows.weight != 1:
            what = f"weight = {rows.weight:g} of {rows.rows} with streaming, where sources are read one after the other"
            yield Conflict((f"{name.replace('[', '.[')}.weight", "data.streaming"), what, f"leave weight out, or {how}")


def _sharding(job: Job) -> Iterator[Conflict]:
    layout = job.layout
    copies, data = layout.replicate, layout.data
    whole = layout.shard in ("none", "optimizer", "gradients")
    if whole and copies is not None and copies > 1:
        what = f"replicate = {copies} with shard = {layout.shard}, where every data rank holds a copy of the weights already"
        yield Conflict(("layout.replicate", "layout.shard"), what, "use shard: parameters for hybrid shard, or leave replicate out")
    if layout.shard == "none" and (layout.expert or 1) > 1:
        what = f"expert = {layout.expert} with shard = none, where every data rank holds a copy of all experts"
        yield Conflict(("layout.expert", "layout.shard"), what, "use shard: optimizer, gradients or parameters, or leave expert out")
    if copies is not None and data is not None and data % copies:
        what = f"replicate = {copies} does not divide data = {data}"
        yield Conflict(("layout.replicate", "layout.data"), what, f"use replicate = {divisors(data)}")
    if whole and layout.reshard_after_forward != "auto":
        what = f"reshard_after_forward with shard = {layout.shard}, which gathers no parameters"
        yield Conflict(("layout.reshard_after_forward", "layout.shard"), what, "use shard: parameters, or leave it out")


def _offload(job: Job) -> Iterator[Conflict]:
    kept = job.layout.activation_checkpointing
    if job.layout.activation_offload and kept in ("none", "selective"):
        what = f"activation_offload with activation_checkpointing = {kept}: only the inputs of blocks that are wholly recomputed leave the GPU"
        keys = ("layout.activation_offload", "layout.activation_checkpointing")
        yield Conflict(keys, what, "use activation_checkpointing: full or auto, or leave activation_offload out")


def _sequence(job: Job) -> Iterator[Conflict]:
    layout = job.layout
    if layout.sequence_parallel and layout.tensor in (None, 1):
        what = f"sequence_parallel cuts the residual stream over the tensor axis, and {_degree('tensor', layout.tensor)}"
        yield Conflict(("layout.sequence_parallel", "layout.tensor"), what, "set tensor above 1, or leave sequence_parallel out")
    lacking = [key for key, there in (("sequence_parallel", layout.sequence_parallel), ("compile", job.training.compile)) if not there]
    if layout.async_tensor_parallel and lacking:
        what = f"async_tensor_parallel without {' and '.join(lacking)}: torch puts the parts of the stream into the matmuls of compiled blocks"
        hint = "set layout.sequence_parallel and training.compile to true, or leave async_tensor_parallel out"
        yield Conflict(("layout.async_tensor_parallel", "layout.sequence_parallel", "training.compile"), what, hint)
    if layout.context_attention != "auto" and layout.context in (None, 1):
        what = f"context_attention = {layout.context_attention} says how context ranks attend, and {_degree('context', layout.context)}"
        yield Conflict(("layout.context_attention", "layout.context"), what, "set context above 1, or leave context_attention out")
    # Ulysses asks least of a length: with `auto` the plan chooses among what is left.
    way: ContextWay = "ulysses" if layout.context_attention == "auto" else layout.context_attention
    if found := uneven_sequence(job.batch.seq_len, layout.context or 1, (layout.tensor or 1) if layout.sequence_parallel else 1, way):
        yield Conflict(("batch.seq_len", "layout.context", "layout.context_attention", "layout.tensor"), found.what, found.hint)


def _balance(job: Job) -> Iterator[Conflict]:
    asked = job.experts
    if asked.loss_weight is not None and asked.balance in ("none", "bias"):
        what = f"loss_weight = {asked.loss_weight:g} with balance = {asked.balance}, which adds no loss"
        yield Conflict(("experts.loss_weight", "experts.balance"), what, "use balance: loss, or leave loss_weight out")
    if asked.bias_step != type(asked).model_fields["bias_step"].default and asked.balance != "bias":
        what = f"bias_step = {asked.bias_step:g} with balance = {asked.balance}, which moves no bias"
        yield Conflict(("experts.bias_step", "experts.balance"), what, "use balance: bias, or leave bias_step out")


def _dispatch(job: Job) -> Iterator[Conflict]:
    """What DeepEP needs of a job: experts on several ranks, bf16, and blocks that run eagerly."""
    if job.experts.dispatch != "deepep":
        return
    how, keys = "use experts.dispatch: all_to_all", ("experts.dispatch",)
    if job.layout.expert in (None, 1):
        what = f"dispatch = deepep brings tokens to experts on other GPUs, and {_degree('expert', job.layout.expert)}"
        yield Conflict((*keys, "layout.expert"), what, f"set layout.expert above 1, or {how}")
    if job.precision == "fp32":
        yield Conflict((*keys, "precision"), "dispatch = deepep with precision = fp32: its kernels take bf16", f"use precision: bf16, or {how}")
    if job.training.compile:
        what = "dispatch = deepep with compile = true: what its kernels give has no shape before they ran"
        yield Conflict((*keys, "training.compile"), what, f"leave training.compile out, or {how}")


def _degree(axis: str, degree: int | None) -> str:
    return f"no {axis} degree is given" if degree is None else f"{axis} = {degree}"


def _devices(job: Job, hardware: Hardware) -> Iterator[Conflict]:
    layout, devices = job.layout, hardware.num_devices
    asked = {key: getattr(layout, key) for key in ("pipeline", "data", "context", "tensor") if (getattr(layout, key) or 1) > 1}
    product = 1
    for degree in asked.values():
        product *= degree
    said = " x ".join(f"{key} = {degree}" for key, degree in asked.items())
    keys = (*(f"layout.{key}" for key in asked), "hardware")
    if layout.data is not None and product != devices:
        hint = f"make the degrees multiply to {devices}, or leave data out: it takes what the other axes leave"
        yield Conflict(keys if asked else ("layout.data", "hardware"), f"{said or 'data = 1'} needs {product} devices, and there are {devices}", hint)
    elif layout.data is None and devices % product:
        yield Conflict(keys, f"{said} does not divide the {devices} devices", "use degrees whose product divides them")
    if job.experts.dispatch == "deepep" and hardware.device.kind != "cuda":
        what = f"dispatch = deepep on {hardware.device.name}, and DeepEP has kernels for NVIDIA's GPUs alone"
        yield Conflict(("experts.dispatch", "hardware"), what, "use experts.dispatch: all_to_all")
    if layout.async_tensor_parallel and hardware.intra.is_through_host:
        what = f"async_tensor_parallel on {hardware.device.name}, where no GPU reads another's memory"
        yield Conflict(
            ("layout.async_tensor_parallel", "hardware"), what, "leave it out; with a driver that allows P2P, say so by hardware.p2p: true"
        )
    copies = layout.replicate or 1
    if layout.data is None and devices % product == 0 and (devices // product) % copies:
        what = f"replicate = {copies} does not divide the {devices // product} data ranks"
        yield Conflict(("layout.replicate", "hardware", *keys[:-1]), what, "use a divisor, such as the number of nodes")


def untrainable(job: Job) -> Iterator[Conflict]:
    """What is planned well and not trained yet, and what training needs and planning does not."""
    if job.data.train is None:
        yield Conflict(("data.train",), "there is nothing to train on", "add data.train: the file of training rows")
    if job.training.steps is None and job.training.epochs is None:
        yield Conflict(("training",), "nothing says how long to train", "add training.steps or training.epochs")
    if job.method in ("lora", "qlora"):
        yield Conflict(("method",), f"method = {job.method} is planned but not trained yet", "use method: full, or only plan it")
    layout = job.layout
    if (degree := layout.pipeline or 1) > 1:
        yield Conflict(("layout.pipeline",), f"pipeline = {degree} is planned but not trained yet", "use pipeline: 1, or only plan it")
