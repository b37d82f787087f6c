"""Megatron-LM's words for pre-training: flags that set a key of the job, those of the model, those that ask for a GPU, and those refused."""

from __future__ import annotations

import argparse

from pentamesh.translate.flags import Flag, declare
from pentamesh.translate.megatron_model import COUNTS, NUMBERS, SWITCHES, WORDS

__all__ = ["ADAM", "CONTEXT", "DEFAULTS", "FLAGS", "ON_GPU", "REFUSED", "parser_of"]

FLAGS = (
    Flag("--tensor-model-parallel-size", "layout.tensor", "tensor degree", metavar="N"),
    Flag("--pipeline-model-parallel-size", "layout.pipeline", "pipeline degree", metavar="N"),
    Flag("--context-parallel-size", "layout.context", "context degree", metavar="N"),
    Flag("--expert-model-parallel-size", "layout.expert", "expert degree", metavar="N"),
    Flag("--sequence-parallel", "layout.sequence_parallel", "cut the residual stream over the tensor axis", sets=True),
    Flag("--use-distributed-optimizer", "layout.shard", "cut the optimizer over the data axis", sets="optimizer"),
    Flag("--seq-length", "batch.seq_len", "tokens of a sequence", metavar="N"),
    Flag("--micro-batch-size", "batch.micro_batch", "sequences that a device computes at once", metavar="N"),
    Flag("--global-batch-size", "batch.global_batch", "sequences a step; one micro-batch a data rank when not given", metavar="N"),
    Flag("--bf16", "precision", "compute in bf16; weights and optimizer state in fp32", sets="bf16"),
    Flag("--lr", "optimizer.lr", "peak learning rate", metavar="X"),
    Flag("--lr-decay-style", "optimizer.schedule", "linear | cosine | constant", metavar="NAME"),
    Flag("--lr-warmup-iters", "optimizer.warmup_steps", "steps of linear warm-up", metavar="N"),
    Flag("--weight-decay", "optimizer.weight_decay", "decoupled decay of matrices", metavar="X"),
    Flag("--clip-grad", "optimizer.max_grad_norm", "gradient norm to clip to", metavar="X"),
    Flag("--adam-eps", "optimizer.eps", "added to the root of the second moment", metavar="X"),
    Flag("--train-iters", "training.steps", "optimizer steps", metavar="N"),
    Flag("--seed", "training.seed", "seed of order and initial weights", metavar="N"),
    Flag("--data-path", "data.train", "training rows", metavar="FILE"),
    Flag("--save", "logging.folder", "run folder, with its checkpoints", metavar="FOLDER"),
    Flag("--save-interval", "checkpoint.every", "steps between checkpoints", metavar="N"),
    Flag("--save-retain-interval", "checkpoint.keep_every", "steps between checkpoints that stay for good", metavar="N"),
    Flag("--log-interval", "logging.every", "steps between lines of progress", metavar="N"),
    Flag("--recompute-activations", "layout.activation_checkpointing", "--recompute-granularity selective", sets="selective"),
    Flag("--recompute-granularity", "layout.activation_checkpointing", "full | selective; chosen when not given", metavar="WHAT"),
    Flag("--hardware", "hardware", "machine to plan for; this one, or torchrun's processes of it, when not given", metavar="WHAT"),
)
# What Megatron-LM does where nothing is said. Source: Megatron-LM, training/arguments.py.
DEFAULTS = {
    "layout.tensor": 1,
    "layout.pipeline": 1,
    "layout.context": 1,
    "layout.expert": 1,
    "layout.shard": "none",
    "batch.micro_batch": 1,
    "precision": "fp32",
    "optimizer.schedule": "linear",
    "optimizer.weight_decay": 0.01,
    "training.seed": 1234,
}
ADAM = {"--adam-beta1": 0.9, "--adam-beta2": 0.999}
# How context ranks meet each other's keys, by its words. Source: Megatron-LM, training/arguments.py and transformer_config.py.
CONTEXT = {"p2p": "ring", "allgather": "all_gather", "all_gather": "all_gather", "a2a": "ulysses"}
# What only a GPU has, and what a plan for one makes of it.
ON_GPU = {
    "--use-flash-attn": "attention is planned as torch's fused kernel: FlashAttention on this GPU",
    "--transformer-impl transformer_engine": "kernels are torch's: time and memory are planned without transformer_engine's fused norms and "
    "activation functions, which read, write and keep less",
}
_STAGES = ("stages that hold several runs of layers are not planned yet: bubble and memory are those of 1F1B", "leave it out")
_TOKENIZER = ("text is not tokenised here yet: a plan needs the size of the vocabulary alone", "use --vocab-size")
# Flags that Megatron-LM knows and nothing here does, with the reason and what to do.
REFUSED = {
    "--fp16": ("fp16 needs a loss scale that follows overflows, and none is built", "use --bf16, as fast and with the range of fp32"),
    "--fp8-format": ("fp8 is not planned yet", "use --bf16"),
    "--num-layers-per-virtual-pipeline-stage": _STAGES,
    "--num-virtual-stages-per-pipeline-rank": _STAGES,
    "--lr-decay-iters": ("the learning rate comes down until the last step", "leave it out, and say --train-iters"),
    "--lr-warmup-fraction": ("warm-up is counted in steps", "use --lr-warmup-iters"),
    "--tokenizer-type": _TOKENIZER,
    "--tokenizer-model": _TOKENIZER,
    "--vocab-file": _TOKENIZER,
    "--merge-file": _TOKENIZER,
    "--hierarchical-context-parallel-sizes": (
        "context ranks meet in one way: heads are not exchanged in a node and keys passed between nodes",
        "leave it out",
    ),
    "--num-workers": ("rows are tokenised before the first step and then read from memory: there are no workers", "leave it out"),
}


