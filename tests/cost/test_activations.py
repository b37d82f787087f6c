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
BATCH, SEQ = 2, 16


def config_of(name: str, layers: int = 2) -> dict[str, Any]:
    """The config of a family, with a window that is shorter than the sequence unless all is in sight, or of GPT-2 with the activation function
    behind the hyphen."""
    family, _, function = name.partition("-")
    if family != "gpt2":
        family, _, wide = family.partition(" ")
        return canonical(CONFIG | {"model_type": family, "num_hidden_layers": layers} | ({"sliding_window": None} if wide else {}))
    return GPT2 | {"model_type": family, "n_layer": layers, "activation_function": function or "gelu_new"}


def recorded_bytes(model_type: str, dtype: str, layers: int) -> int:
    """Bytes of distinct storages that a forward saves, parameters aside."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from pentamesh.run.attention import ATTENTION
    from pentamesh.run.lean import keep_less

    config = transformers.AutoConfig.for_model(**config_of(model_type, layers))
    built = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).to(getattr(torch, dtype))
    keep_less(built)
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
@pytest.mark.parametrize("model_type", [*VARIATIONS, "phi3 all in sight", "gpt2", "gpt2-gelu_pytorch_tanh", "gpt2-gelu", "gpt2-relu"])
def test_a_block_saves_what_is_listed(model_type: str, dtype: str) -> None:
    model = describe(config_of(model_type), "toy")
    assert model is not None
    of_one_block = recorded_bytes(model_type, dtype, 2) - recorded_bytes(model_type, dtype, 1)
    assert local_bytes(block(model, Layout(), BATCH, SEQ, dtype), Layout()) == of_one_block


def allocated_bytes(model_type: str, dtype: str, layers: int, recompute: str) -> int:
    """Bytes that a forward under checkpointing leaves allocated, the state of the random generator that each block puts aside not counted."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from pentamesh.layout.policy import Policy
    from pentamesh.run.attention import ATTENTION
    from pentamesh.run.lean import keep_less
    from pentamesh.run.recompute import recompute as set_up

    config = transformers.AutoConfig.for_model(**config_of(model_type, layers))
    built = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).to(getattr(torch, dtype)).train()
    keep_less(built)
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
    "model_type", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "phi3 all in sight", "glm4", "gpt2-gelu_pytorch_tanh"]
)
def test_a_checkpointed_block_keeps_what_is_listed(model_type: str, recompute: Any, dtype: str) -> None:
    model = describe(config_of(model_type), "toy")
    assert model is not None
    of_one_block = allocated_bytes(model_type, dtype, 3, recompute) - allocated_bytes(model_type, dtype, 2, recompute)
    assert local_bytes(kept(model, Layout(), BATCH, SEQ, dtype, recompute), Layout()) == of_one_block


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
