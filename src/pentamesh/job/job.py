"""Job: what is asked, once. Every key of a job file is declared here and nowhere else.

The sections are frozen pydantic models; `description` is the documentation of a key (docs and `pentamesh explain keys` print it), and
`pentamesh.job.read` turns YAML into a Job or into every problem at once.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from pentamesh.job.division import ContextWay
from pentamesh.units import parse_bytes, parse_count

__all__ = [
    "MAX_COUNT",
    "MAX_DEVICES",
    "Batch",
    "Checkpoint",
    "Data",
    "ExpertsRequest",
    "Job",
    "LayoutRequest",
    "Logging",
    "Machine",
    "Model",
    "Optimizer",
    "Rows",
    "Section",
    "Training",
    "TurnField",
]


# Beyond any count of tokens or steps, and still a whole number in floating point and in every JSON reader (2^53 = 9.007e15).
MAX_COUNT = 10**15
# Above the largest cluster that anyone has named in public (200,000 GPUs, xAI 2025); a plan walks over the ranks, a second for every 20,000.
MAX_DEVICES = 2**18


def _count(value: Any) -> int:
    found = parse_count(value)
    if found > MAX_COUNT:
        raise ValueError(f"{value} is more than {MAX_COUNT:.0e}")
    return found


def _number(value: Any) -> Any:
    """YAML's `yes` is no number, though Python would count it as 1."""
    if isinstance(value, bool):
        raise ValueError(f"{value} is not a number")  # noqa: TRY004 - pydantic collects ValueErrors
    return value


def _writable(value: str) -> str:
    if "\0" in value:
        raise ValueError("text for a name or a path holds no NUL character")
    return value


Count = Annotated[int, BeforeValidator(_count)]
Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Number = Annotated[float, BeforeValidator(_number)]
# Of an axis.
Degree = Annotated[Count, Field(ge=1, le=MAX_DEVICES)]
Text = Annotated[str, Field(min_length=1), AfterValidator(_writable)]