def parser_of(description: str) -> argparse.ArgumentParser:
    """A parser of every word; values stay the text that was written, under the flag's own name."""
    parser = argparse.ArgumentParser(
        description=description, allow_abbrev=False, exit_on_error=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    declare(parser, FLAGS)
    for name, said in (COUNTS | NUMBERS).items():
        parser.add_argument(name, dest=name, metavar="N" if name in COUNTS else "X", help=said)
    for name, said in SWITCHES.items():
        parser.add_argument(name, dest=name, action="store_true", help=said)
    for name, words in WORDS.items():
        parser.add_argument(name, dest=name, metavar="NAME", help=" | ".join(words))
    for name, default in ADAM.items():
        parser.add_argument(name, dest=name, metavar="X", help=f"decay of a moment; {default:g}")
    parser.add_argument("--moe-layer-freq", dest="--moe-layer-freq", metavar="N", help="every N-th layer has experts, or which: [0]*3+[1]*58; 1")
    parser.add_argument("--cp-comm-type", dest="--cp-comm-type", metavar="NAME", help=f"{' | '.join(CONTEXT)}; chosen when not given")
    parser.add_argument("--min-lr", dest="--min-lr", metavar="X", help="learning rate at the end; 0")
    parser.add_argument("--recompute-method", dest="--recompute-method", metavar="NAME", help="uniform: every block of its own")
    parser.add_argument("--recompute-num-layers", dest="--recompute-num-layers", metavar="N", help="1: every block of its own")
    parser.add_argument("--use-flash-attn", dest="--use-flash-attn", action="store_true", help="attention by FlashAttention, on GPUs")
    parser.add_argument("--transformer-impl", dest="--transformer-impl", metavar="NAME", help="local | transformer_engine")
    parser.add_argument("--load", dest="--load", metavar="FOLDER", help="go on from the newest checkpoint of --save")
    parser.add_argument("--exit-interval", dest="--exit-interval", metavar="N", help="save and stop after this step")
    parser.add_argument("--tensorboard-dir", dest="--tensorboard-dir", metavar="FOLDER", help="SAVE/tensorboard: write event files there")
    for name, (reason, _) in REFUSED.items():
        parser.add_argument(name, dest=name, nargs="?", const=True, help=f"refused: {reason}")
    parser.add_argument("--plan", action="store_true", help="show the plan and be content with it")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    return parser
