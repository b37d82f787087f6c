"""Job: what is asked, once. Every key of a job file is declared here and nowhere else.

The sections are frozen pydantic models; `description` is the documentation of a key (docs and `pentamesh explain keys` print it), and
`pentamesh.job.read` turns YAML into a Job or into every problem at once.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from pentamesh.units import parse_count

__all__ = ["Batch", "Checkpoint", "Data", "Job", "LayoutRequest", "Logging", "Model", "Optimizer", "Section", "Training"]

Count = Annotated[int, BeforeValidator(parse_count)]


class Section(BaseModel):
    """A section of the job file: frozen, and no key it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=False)


class Model(Section):
    name: str = Field(description="A local folder, a Hugging Face hub id, or a catalogue name (`llama-3.1-8b`).")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub id.")


class Data(Section):
    train: str | None = Field(None, description="File (.jsonl, .json, .txt) or glob of training rows, relative to the job file.")
    held_out: str | float | None = Field(None, description="File of held-out rows, or the share of training rows to hold out (0.05).")
    form: Literal["auto", "messages", "text"] = Field(
        "auto", description="Form of a row: `messages` (chat), `text` (plain), or found from the first row."
    )
    too_long: Literal["error", "drop", "truncate"] = Field("error", description="What happens to a row longer than `batch.seq_len`.")
    max_rows: Count | None = Field(None, ge=1, description="Use only the first rows.")


class Batch(Section):
    seq_len: Count = Field(4096, ge=2, description="Longest sequence, in tokens.")
    micro_batch: Count = Field(1, ge=1, description="Sequences that one rank computes at once.")
    global_batch: Count = Field(16, ge=1, description="Sequences per optimizer step, over all ranks and micro-batches.")


class Optimizer(Section):
    name: Literal["adamw"] = Field("adamw", description="Optimizer; fused where the device has it.")
    lr: float = Field(2e-5, gt=0, description="Peak learning rate.")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95), description="Decay of the two moments."
    )
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled decay of matrices; norms and biases are not decayed.")
    max_grad_norm: float | None = Field(1.0, gt=0, description="Global gradient norm to clip to; null for no clipping.")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="Learning rate after warm-up.")
    warmup_steps: Count = Field(0, ge=0, description="Steps of linear warm-up from zero.")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Share of the peak at which cosine and linear end.")


class Training(Section):
    steps: Count | None = Field(None, ge=1, description="Optimizer steps; give this or `epochs`.")
    epochs: float | None = Field(None, gt=0, description="Passes over the training rows; give this or `steps`.")
    seed: int = Field(0, ge=0, description="Decides data order, dropout and random initial weights, on any layout alike.")
    evaluate_every: Count | None = Field(
        None, ge=1, description="Steps between evaluations on held-out rows; always before the first and after the last."
    )
    compile: bool = Field(False, description="Compile each block with torch.compile.")


class LayoutRequest(Section):
    shard: Literal["auto", "none", "optimizer", "gradients", "parameters"] = Field(
        "auto", description="What is cut over the data axis: none (DDP), optimizer (ZeRO-1), gradients (ZeRO-2), parameters (full shard)."
    )
    data: int | None = Field(None, ge=1, description="Data-parallel degree; whatever the other axes leave, when not given.")
    replicate: int | None = Field(
        None, ge=1, description="Copies of the model on the data axis; above 1 with `shard: parameters` it is hybrid shard."
    )
    tensor: int = Field(1, ge=1, description="Tensor-parallel degree.")
    pipeline: int = Field(1, ge=1, description="Pipeline-parallel degree.")
    context: int = Field(1, ge=1, description="Context-parallel degree.")
    expert: int = Field(1, ge=1, description="Expert-parallel degree.")
    sequence_parallel: bool = Field(False, description="Cut the residual stream over the tensor axis.")
    activation_checkpointing: Literal["auto", "none", "full"] = Field(
        "auto", description="Recompute each block in backward instead of keeping its activations."
    )
    reshard_after_forward: Literal["auto"] | bool = Field("auto", description="Full shard: free gathered parameters between forward and backward.")


class Checkpoint(Section):
    every: Count | None = Field(None, ge=1, description="Steps between checkpoints; the last step is always saved.")
    keep: int = Field(2, ge=1, description="Newest checkpoints that are kept.")
    export: bool = Field(True, description="Write a Hugging Face folder at the end of the run.")


class Logging(Section):
    folder: str | None = Field(None, description="Run folder, relative to the job file; `runs/<job name>` when not given.")
    every: Count = Field(1, ge=1, description="Steps between lines of progress (metrics.jsonl has every step).")
    tensorboard: bool = Field(False, description="Also write TensorBoard events into the run folder.")


class Job(Section):
    """A whole job."""

    model: Model = Field(description="What is trained.")
    method: Literal["full", "lora", "qlora", "pretrain"] = Field(
        "full", description="All weights, adapters, adapters on a 4-bit base, or from random weights."
    )
    data: Data = Field(default_factory=Data, description="What it is trained on.")
    batch: Batch = Field(default_factory=Batch, description="How many tokens at once.")
    optimizer: Optimizer = Field(default_factory=Optimizer, description="How weights are updated.")
    training: Training = Field(default_factory=Training, description="How long, in which order.")
    precision: Literal["fp32", "bf16", "bf16-pure"] = Field(
        "bf16", description="fp32; bf16 (bf16 compute, fp32 master weights and states); bf16-pure (all bf16, stochastic rounding)."
    )
    hardware: str | dict[str, Any] = Field("auto", description="`8xRTX-5090`, `2x8xH100@8x400gbps`, `2xCPU`, or `auto` for this machine.")
    layout: LayoutRequest = Field(default_factory=LayoutRequest, description="How it is spread; what is not given is chosen.")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="What is kept.")
    logging: Logging = Field(default_factory=Logging, description="What is written and shown.")
