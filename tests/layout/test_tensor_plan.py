"""Where tensors are cut over the tensor and expert axes follows from the table; transformers' own plans say the same, or a reason is given."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pentamesh.layout.mesh import Layout, Mesh
from pentamesh.layout.rules import cutting_axes, partial_axes
from pentamesh.model.dims import TensorSpec
from pentamesh.model.families import describe
from pentamesh.model.roles import Role
from pentamesh.model.spec import ModelSpec
from tests.proof.toys import TOYS

PLANNED = tuple(toy for toy in TOYS if TOYS[toy]["model_type"] != "gpt2")
TENSOR, EXPERT = Layout(Mesh(tp=2)), Layout(Mesh(dp_shard=2, ep=2), "parameters")

LOOKED_UP = "tokens are looked up in a cut vocabulary, where transformers has all of it on every rank"
NEVER_GATHERED = "the loss is made of cut logits, which transformers gathers"
BY_PARTS = "fused projections are cut part by part, where transformers cuts through them and gathers what they give"
WHOLE = "experts are whole to tensor ranks, among which the tokens are divided; transformers cuts each of them"
SUMMED_LATER = "what is pressed to a latent has a gradient that is summed once a step, where transformers sums that of the latent in every backward"
NOT_PLANNED = "transformers has no plan for this attention, and computes it whole on every rank"
SHARED = "a key head that all queries share is on every rank, where transformers would cut through it"
LATENTS = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")
ATTENTION = "layers.*.self_attn."


def reasons(model: ModelSpec) -> dict[str, str]:
    """Why what the table says of a module is not what transformers says."""
    found = {"lm_head": NEVER_GATHERED} | ({"embed_tokens": LOOKED_UP} if model.family != "gpt_oss" else {})
    if model.family in ("phi3", "glm4"):
        found |= {f"layers.*.mlp.{name}": BY_PARTS for name in ("gate_up_proj", "down_proj")}
    if model.family == "phi3":
        found |= {f"{ATTENTION}{name}": BY_PARTS for name in ("qkv_proj", "o_proj")}
    if model.experts and model.family != "gpt_oss":
        found |= {f"layers.*.mlp.experts{name}": WHOLE for name in ("", ".gate_up_proj", ".down_proj")}
    if model.latent:
        found |= {f"{ATTENTION}{name}": SUMMED_LATER for name in LATENTS}
    if model.family in ("gpt_oss", "deepseek_v3"):
        names = ("q_proj", "k_proj", "v_proj", "sinks", "o_proj") if model.family == "gpt_oss" else ("q_b_proj", "kv_b_proj", "o_proj")
        found |= {f"{ATTENTION}{name}": NOT_PLANNED for name in names}
    if model.num_kv_heads == 1:
        found |= {f"{ATTENTION}{name}": SHARED for name in ("k_proj", "v_proj")}
    return found


def planned(model: ModelSpec) -> dict[str, str]:
    """What the table says of every module that tensor ranks do not hold and compute alike, in transformers' words."""
    return {module(tensor): word for tensor in model.tensors if (word := said(tensor)) and not tensor.name.endswith("bias")}


def said(tensor: TensorSpec) -> str:
    cut = [position for position in range(len(tensor.dims)) if cutting_axes(tensor, position, Role.USE, TENSOR)]
    if not cut:
        return "replicated_with_grad_allreduce" if partial_axes(tensor, TENSOR) else ""
    return "embedding_rowwise" if tensor.kind == "lookup" else ("colwise", "rowwise")[cut[0]]


def module(tensor: TensorSpec) -> str:
    """As plans name it: without what weights of modules end with, one name for all layers."""
    return re.sub(r"\.\d+\.", ".*.", tensor.name.removeprefix("model.").removesuffix(".weight"))


def by_transformers(toy: str) -> tuple[dict[str, str], dict[str, str]]:
    """Its plans for the tensor and the expert axis, without what the toy does not have."""
    config: Any = AutoConfig.for_model(**TOYS[toy])
    with torch.device("meta"):
        head = AutoModelForCausalLM.from_config(config)._tp_plan.get("lm_head")
    plan = dict(config.base_model_tp_plan or {}) | ({"lm_head": head} if head else {})
    return plan, dict(getattr(config, "base_model_ep_plan", None) or {})


@pytest.mark.parametrize("toy", PLANNED)
def test_the_tensor_plan_is_transformers_or_says_why_not(toy: str) -> None:
    model = describe(TOYS[toy], toy)
    assert model is not None
    ours, (theirs, _), why = planned(model), by_transformers(toy), reasons(model)
    has = {module(tensor) for tensor in model.tensors} | ({"layers.*.mlp.experts"} if model.experts else set())
    different = {name for name in ours.keys() | (theirs.keys() & has) if ours.get(name) != theirs.get(name)}
    assert different == why.keys() & has
    assert len(ours) > 5


@pytest.mark.parametrize("toy", [toy for toy in PLANNED if "experts" in str(TOYS[toy])])
def test_the_expert_plan_is_transformers(toy: str) -> None:
    model = describe(TOYS[toy], toy)
    assert model is not None
    cut = {module(tensor) for tensor in model.tensors if cutting_axes(tensor, 0, Role.USE, EXPERT) == ("ep",)}
    assert cut == {name for name, style in by_transformers(toy)[1].items() if style == "grouped_gemm"}
    assert all(tensor.dims[0].name == "experts" for tensor in model.tensors if module(tensor) in cut)
