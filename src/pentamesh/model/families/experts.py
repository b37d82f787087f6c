"""Sparse MLPs: experts of which a token meets a few, and the router that chooses them.

In memory the experts of a layer are one tensor a projection, gate and up in one; files mostly have one tensor an expert and projection. Names and
shapes are those of transformers' modules, checked against the model on the meta device; names in files against its conversion mapping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from pentamesh.model.dims import Acts, Dim, TensorSpec
from pentamesh.model.families.modules import CARRIED
from pentamesh.model.roles import Role
from pentamesh.model.spec import Experts

__all__ = ["SPARSE", "Sparse", "SparseMlp", "experts", "faults", "keeps_from_training"]

Config = Mapping[str, Any]

# What experts compute with; a dense MLP is transformers' own and takes any.
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")


@dataclass(frozen=True)
class Sparse:
    """How a family writes down its experts.

    count, ffn  the keys of how many a layer has, and of the width of one
    shared      the key of how many times that width every token meets beside them, empty where there is nothing beside them
    has         whether a layer, by its number, has experts
    router      the name of the router's module
    scores      as in `Experts`
    normed      whether the weights of a token's experts are made to add up to one: fixed by the code, or named by the config (a key)
    group_by    as in `Experts`, of families whose tokens may choose among groups
    wide        whether the router computes in float32, whatever the model does
    biased      whether a bias that is no parameter balances the loads
    adds        whether router and experts add biases to what they map; experts are then [in, out], and gate and up take turns
    mlp, each   what files call the MLP, and in it gate, up and down of each expert, which are not named where files have the tensors in memory
    """

    count: str
    ffn: str = "moe_intermediate_size"
    shared: str = ""
    has: Callable[[Config, int], bool] = lambda _config, _layer: True
    router: str = "gate"
    scores: Literal["softmax", "sigmoid", "softmax of chosen"] = "softmax"
    normed: bool | str = False
    group_by: Literal["", "best", "best two"] = ""
    wide: bool = False
    biased: bool = False
    adds: bool = False
    mlp: str = "mlp"
    each: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")

    @property
    def sizes(self) -> tuple[str, ...]:
        """The keys of sizes that a config of the family needs."""
        return (self.count, self.ffn, "num_experts_per_tok", *filter(None, [self.shared]))


def _at_steps(config: Config, layer: int) -> bool:
    return layer not in (config.get("mlp_only_layers") or ()) and (layer + 1) % config.get("decoder_sparse_step", 1) == 0


def _after_the_first(config: Config, layer: int) -> bool:
    return layer >= config["first_k_dense_replace"]


_DEEPSEEK: dict[str, Any] = {"count": "n_routed_experts", "shared": "n_shared_experts", "has": _after_the_first, "wide": True}
# Source: transformers, configuration_*.py, modeling_*.py and conversion_mapping.py of each.
SPARSE = {
    "mixtral": Sparse("num_local_experts", "intermediate_size", normed=True, mlp="block_sparse_moe", each=("w1", "w3", "w2")),
    "qwen3_moe": Sparse("num_experts", has=_at_steps, normed="norm_topk_prob"),
    "gpt_oss": Sparse("num_local_experts", "intermediate_size", router="router", scores="softmax of chosen", adds=True, each=()),
    "deepseek_v2": Sparse(**_DEEPSEEK, group_by="best"),
    "deepseek_v3": Sparse(**_DEEPSEEK, scores="sigmoid", normed="norm_topk_prob", group_by="best two", biased=True),
}


def experts(config: Config) -> Experts | None:
    """The experts of a config, None where no layer has any. Raises KeyError for a config without one of its sizes."""
    sparse = SPARSE.get(config["model_type"])
    layers = frozenset(layer for layer in range(config["num_hidden_layers"]) if sparse and sparse.has(config, layer))
    if not sparse or not layers:
        return None
    groups, groups_met = (config["n_group"], config["topk_group"]) if _grouped(config, sparse) else (1, 1)
    return Experts(
        count=config[sparse.count],
        per_token=config["num_experts_per_tok"],
        ffn=config[sparse.ffn],
        layers=layers,
        shared_ffn=config[sparse.shared] * config[sparse.ffn] if sparse.shared else 0,
        scores=sparse.scores,
        normed=bool(config.get(sparse.normed)) if isinstance(sparse.normed, str) else sparse.normed,
        scale=config.get("routed_scaling_factor", 1.0),
        groups=groups,
        groups_met=groups_met,
        group_by=sparse.group_by or "best",
        wide=sparse.wide,
        biased=sparse.biased,
    )


def _grouped(config: Config, sparse: Sparse) -> bool:
    """Whether tokens choose among groups: a method of DeepSeek-V2 asks for none."""
    return bool(sparse.group_by) and config.get("topk_method") != "greedy"


@dataclass(frozen=True)
class SparseMlp:
    """Router and experts of one layer. All work on the stream as it lies between blocks."""

    sparse: Sparse
    found: Experts
    hidden: Dim
    unit: str

    @property
    def path(self) -> str:
        return f"{self.unit}.mlp"

    @cached_property
    def choices(self) -> Dim:
        return Dim("choices", self.found.count)

    @cached_property
    def ffn(self) -> Dim:
        return Dim("ffn", self.found.ffn)

    def tensors(self) -> Iterator[TensorSpec]:
        """In the order of a forward pass."""
        yield from self._router()
        f, each = self.ffn.size, self.sparse.each
        gate_up = Dim("ffn", 2 * f, 1, () if self.sparse.adds else (f, f))
        yield from self._mapped("gate_up_proj", gate_up, self.hidden, each[:2])
        yield from self._mapped("down_proj", self.hidden, self.ffn, each[2:])

    def _router(self) -> Iterator[TensorSpec]:
        router = f"{self.sparse.router}.weight"
        renamed = self._in_files(router) if self.sparse.mlp != "mlp" else ()
        yield TensorSpec(f"{self.path}.{router}", (self.choices, self.hidden), CARRIED, "matmul", self.unit, file_names=renamed)
        if self.sparse.adds:
            yield TensorSpec(f"{self.path}.{self.sparse.router}.bias", (self.choices,), _on(self.choices), "bias", self.unit)

    def _mapped(self, name: str, out: Dim, into: Dim, in_files: tuple[str, ...]) -> Iterator[TensorSpec]:
        """What maps `into` to `out` in every expert."""
        path, experts, met = f"{self.path}.experts.{name}", Dim("experts", self.found.count), (self.found.per_token, self.found.count)
        dims = (experts, into, out) if self.sparse.adds else (experts, out, into)
        files = self._in_files(*(f"experts.{{}}.{own}.weight" for own in in_files))
        yield TensorSpec(path, dims, _on(into), "matmul", self.unit, file_names=files, met=met)
        if self.sparse.adds:
            yield TensorSpec(f"{path}_bias", (experts, out), _on(out), "bias", self.unit, met=met)

    def _in_files(self, *names: str) -> tuple[str, ...]:
        return tuple(f"{self.unit}.{self.sparse.mlp}.{name}" for name in names)

    def buffers(self) -> Iterator[TensorSpec]:
        """A bias for each expert that enters the choice alone: no gradient reaches it, loads move it."""
        if self.sparse.biased:
            name = f"{self.path}.{self.sparse.router}.e_score_correction_bias"
            yield TensorSpec(name, (self.choices,), None, "buffer", self.unit, trained=False)


def _on(dim: Dim) -> Acts:
    return Acts(Role.CARRY, ("batch", "seq", dim.name))


def keeps_from_training(config: Config) -> str:
    """What keeps the trainer from the experts of a config, empty where nothing does."""
    act, model_type = config.get("hidden_act", "silu"), config["model_type"]
    if model_type in SPARSE and model_type != "gpt_oss" and act not in ACTIVATIONS:
        return f"its experts compute with {act}, and are known to compute with {', '.join(ACTIVATIONS)}"
    if config.get("router_jitter_noise"):
        return "its routers see the stream with noise (router_jitter_noise), by other draws on every layout"
    return ""


def faults(config: Config) -> Iterator[tuple[str, str, str]]:
    """What is wrong with experts whose sizes are whole numbers: key, what, hint."""
    sparse, count, met = SPARSE[config["model_type"]], config[SPARSE[config["model_type"]].count], config["num_experts_per_tok"]
    if met > count:
        yield "num_experts_per_tok", f"num_experts_per_tok = {met} is more than {sparse.count} = {count}", "a token meets each expert once at most"
    yield from _faults_of_layers(config)
    if not isinstance(noise := config.get("router_jitter_noise", 0.0), float) or not 0 <= noise < 1:
        yield "router_jitter_noise", f"router_jitter_noise = {noise!r} is no share of what a router sees", "a share lies between 0.0 and 1.0"
    if not isinstance(weight := config.get("router_aux_loss_coef") or 0, int | float) or not 0 <= weight < math.inf:
        yield (
            "router_aux_loss_coef",
            f"router_aux_loss_coef = {weight!r} is not a number from 0",
            "it is what an auxiliary loss of the routers weighs",
        )
    if (method := config.get("topk_method", "greedy")) not in ("greedy", "group_limited_greedy") and config["model_type"] == "deepseek_v2":
        yield "topk_method", f"topk_method = {method!r} is not one that is known", "known are greedy, group_limited_greedy"
    elif _grouped(config, sparse):
        yield from _faults_of_groups(config, count, met, least=2 if sparse.group_by == "best two" else 1)


def _faults_of_layers(config: Config) -> Iterator[tuple[str, str, str]]:
    """Of the keys that say which layers have experts, and what files have beyond them."""
    layers, mend = config["num_hidden_layers"], "fetch the config.json again"
    for key, least in (("decoder_sparse_step", 1), ("first_k_dense_replace", 0), ("num_nextn_predict_layers", 0)):
        value = config.get(key, least)
        if not _is_whole(value, least):
            yield key, f"{key} = {value!r} is not a whole number from {least}", mend
        elif key == "num_nextn_predict_layers" and value > layers:
            yield key, f"{key} = {value} is more than num_hidden_layers = {layers}", mend
    listed = [] if config.get("mlp_only_layers") is None else config["mlp_only_layers"]
    if not isinstance(listed, list) or not all(_is_whole(layer, 0) for layer in listed):
        yield "mlp_only_layers", f"mlp_only_layers = {repr(listed)[:60]} is not a list of numbers of layers", mend


def _faults_of_groups(config: Config, count: int, met: int, least: int) -> Iterator[tuple[str, str, str]]:
    groups, groups_met = config.get("n_group"), config.get("topk_group")
    bad = {key: value for key, value in (("n_group", groups), ("topk_group", groups_met)) if not _is_whole(value, 1)}
    for key, value in bad.items():
        yield key, f"{key} = {value!r} is not a whole number from 1", "experts in one group say 1"
    if bad or groups is None or groups_met is None:
        return
    if count % groups or count // groups < least:
        what = f"n_group = {groups} does not divide n_routed_experts = {count} into groups of at least {least}"
        yield "n_group", what, "groups have as many experts each, and are told apart by the best of them"
    elif groups_met > groups:
        yield "topk_group", f"topk_group = {groups_met} is more than n_group = {groups}", "a token chooses among some of the groups"
    elif met > groups_met * (count // groups):
        what = f"num_experts_per_tok = {met} is more than the {groups_met * (count // groups)} experts of topk_group = {groups_met} groups"
        yield "num_experts_per_tok", what, "let tokens choose among more groups"


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
