"""The lists of saved tensors against what autograd really keeps, byte for byte."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from pentamesh.cost.activations import again, block, kept, logits
from pentamesh.cost.saved import local_bytes
from pentamesh.layout.mesh import Layout, Mesh
from pentamesh.model.config import canonical
from pentamesh.model.families import describe
from pentamesh.model.families.llama import VARIATIONS
from pentamesh.model.spec import ModelSpec

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "sliding_window": 8,
    "pad_token_id": None,
}
GPT2 = {
    "n_embd": 64,
    "n_inner": 176,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 32,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
}
# A factor of weights other than 1 is a number that autograd keeps too.
SPARSE = {"moe_intermediate_size": 24, "num_experts_per_tok": 3}
LATENT = SPARSE | {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "q_lora_rank": 24,
    "num_key_value_heads": 8,
    "head_dim": None,
}
OWN = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": SPARSE | {"num_experts": 8, "norm_topk_prob": True},
    "qwen3_moe first dense": SPARSE | {"num_experts": 8, "norm_topk_prob": False, "mlp_only_layers": [0]},
    "gpt_oss": SPARSE | {"num_local_experts": 8},
    "deepseek_v2": LATENT | {"topk_method": "group_limited_greedy"},
    "deepseek_v2 all dense": LATENT | {"topk_method": "greedy", "q_lora_rank": None, "first_k_dense_replace": 9},
    "deepseek_v3": LATENT | {"norm_topk_prob": True},
    "deepseek_v3 all dense": LATENT | {"norm_topk_prob": True, "first_k_dense_replace": 9},
}
DENSE = [family for family in VARIATIONS if family not in OWN]
BATCH, SEQ = 2, 16


def config_of(name: str, layers: int = 2) -> dict[str, Any]:
    """The config of a family, with a window that is shorter than the sequence unless all is in sight, or of GPT-2 with the activation function
    behind the hyphen."""
    family, _, function = name.partition("-")
    if family != "gpt2":
        family, _, wide = family.partition(" ")
        window = {"sliding_window": None} if wide else {}
        own = {key: value for key, value in (CONFIG | OWN.get(name, window)).items() if value is not None or key in ("sliding_window", "q_lora_rank")}
        return canonical(own | {"model_type": family, "num_hidden_layers": layers, "pad_token_id": None})
    return GPT2 | {"model_type": family, "n_layer": layers, "activation_function": function or "gelu_new"}


def built_as_trained(config: dict[str, Any], dtype: str) -> Any:
    """transformers' modules as the trainer sets them up on one rank."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from pentamesh.run.attention import ATTENTION
    from pentamesh.run.experts import EXPERTS, dispatching
    from pentamesh.run.lean import keep_less
    from pentamesh.run.rotary import rotate_as_wide
    from pentamesh.run.router import route_by

    own = {"attn_implementation": ATTENTION, "experts_implementation": EXPERTS}
    built = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config), **own)
    model = describe(config, "toy")
    assert model is not None
    rotate_as_wide(built)
    keep_less(built)
    route_by(built, model)
    dispatching(built, "")
    return built.to(getattr(torch, dtype)).train()


def recorded_bytes(model_type: str, dtype: str, layers: int) -> int:
    """Bytes of distinct storages that a forward saves, parameters aside."""
    torch = pytest.importorskip("torch")
    built = built_as_trained(config_of(model_type, layers), dtype)
    parameters = {p.untyped_storage().data_ptr() for p in built.parameters()}
    saved, alive = {}, []

    def keep(tensor):
        alive.append(tensor)
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = built.base_model(torch.zeros(BATCH, SEQ, dtype=torch.long), use_cache=False)
    assert output.last_hidden_state.shape == (BATCH, SEQ, CONFIG["hidden_size"])
    return sum(size for pointer, size in saved.items() if pointer not in parameters)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", [*DENSE, "phi3 all in sight", "gpt2", "gpt2-gelu_pytorch_tanh", "gpt2-gelu", "gpt2-relu", *OWN])
def test_a_block_saves_what_is_listed(model_type: str, dtype: str) -> None:
    model = described(model_type)
    of_one_block = recorded_bytes(model_type, dtype, 2) - recorded_bytes(model_type, dtype, 1)
    listed = [s for s in block(model, Layout(), BATCH, SEQ, dtype, sparse=last_is_sparse(model)) if s.name not in PLACES]
    assert local_bytes(listed, Layout()) == of_one_block


# What autograd has, and not as saved tensors.
PLACES = ("order of rows", "arrangement of rows")


def described(model_type: str, layers: int = 2) -> ModelSpec:
    model = describe(config_of(model_type, layers), "toy")
    assert model is not None
    return model


