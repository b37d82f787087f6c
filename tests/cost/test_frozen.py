"""What freezing spares: gradients and moments to the byte, activations and time of blocks without a backward."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

import pytest

from pentamesh.cost.activations import kept
from pentamesh.cost.compute import flop_per_token, work
from pentamesh.cost.frozen import blocks_kept
from pentamesh.cost.holding import Holding, resting, states
from pentamesh.cost.memory import memory
from pentamesh.cost.saved import local_bytes
from pentamesh.errors import InputError
from pentamesh.job.hardware import read_hardware
from pentamesh.job.job import Batch
from pentamesh.job.precision import PRECISIONS
from pentamesh.layout.mesh import SHARDS, Layout, Mesh, Shard
from pentamesh.layout.policy import Policy
from pentamesh.layout.split import split
from pentamesh.model.frozen import frozen
from pentamesh.model.read import read_model
from pentamesh.model.roles import Role
from pentamesh.model.spec import ModelSpec
from tests.cost.test_activations import BATCH, DENSE, SEQ, built_as_trained, config_of, described

WHOLE = read_model("llama-3.1-8b")
LOWER = frozen(WHOLE, ["model.embed_tokens.*", "model.layers.[0-9].*", "model.layers.1[0-5].*"])
SPOTS = frozen(WHOLE, ["*norm*", "model.layers.3.*", "lm_head.*"])
BF16 = PRECISIONS["bf16"]


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("model", [LOWER, SPOTS], ids=["lower", "spots"])
def test_states_are_those_of_the_tensors(model, shard: Shard) -> None:
    layout = Layout(Mesh(dp_replicate=3) if shard == "none" else Mesh(dp_shard=3), shard)

    def numel(role: Role, *, trained: bool = False) -> int:
        return sum(split(t, role, layout).max_local_numel for t in model.parameters if t.trained or not trained)

    trained, all_of_them = numel(Role.STATE, trained=True), numel(Role.STATE)
    found, rests = states(Holding(model, layout), BF16), resting(Holding(model, layout), BF16)
    # A master of its own is kept where the weights in use are of the compute dtype.
    weight, master = (4, 0) if shard in ("none", "parameters") else (2, 4)
    assert found["weights"] == weight * numel(Role.WEIGHT)
    assert found["gradients"] == weight * numel(Role.GRADIENT, trained=True)
    assert found["optimizer"] == 8 * trained + master * all_of_them
    assert rests == {"weights": 4 * all_of_them, "optimizer": 8 * trained}


def test_blocks_without_a_backward_keep_nothing() -> None:
    layout, policy, batch = Layout(Mesh(dp_shard=8), "parameters"), Policy(recompute="full"), Batch(seq_len=32768)
    whole, lower = (
        memory(Holding(model, layout), policy, BF16, batch, usable_bytes=10**11, kind="cuda").parts_bytes["activations"] for model in (WHOLE, LOWER)
    )
    of_a_block = local_bytes(kept(WHOLE, layout, 1, 32768, "bfloat16", "full"), layout)
    assert whole - lower == 16 * of_a_block


def test_time_and_flop() -> None:
    layout, device = Layout(Mesh(dp_shard=8), "parameters"), read_hardware("8xH100").device
    whole, lower, spots = (work(Holding(model, layout), Policy(), BF16, Batch(), device) for model in (WHOLE, LOWER, SPOTS))
    assert whole.forward_s == lower.forward_s > spots.forward_s  # a frozen head adds no gradients up
    assert 0.5 < lower.backward_s / whole.backward_s < 0.6
    assert 0.9 < spots.backward_s / whole.backward_s < 1
    assert lower.optimizer_s < 0.6 * whole.optimizer_s
    # Of one block's matmuls neither the gradients of weights (block 3, the head) nor, of the lower half, those of inputs.
    block, head = sum(t.numel for t in WHOLE.block if t.kind == "matmul"), 128256 * 4096
    attention = 8 * 4096 * 4096
    assert flop_per_token(Holding(WHOLE, layout), 4096) - flop_per_token(Holding(SPOTS, layout), 4096) == pytest.approx(2 * (block + head))
    # The first projections that are trained read a stream without a gradient; the norm before them is trained too, and they go back to it.
    expected = 16 * (4 * block + attention)
    assert flop_per_token(Holding(WHOLE, layout), 4096) - flop_per_token(Holding(LOWER, layout), 4096) == pytest.approx(expected)


def test_only_the_head_trained() -> None:
    """No block has a backward: nothing of any waits."""
    held = Holding(frozen(WHOLE, ["model.*"]), Layout(Mesh(dp_shard=8), "parameters"))
    tokens, policy = 65_536, replace(Policy(), reshard=False)
    found = memory(held, policy, BF16, Batch(seq_len=tokens), usable_bytes=10**11, kind="cuda")
    wide = 3 * 2 * WHOLE.ffn * tokens  # of a block on its way forward: gate, up and their product, in bf16
    assert wide < found.parts_bytes["activations"] <= wide + 2 * 4 * WHOLE.hidden * tokens
    short = memory(held, policy, BF16, Batch(seq_len=4096), usable_bytes=10**11, kind="cuda")
    assert short.parts_bytes["activations"] < 2 * 4 * WHOLE.hidden * 4096


PATTERNS: dict[str, tuple[str, ...]] = {
    "embedding": ("*embed*", "*wte*"),
    "embedding and norms": ("*embed*", "*wte*", "*norm*", "*ln_*"),
    "first block": ("*embed*", "*wte*", "*wpe*", "*.0.*"),
    "a block between": ("*.1.*",),
    "attention": ("*attn*", "*wte*", "*wpe*", "*embed*"),
    "mlp": ("*mlp*",),
    "up to values": ("*embed*", "*wte*", "*wpe*", "*.0.input_layernorm*", "*.0.ln_1*", "*.0.*.q_*", "*.0.*.k_*", "*.0.*.c_attn*"),
    "all but the last projections": ("*embed*", "*wte*", "*wpe*", "*norm*", "*ln_*", "*attn*", "*gate*", "*up_proj*", "*c_fc*"),
    "all but biases": ("*weight",),
    "all but the final norm": ("*embed*", "*wte*", "*wpe*", "*.[012].*"),
}


def kept_by_blocks(model_type: str, trained: dict[str, bool], layers: int) -> list[int]:
    """Bytes of distinct storages that the forward of each block saves, parameters and tables of positions aside."""
    torch = pytest.importorskip("torch")
    built = built_as_trained(config_of(model_type, layers), "float32")
    for name, parameter in built.named_parameters():
        parameter.requires_grad_(trained[name])
    outside = {p.untyped_storage().data_ptr() for p in built.parameters()}
    saved: list[dict[int, int]] = []
    alive: list[object] = []

    def keep(tensor):
        alive.append(tensor)
        saved[-1][tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def watched(forward):
        def run(*args, **kwargs):
            saved.append({})
            tables = kwargs.get("position_embeddings")
            alive.append(tables := () if tables is None else tables if isinstance(tables, tuple) else (tables,))
            outside.update(table.untyped_storage().data_ptr() for table in tables)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                return forward(*args, **kwargs)

        return run

    for module in (module for name, module in built.named_modules() if name.rpartition(".")[2].isdecimal()):
        module.forward = watched(module.forward)
    built.base_model(torch.zeros(BATCH, SEQ, dtype=torch.long), use_cache=False)
    return [sum(size for pointer, size in block.items() if pointer not in outside) for block in saved]


@pytest.mark.parametrize("patterns", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("model_type", [*DENSE, "phi3 all in sight", "gpt2", "gpt2-gelu_pytorch_tanh", "gpt2-relu"])
def test_blocks_keep_what_is_listed(model_type: str, patterns: tuple[str, ...]) -> None:
    model, found = froze(model_type, patterns)
    assert blocks_kept(model, Layout(), BATCH, SEQ, "float32", "none").fixed == sum(found), found


def froze(model_type: str, patterns: tuple[str, ...]) -> tuple[ModelSpec, list[int]]:
    """The frozen model, and what its blocks keep."""
    whole = described(model_type, 3)
    there = [pattern for pattern in patterns if any(fnmatchcase(t.name, pattern) for t in whole.tensors)]
    try:
        model = frozen(whole, there)
    except InputError:
        pytest.skip("nothing is left to train")
    return model, kept_by_blocks(model_type, {t.name: t.trained for t in model.parameters}, 3)


@pytest.mark.parametrize("pattern", ["embedding", "a block between", "attention", "mlp"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_sparse_blocks_keep_no_more_than_is_listed(model_type: str, pattern: str) -> None:
    """Those that a gradient reaches count as whole."""
    model, found = froze(model_type, PATTERNS[pattern])
    assert sum(found) <= blocks_kept(model, Layout(), BATCH, SEQ, "float32", "none").fixed
