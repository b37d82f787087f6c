"""Megatron-LM's flags of experts and latent attention: which published models they spell, and what is refused."""

from __future__ import annotations

import pytest

from pentamesh.model.read import read_model
from tests.translate.test_megatron import LLAMA, read, refused

# One row of the vocabulary a tensor rank: published sizes are no multiples of 128.
PLAIN = (
    f"{LLAMA} --hidden-dropout 0 --attention-dropout 0 --make-vocab-size-divisible-by 1 --seq-length 4096 --bf16 --moe-token-dispatcher-type alltoall"
)
MIXTRAL = (
    f"{PLAIN} --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --ffn-hidden-size 14336 "
    "--vocab-size 32000 --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-aux-loss-coeff 0 --rotary-base 1000000"
)
QWEN = (
    f"{PLAIN} --num-layers 48 --hidden-size 2048 --num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128 "
    "--qk-layernorm --ffn-hidden-size 6144 --moe-ffn-hidden-size 768 --num-experts 128 --moe-router-topk 8 --vocab-size 151936 --norm-epsilon 1e-6"
)
DEEPSEEK = (
    f"{PLAIN} --num-layers 61 --hidden-size 7168 --num-attention-heads 128 --ffn-hidden-size 18432 --moe-ffn-hidden-size 2048 --num-experts 256 "
    "--moe-router-topk 8 --moe-shared-expert-intermediate-size 2048 --moe-layer-freq [0]*3+[1]*58 --multi-latent-attention --q-lora-rank 1536 "
    "--kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --rope-type rope --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5 --vocab-size 129280"
)


@pytest.mark.parametrize(("line", "published"), [(MIXTRAL, "mixtral-8x7b"), (QWEN, "qwen3-30b-a3b"), (DEEPSEEK, "deepseek-v3")])
def test_published_models_are_spelled(line: str, published: str) -> None:
    found, wanted = read(f"{line} --expert-model-parallel-size 8").model, read_model(published)
    assert found.family == wanted.family
    assert found.experts == wanted.experts
    assert found.latent == wanted.latent
    assert [(t.name, t.shape, t.met) for t in found.tensors] == [(t.name, t.shape, t.met) for t in wanted.tensors]


def test_degrees_and_layers() -> None:
    found = read(f"{QWEN} --expert-model-parallel-size 8 --moe-layer-freq 2 --tensor-model-parallel-size 2 --sequence-parallel")
    assert found.job.layout.expert == 8
    assert found.model.experts is not None
    assert found.model.experts.layers == frozenset(range(0, 48, 2))
    assert any("tensor ranks cut no expert" in note for note in found.model.notes)
    assert found.job.layout.shard == "optimizer"
    assert any("--use-distributed-optimizer" in note for note in found.model.notes)
    nested = read(f"{QWEN} --moe-layer-freq ([0]*2+[1,1])*12 --moe-router-pre-softmax").model
    assert nested.experts is not None
    assert nested.experts.layers == frozenset(layer for layer in range(48) if layer % 4 > 1)
    assert nested.experts.normed is False


def test_what_keeps_loads_even() -> None:
    assert read(QWEN).job.experts.balance == "none"
    lossy = read(f"{QWEN} --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.001 --moe-layer-freq 2").job.experts
    # Of 24 layers each weighs 0.001, and is 1 where loads are even; their mean is 8 then.
    assert (lossy.balance, lossy.loss_weight) == ("loss", pytest.approx(0.001 * 24 / 8))
    biased = read(f"{DEEPSEEK} --moe-router-bias-update-rate 0.002").job.experts
    assert (biased.balance, biased.bias_step) == ("bias", 0.002)
    assert read(f"{QWEN} --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.001").job.experts.balance == "none"


def test_dense_heads_with_norms() -> None:
    line = QWEN.replace("--num-experts 128", "").replace("--moe-router-topk 8", "").replace("--moe-ffn-hidden-size 768", "")
    assert read(line.replace("--moe-token-dispatcher-type alltoall", "")).model.family == "qwen3"


@pytest.mark.parametrize(
    ("line", "flag", "what"),
    [
        (MIXTRAL.replace("--num-experts 8", ""), "--moe-router-topk", "without --num-experts"),
        (MIXTRAL + " --moe-router-pre-softmax", "--moe-router-pre-softmax", "Mixtral's architecture"),
        (MIXTRAL + " --moe-layer-freq 2", "--moe-layer-freq", "experts in every layer"),
        (QWEN + " --moe-router-score-function sigmoid", "--moe-router-score-function", "Qwen3's architecture"),
        (QWEN + " --moe-layer-freq [0]*3", "--moe-layer-freq", "no list of 48"),
        (QWEN + " --add-qkv-bias", "--add-qkv-bias", "no architecture with experts"),
        (QWEN.replace("alltoall", "allgather"), "--moe-token-dispatcher-type", "allgather"),
        (DEEPSEEK + " --moe-aux-loss-coeff 0.0001", "--moe-aux-loss-coeff", "in one way"),
        (QWEN + " --expert-tensor-parallel-size 2", "--expert-tensor-parallel-size", "cut no expert"),
        (DEEPSEEK.replace("[0]*3+[1]*58", "[1]*58+[0]*3"), "--moe-layer-freq", "all come first"),
        (DEEPSEEK.replace("--moe-shared-expert-intermediate-size 2048", ""), "--moe-shared-expert-intermediate-size", "none is no multiple"),
        (DEEPSEEK.replace("--moe-router-score-function sigmoid", ""), "--multi-latent-attention", "shares among all"),
        ("--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --num-experts 4", "--num-experts", "GPT-2's architecture knows no"),
    ],
)
def test_what_is_spelled_of_no_architecture(line: str, flag: str, what: str) -> None:
    assert what in refused(line)[flag][0]