class Section(BaseModel):
    """A section of the job file: frozen, and no key it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Model(Section):
    name: Text = Field(description="A local folder, a .gguf file, a Hugging Face hub id, or a catalogue name (`llama-3.1-8b`).")
    revision: Text | None = Field(default=None, description="Branch, tag or commit of a hub id.")
    new_tokens: tuple[Text, ...] = Field(
        default=(),
        description="Texts that become tokens of their own, special ones; embedding and head grow where the vocabulary has no rows to spare.",
    )


# What rows and turns are made of, over all forms; `run/data/forms.py` and `turns.py` say which of them each form has.
RowField = Literal[
    "messages",
    "conversations",
    "system",
    "tools",
    "instruction",
    "input",
    "output",
    "prompt",
    "completion",
    "text",
    "input_ids",
    "labels",
    "attention_mask",
]
TurnField = Literal["role", "content", "from", "value", "tool_calls", "reasoning_content", "train", "weight"]

# Named here for a source of rows and for all of them.
FormAsked = Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text", "tokens"]


class Rows(Section):
    """One of several sources of training rows."""

    rows: Text = Field(description="A file, folder, glob or hub data set, as in `data.train`.")
    weight: Number = Field(
        default=1.0, gt=0, le=1000, description="How often an epoch sees each of its rows: 2 is twice; of 0.5 `training.seed` draws half of them."
    )
    subset: Text | None = Field(default=None, description="Subset (configuration) of the hub data set.")
    split: Text | None = Field(default=None, description="Split of the hub data set; `train` when not given.")
    form: FormAsked | None = Field(default=None, description="Form of its rows; `data.form` when not given.")


class Data(Section):
    train: Text | Annotated[tuple[Rows, ...], Field(min_length=1)] | None = Field(
        default=None,
        description="Training rows: a file (JSON, CSV, Parquet, Arrow, text), folder or glob, relative to the job file, a hub data set (`org/name`), "
        "or a list of such sources with their weights.",
    )
    held_out: Text | Number | None = Field(
        default=None, description="Held-out rows: a file, glob or hub data set like `train`, or the share of training rows to hold out (0.05)."
    )
    subset: Text | None = Field(default=None, description="Subset (configuration) of a hub data set.")
    split: Text | None = Field(default=None, description="Split of the hub data set in `train`; `train` when not given.")
    held_out_split: Text | None = Field(default=None, description="Split of the hub data set in `held_out`; `test` when not given.")
    form: FormAsked = Field(default="auto", description="Form of the rows, each shown in the guide on data; `auto` finds it from the first row.")
    columns: dict[Literal[RowField, TurnField], Text] = Field(
        default={},
        description="What the files call the fields of rows and turns that the form calls otherwise: `{messages: dialog, role: speaker}`.",
    )
    roles: dict[Text, Literal["system", "user", "assistant", "tool"]] = Field(
        default={}, description="The role that a name in the files means, beside those that the form knows: `{customer: user, agent: assistant}`."
    )
    system: Text | None = Field(default=None, description="System turn of every row, in place of its own.")
    chat_template: Text | None = Field(
        default=None,
        description="Chat template in place of the model's: a Jinja file, relative to the job file, or its text. The export carries it.",
    )
    train_on: tuple[Literal["system", "user", "assistant"], ...] = Field(
        default=("assistant",), min_length=1, description="Roles whose turns are trained, where a turn does not say itself by `train` or `weight`."
    )
    turns: Literal["all", "last"] = Field(default="all", description="Which turns of these roles are trained: all, or the last of a row.")
    too_long: Literal["error", "drop", "truncate", "split"] = Field(
        default="error", description="What happens to a row longer than `batch.seq_len`; `split` cuts it into pieces that follow each other."
    )
    max_rows: Count | None = Field(default=None, ge=1, description="Use only the first rows of each source.")
    workers: Count | None = Field(
        default=None, ge=1, le=256, description="Processes that tokenise; when not given as many as there are cores, at most 8, and 1 for a stream."
    )

    streaming: bool = Field(
        default=False,
        description="Read and tokenise rows while the run goes on, a chunk ahead of it, for data that does not fit on the disk or takes long to "
        "prepare; needs `training.steps`.",
    )
    shuffle_rows: Count = Field(
        default=10_000, ge=1, description="Rows of a chunk of streamed data: how far rows are shuffled, packed and grouped by length."
    )

    @property
    def sources(self) -> dict[str, Rows]:
        """The sources of training rows by the key that names each: `data.train`, or `data.train[1]` where there are several."""
        if isinstance(self.train, str):
            return {"data.train": Rows(rows=self.train, subset=self.subset, split=self.split, form=self.form)}
        return {f"data.train[{i}]": rows.model_copy(update={"form": rows.form or self.form}) for i, rows in enumerate(self.train or ())}


class Batch(Section):
    seq_len: Count = Field(default=4096, ge=2, description="Longest sequence, in tokens.")
    micro_batch: Count = Field(default=1, ge=1, description="Sequences that one rank computes at once.")
    global_batch: Count = Field(default=16, ge=1, description="Sequences per optimizer step, over all ranks and micro-batches.")
    packing: bool = Field(
        default=False, description="Put as many samples into a sequence as it has room for (first-fit decreasing); none sees another."
    )
    group_by_length: bool = Field(
        default=False, description="Steps of samples of like length: less padding, at the price of steps that are less alike."
    )


class Optimizer(Section):
    name: Literal["adamw"] = Field(default="adamw", description="Optimizer; fused where the device has it.")
    lr: Number = Field(default=2e-5, gt=0, description="Peak learning rate.")
    betas: tuple[Annotated[Number, Field(ge=0, lt=1)], Annotated[Number, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.95), description="Decay of the two moments."
    )
    eps: Number = Field(default=1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: Number = Field(default=0.0, ge=0, description="Decoupled decay of matrices; norms and biases are not decayed.")
    max_grad_norm: Number | None = Field(default=1.0, gt=0, description="Global gradient norm to clip to; null for no clipping.")
    schedule: Literal["cosine", "linear", "constant"] = Field(default="cosine", description="Learning rate after warm-up.")
    warmup_steps: Count = Field(default=0, ge=0, description="Steps of linear warm-up from zero.")
    min_lr_ratio: Number = Field(default=0.0, ge=0, le=1, description="Share of the peak at which cosine and linear end.")


class Training(Section):
    steps: Count | None = Field(default=None, ge=1, description="Optimizer steps; give this or `epochs`.")
    epochs: Number | None = Field(default=None, gt=0, le=1e6, description="Passes over the training rows; give this or `steps`.")
    seed: Count = Field(default=0, ge=0, description="Decides data order and random initial weights, on any layout alike; dropout differs by rank.")
    freeze: tuple[Text, ...] = Field(
        default=(), description="Patterns of names of parameters that are not trained: `model.embed_tokens.*`, `model.layers.[0-9].*`, `*norm*`."
    )
    compile: bool = Field(default=False, description="Compile each block with torch.compile; needs a C++ compiler.")
    evaluate_every: Count | None = Field(
        default=None, ge=1, description="Steps between evaluations on held-out rows; always before the first and after the last."
    )


class Machine(Section):
    """The hardware by its facts, where one line cannot hold them all."""

    nodes: Count = Field(default=1, ge=1, description="Nodes, all alike.")
    gpus: Count = Field(default=1, ge=1, description="GPUs of a node; processes, for a CPU.")
    gpu: Text = Field(description="Name of the GPU (`RTX-5090`), or `CPU`.")
    fabric: Text | None = Field(default=None, description="Rate of one NIC (`400gbps`, `ndr`), or with their number a node (`8x400gbps`).")
    nics: Count | None = Field(default=None, ge=1, description="NICs of a node; one when not given.")
    host_ram: Bytes | None = Field(default=None, ge=1, description="Memory of a node's CPU (`512 GB`).")
    nvme: Bytes | None = Field(default=None, ge=1, description="NVMe space of a node (`4 TB`).")
    p2p: bool | None = Field(default=None, description="Whether GPUs reach each other over PCIe; the stock driver's answer when not given.")
    power_cap_w: Number | None = Field(default=None, gt=0, description="Power limit of each GPU, in watts.")


class LayoutRequest(Section):
    shard: Literal["auto", "none", "optimizer", "gradients", "parameters"] = Field(
        default="auto", description="What is cut over the data axis: none (DDP), optimizer (ZeRO-1), gradients (ZeRO-2), parameters (full shard)."
    )
    data: Degree | None = Field(default=None, description="Data-parallel degree; whatever the other axes leave, when not given.")
    replicate: Degree | None = Field(
        default=None, description="Copies of the model on the data axis; above 1 with `shard: parameters` it is hybrid shard."
    )
    tensor: Degree | None = Field(
        default=None, description="Tensor-parallel degree. Chosen when not given: above 1 for pre-training, or where data alone does not fit."
    )
    pipeline: Degree | None = Field(default=None, description="Pipeline-parallel degree. Chosen by `plan` when not given, as tensor is.")
    context: Degree | None = Field(
        default=None, description="Context-parallel degree. Chosen when not given: above 1 inside a node where data alone does not fit."
    )
    context_attention: Literal["auto"] | ContextWay = Field(
        default="auto",
        description="How attention meets the keys of other context ranks: ring (blocks of keys pass by), all_gather (each rank has them all), "
        "ulysses (heads are exchanged for tokens). `auto`: the fastest that fits.",
    )
    expert: Degree | None = Field(
        default=None,
        description="Expert-parallel degree: among how many ranks the experts of a layer are parted. Chosen when not given, for models with experts: "
        "inside a node, or over nodes where that does not fit.",
    )
    sequence_parallel: bool = Field(default=False, description="Cut the residual stream over the tensor axis.")
    async_tensor_parallel: bool = Field(
        default=False,
        description="Send the residual stream in parts beside the matmuls that use it: torch's symmetric memory, on GPUs that reach each other. "
        "Needs `sequence_parallel` and `training.compile`.",
    )
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = Field(
        default="auto",
        description="What blocks compute again in backward instead of keeping it: nothing, all but matmuls and attention, or everything.",
    )
    activation_offload: bool = Field(
        default=False, description="Let the inputs of recomputed blocks wait for backward in host memory; implies full activation checkpointing."
    )
    reshard_after_forward: Literal["auto"] | bool = Field(
        default="auto", description="Full shard: free gathered parameters between forward and backward."
    )


class ExpertsRequest(Section):
    balance: Literal["auto", "none", "loss", "bias"] = Field(
        default="auto",
        description="What keeps the loads of experts even: nothing, an auxiliary loss, or a bias of each expert that moves after every step (of all "
        "families deepseek_v3 alone has one). `auto`: loss where the model's config.json says `output_router_logits` and no weight of 0, else none.",
    )
    loss_weight: Number | None = Field(
        default=None,
        gt=0,
        description="What the auxiliary loss weighs; the model's `router_aux_loss_coef` when not given, and 0.001 where that is 0 or missing.",
    )
    bias_step: Number = Field(default=0.001, gt=0, description="How far a bias moves after a step.")
    dispatch: Literal["all_to_all", "deepep"] = Field(
        default="all_to_all",
        description="What brings tokens to experts on other GPUs: all-to-alls, or DeepEP where it is installed (`precision: bf16` or `bf16-pure`).",
    )


class Checkpoint(Section):
    every: Count | None = Field(default=None, ge=1, description="Steps between checkpoints; the last step is always saved.")
    keep: Count = Field(default=2, ge=1, description="Newest checkpoints that are kept.")
    keep_every: Count | None = Field(
        default=None, ge=1, description="Also keep, for good, those of steps that this divides: 1000 keeps every 1000th."
    )
    keep_best: bool = Field(
        default=False,
        description="Also keep the one with the lowest held-out loss, evaluated before each save; `pentamesh export RUN --best` writes it.",
    )
    folder: Text | None = Field(
        default=None,
        description="Where they are kept, if not in the run folder: another folder, or a URL that fsspec knows (`s3://bucket/run`).",
    )
    asynchronous: Literal["auto"] | bool = Field(
        default="auto",
        description="Bring checkpoints to disk beside the steps that follow: they wait for a copy to host memory alone. `auto`: where it has room.",
    )
    export: bool = Field(default=True, description="Write a Hugging Face folder at the end of the run.")
    push_to_hub: Text | None = Field(
        default=None, description="Repository on the hub (`org/name`) to which that folder is pushed, as whom `hf auth login` or HF_TOKEN says."
    )
    private: bool = Field(default=True, description="Whether a repository that `push_to_hub` makes is private; one that is there stays as it is.")


class Logging(Section):
    folder: Text | None = Field(default=None, description="Run folder, relative to the job file; `runs/<job name>` when not given.")
    every: Count = Field(default=1, ge=1, description="Steps between lines of progress (metrics.jsonl has every step).")
    tensorboard: bool = Field(default=False, description="Also write the numbers of metrics.jsonl as TensorBoard event files.")


class Job(Section):
    """A whole job."""

    model: Model = Field(description="What is trained.")
    method: Literal["full", "lora", "qlora", "pretrain"] = Field(
        default="full", description="All weights, adapters, adapters on a 4-bit base, or from random weights."
    )
    data: Data = Field(default_factory=Data, description="What it is trained on.")
    batch: Batch = Field(default_factory=Batch, description="How many tokens at once.")
    optimizer: Optimizer = Field(default_factory=Optimizer, description="How weights are updated.")
    training: Training = Field(default_factory=Training, description="How long, in which order.")
    precision: Literal["fp32", "bf16", "bf16-pure"] = Field(
        default="bf16", description="fp32; bf16 (bf16 compute, fp32 master weights and states); bf16-pure (all bf16, stochastic rounding)."
    )
    hardware: Text | Machine = Field(default="auto", description="`8xRTX-5090`, `2x8xH100@8x400gbps`, `2xCPU`, `auto`, or its facts as keys.")
    layout: LayoutRequest = Field(default_factory=LayoutRequest, description="How it is spread; what is not given is chosen.")
    experts: ExpertsRequest = Field(default_factory=ExpertsRequest, description="How tokens meet experts, and what keeps their loads even.")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="What is kept.")
    logging: Logging = Field(default_factory=Logging, description="What is written and shown.")