def last_is_sparse(model: ModelSpec) -> bool:
    return model.experts is not None and model.num_layers - 1 in model.experts.layers


def allocated_bytes(model_type: str, dtype: str, layers: int, recompute: str) -> int:
    """Bytes that a forward under checkpointing leaves allocated, the state of the random generator that each block puts aside not counted."""
    torch = pytest.importorskip("torch")
    from pentamesh.layout.policy import Policy
    from pentamesh.run.recompute import recompute as set_up

    built = built_as_trained(config_of(model_type, layers), dtype)
    set_up(built, Policy(recompute=recompute), torch.device("cpu"))  # type: ignore[arg-type]
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long)
    built.base_model(ids, use_cache=False)
    gc.collect()  # what earlier cases left is not to go meanwhile
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=False) as profiler:
        output = built.base_model(ids, use_cache=False)
    assert output.last_hidden_state.requires_grad
    changes = [e.nbytes() for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return sum(changes) - layers * torch.get_rng_state().nbytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize(
    "model_type", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "phi3 all in sight", "glm4", "gpt2-gelu_pytorch_tanh", *OWN]
)
def test_a_checkpointed_block_keeps_what_is_listed(model_type: str, recompute: Any, dtype: str) -> None:
    model = described(model_type)
    of_one_block = allocated_bytes(model_type, dtype, 3, recompute) - allocated_bytes(model_type, dtype, 2, recompute)
    assert local_bytes(kept(model, Layout(), BATCH, SEQ, dtype, recompute, sparse=last_is_sparse(model)), Layout()) == of_one_block


def test_what_leaves_the_gpu_is_the_input_of_each_block() -> None:
    """Hooks around torch's checkpoint, where offloading has them, see what a block keeps and nothing else: no weights, nothing twice."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from pentamesh.layout.policy import Policy
    from pentamesh.run.attention import ATTENTION
    from pentamesh.run.recompute import recompute

    config = transformers.AutoConfig.for_model("qwen3", **CONFIG)
    built = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).train()
    recompute(built, Policy(recompute="full", offload=True), torch.device("cpu"))
    block, seen = built.model.layers[1], []

    def keep(tensor):
        seen.append(tensor.nbytes)
        return tensor

    stream = torch.randn(BATCH, SEQ, CONFIG["hidden_size"], requires_grad=True)
    rotary = built.model.rotary_emb(stream, torch.arange(SEQ)[None])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(stream, position_embeddings=rotary)
    model = describe(CONFIG | {"model_type": "qwen3"}, "toy")
    assert model is not None
    assert [n for n in seen if n] == [local_bytes(kept(model, Layout(), BATCH, SEQ, "float32", "full"), Layout())]


def test_what_is_computed_again_is_the_rest() -> None:
    model = describe(CONFIG | {"model_type": "qwen3"}, "toy")
    assert model is not None
    sizes = {r: local_bytes(again(model, Layout(), BATCH, SEQ, "bfloat16", r), Layout()) for r in ("none", "selective", "full")}
    assert sizes["none"] == 0
    entered = 2 * BATCH * SEQ * 64
    assert sizes["full"] == local_bytes(block(model, Layout(), BATCH, SEQ, "bfloat16"), Layout()) - entered
    there = local_bytes(
        tuple(s for s in kept(model, Layout(), BATCH, SEQ, "bfloat16", "selective") if s in block(model, Layout(), BATCH, SEQ, "bfloat16")), Layout()
    )
    assert sizes["selective"] == sizes["full"] + entered - there


def test_tensor_and_context_cut_activations() -> None:
    model = describe(CONFIG | {"model_type": "llama"}, "toy")
    assert model is not None

    def size(layout: Layout) -> int:
        return local_bytes(block(model, layout, BATCH, SEQ, "bfloat16"), layout)

    whole = size(Layout())
    assert size(Layout(Mesh(cp=2))) * 2 == whole
    assert size(Layout(Mesh(dp_shard=4), "parameters")) == whole  # a micro-batch is per data rank
    assert whole / 2 < size(Layout(Mesh(tp=2))) < whole  # the residual stream stays whole
    assert size(Layout(Mesh(tp=2), sequence_parallel=True)) < size(Layout(Mesh(tp=2)))
    # Of half the vocabulary logits and their gradients as matmuls read them; beside them those of the stream and of half the head.
    tokens, cut = BATCH * SEQ, Layout(Mesh(tp=2))
    assert local_bytes(logits(model, cut, BATCH, SEQ, "bfloat16", "cpu"), cut) == 6 * tokens * 16 + 2 * tokens * 64 + 2 * 16 * 64
    assert local_bytes(kept(model, Layout(), BATCH, SEQ, "bfloat16", "full"), Layout()) == 2 * BATCH * SEQ * 64
