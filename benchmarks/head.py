"""`python -m benchmarks.head`: the peak memory of the head and its loss in pieces, beside whole logits, at vocabularies of today's models.

Both sides are one layer of the same Llama in float32 with the same weights and tokens; whole logits are transformers' own forward and torch's
cross_entropy. What is measured is what forward and backward allocate beyond the weights, gradients included. Floating-point operations are counted by
torch, with all tokens trained, a quarter and none.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, which measures the peak, announces itself otherwise

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from pentamesh.job.precision import PRECISIONS
from pentamesh.layout.mesh import Layout
from pentamesh.layout.policy import Policy
from pentamesh.model.families import describe
from pentamesh.model.spec import ModelSpec
from pentamesh.run.data.batches import IGNORED, Micro
from pentamesh.run.initial import drawing
from pentamesh.run.loss import weighted_loss
from pentamesh.run.peak import count_allocations, measured_peak
from pentamesh.run.place import build, parameters_of, place
from pentamesh.run.world import join
from pentamesh.run.worlds import run_world

VOCABULARIES = (128_256, 151_936, 262_144)  # Llama 3, Qwen 2.5 and 3, Gemma 3
WIDTH, LEAST_RATIO, MOST_ERROR = 64, 8.0, 1e-6


def spec(vocab: int) -> ModelSpec:
    sizes = {"vocab_size": vocab, "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 1}
    found = describe({"model_type": "llama", "max_position_embeddings": 4096, "tie_word_embeddings": False} | sizes, "llama")
    assert found is not None
    return found


def drawn_micro(vocab: int, tokens: int, share: float) -> Micro:
    draw = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(0, vocab, (1, tokens), generator=draw) for _ in range(2))
    labels[:, round(share * tokens) :] = IGNORED
    return Micro(ids, labels, round(share * tokens), tokens)


def in_pieces(vocab: int, tokens: int) -> dict[str, Any]:
    """Peak, gradients and operations of the head as it is trained."""
    count_allocations()
    model, world = spec(vocab), join(Layout(), "cpu")
    module = place(model, Layout(), Policy(), PRECISIONS["fp32"], world, drawing(0))
    found = _measured(module, lambda given: weighted_loss(module, given, model, world, 1 / tokens), vocab, tokens)
    found["flop"] = {}
    for share in (1.0, 0.25, 0.0):
        with FlopCounterMode(display=False) as counter:
            weighted_loss(module, drawn_micro(vocab, tokens, share), model, world, 1 / tokens)  # the head's gradients are of its forward
        found["flop"][share] = counter.get_total_flops()
    return found


def whole(vocab: int, tokens: int) -> dict[str, Any]:
    """The same by whole logits."""
    count_allocations()
    model, world = spec(vocab), join(Layout(), "cpu")
    built: Any = build(model, torch.float32)
    buffers = {name: buffer.clone() for name, buffer in built.named_buffers()}
    built.to_empty(device="cpu")
    for name, buffer in built.named_buffers():
        buffer.copy_(buffers[name])
    filled = parameters_of(place(model, Layout(), Policy(), PRECISIONS["fp32"], world, drawing(0)))
    built.load_state_dict(filled)
    del filled

    def loss(given: Micro) -> torch.Tensor:
        return cross_entropy(built(input_ids=given.input_ids).logits.flatten(0, 1).float(), given.labels.flatten())

    return _measured(built, loss, vocab, tokens)


def _measured(module: nn.Module, loss: Any, vocab: int, tokens: int) -> dict[str, Any]:
    given = drawn_micro(vocab, tokens, 1.0)
    with measured_peak(torch.device("cpu")) as resting:
        torch.empty(1)
    with measured_peak(torch.device("cpu")) as peak:
        loss(given).backward()
    gradients = {name: p.grad.numpy().copy() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    assert peak.peak_bytes is not None
    assert resting.peak_bytes is not None
    return {"peak_bytes": peak.peak_bytes - resting.peak_bytes, "gradients": gradients}


def measure(vocab: int, tokens: int) -> dict[str, Any]:
    """One row: both peaks, their ratio, the worst relative error of a gradient, and the share of operations that remains when less is trained."""
    ours, theirs = (run_world(side, 1, vocab, tokens, timeout_s=600)[0] for side in (in_pieces, whole))

    def error(name: str) -> float:
        found, expected = (torch.from_numpy(side["gradients"][name]).double() for side in (ours, theirs))
        return float((found - expected).norm() / expected.norm())

    flop = ours["flop"]
    return {
        "vocab": vocab,
        "tokens": tokens,
        "ours_bytes": ours["peak_bytes"],
        "whole_bytes": theirs["peak_bytes"],
        "ratio": theirs["peak_bytes"] / ours["peak_bytes"],
        "worst_relative_error": max(error(name) for name in theirs["gradients"]),
        "head_flop": {share: (flop[share] - flop[0.0]) for share in flop},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the micro-batch, all trained")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    given = parser.parse_args()
    rows = []
    for vocab in VOCABULARIES:
        row = measure(vocab, given.tokens)
        rows.append(row)
        print(
            f"{vocab:,} words, {given.tokens:,} tokens: {row['ours_bytes'] / 1e9:.2f} GB against {row['whole_bytes'] / 1e9:.2f} GB of whole logits = "
            f"{row['ratio']:.1f}x less (at least {LEAST_RATIO:g}x); gradients {row['worst_relative_error']:.1e} apart; "
            f"{row['head_flop'][0.25] / row['head_flop'][1.0]:.3f} of the head's operations with a quarter of the tokens trained",
            flush=True,
        )
    if given.json:
        given.json.write_text(json.dumps({"schema": "pentamesh.benchmark_head", "version": 1, "rows": rows}, indent=2) + "\n")
    return int(any(row["ratio"] < LEAST_RATIO or row["worst_relative_error"] > MOST_ERROR for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
