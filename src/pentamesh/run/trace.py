"""The helper process that reads an architecture: `python -m pentamesh.run.trace CONFIG` prints its facts as JSON.

Planning imports neither torch nor transformers. For an architecture that no family describes it starts this module once, in a process of its
own (see `pentamesh.model.traced`), and keeps what comes back. Modules are built on the meta device: no weights, no code from outside.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from pentamesh.model.config import as_built
from pentamesh.model.facts import SCHEMA, VERSION

__all__ = ["on_meta", "traced"]

# How configs spell the number of experts that a token meets.
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "num_experts_per_token")
EVERY = (1, 1)
# Values of `layer_types` whose cost grows with the tokens, not with their square.
NO_SOFTMAX = ("linear_attention", "conv", "moe")


def on_meta(config: dict[str, Any]) -> PreTrainedModel:
    """The modules that a config.json describes, on the meta device: with its other towers where it names the class that has them."""
    built_as = AutoConfig.for_model(**deepcopy(as_built(config)))  # it writes into the mappings it is given
    whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config["model_type"])
    auto = AutoModelForImageTextToText if whole in (config.get("architectures") or ()) else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(built_as)


def traced(config: dict[str, Any]) -> dict[str, Any]:
    """The facts of a config.json as `pentamesh.model.facts` reads them: sizes, and every parameter's name, kind and shape."""
    built = on_meta(config)
    text = built.config.get_text_config()
    first = {id(p): name for name, p in built.named_parameters()}
    every = built.named_parameters(remove_duplicate=False)
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "transformers": transformers.__version__,
        "builds": type(built).__name__,
        "sizes": _sizes(text),
        "windows": _windows(text),
        "tied": {name: first[id(p)] for name, p in every if first[id(p)] != name},
        "untrainable": _untrainable(built, text),
        "parts": _parts(built, _experts_per_token(text)),
    }


# Sizes


def _sizes(text: PretrainedConfig) -> dict[str, int]:
    heads = _value(text, "num_attention_heads") or 0
    return {
        "hidden": _value(text, "hidden_size"),
        "num_layers": _value(text, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": _value(text, "num_key_value_heads") or heads,
        "head_dim": _head_dim(text, heads),
        "vocab": _value(text, "vocab_size"),
        "max_positions": _value(text, "max_position_embeddings") or 0,
    }


def _value(text: PretrainedConfig, key: str) -> Any:
    """A value of the config as a whole, whatever its architecture calls it: attributes refuse where layers differ in it."""
    return text.to_dict().get(text.attribute_map.get(key, key))


def _head_dim(text: PretrainedConfig, heads: int) -> int:
    """Elements of a head; where those of queries and values differ (multi-head latent attention) their mean, which the FLOP go with."""
    nope, rope, value = (_value(text, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    if nope and rope and value:
        return (nope + rope + value) // 2
    return _value(text, "head_dim") or (_value(text, "hidden_size") // heads if heads else 0)


def _windows(text: PretrainedConfig) -> list[int | None]:
    """Per layer how many tokens one token attends to: None for all before it, 0 where there is no softmax attention."""
    layers = _value(text, "num_hidden_layers")
    if not _value(text, "num_attention_heads"):
        return [0] * layers
    sliding = _value(text, "sliding_window") if _value(text, "use_sliding_window") is not False else None
    spans = {"sliding_attention": sliding, "chunked_attention": _value(text, "attention_chunk_size")} | dict.fromkeys(NO_SOFTMAX, 0)
    types = _value(text, "layer_types")
    return [spans.get(kind) for kind in types] if types else [sliding] * layers


def _experts_per_token(text: PretrainedConfig) -> int | None:
    return next((value for key in EXPERTS_PER_TOKEN if isinstance(value := _value(text, key), int)), None)


def _untrainable(built: PreTrainedModel, text: PretrainedConfig) -> str:
    """What keeps the trainer, which computes attention by torch's fused kernel and reads files tensor by tensor, from this architecture."""
    if text is not built.config:
        return "it has towers for more than text"
    if get_checkpoint_conversion_mapping(built.config.model_type):
        return "its files hold other tensors than its modules, which need a map of names"
    if _value(text, "attn_logit_softcapping"):
        return "its attention caps logits, which torch's fused attention leaves out in silence"
    if not built._supports_sdpa:
        return "its attention is not one that torch's fused kernel computes"
    dropout = [key for key, value in text.to_dict().items() if ("dropout" in key or "pdrop" in key) and isinstance(value, float) and value > 0]
    return f"it drops activations at random ({', '.join(dropout)}), which a resumed run would not repeat" if dropout else ""


# Parameters


def _parts(built: PreTrainedModel, per_token: int | None) -> list[dict[str, Any]]:
    """Parameters in the order of their modules: single ones, and stacks of blocks, of which equal ones are written once."""
    stacks = _stacks(built)
    parts: list[dict[str, Any]] = []
    for name, described in _described(built, per_token):
        path = next((path for path in stacks if name.startswith(f"{path}.")), None)
        if path is None:
            if not parts or "path" in parts[-1]:
                parts.append({"tensors": {}})
            parts[-1]["tensors"][name] = described
            continue
        if not parts or parts[-1].get("path") != path:
            parts.append({"path": path, "blocks": {}})
        index, _, inner = name.removeprefix(f"{path}.").partition(".")
        parts[-1]["blocks"].setdefault(int(index), {})[inner] = described
    return [_folded(part) if "path" in part else part for part in parts]


def _folded(part: dict[str, Any]) -> dict[str, Any]:
    """A stack with its distinct blocks, and for each layer which of them it is."""
    kinds: list[dict[str, Any]] = []
    order = []
    for index, block in sorted(part["blocks"].items()):
        if block not in kinds:
            kinds.append(block)
        order.append([index, kinds.index(block)])
    return {"path": part["path"], "order": order, "kinds": kinds}


def _stacks(built: nn.Module) -> list[str]:
    """The paths of the outermost lists of modules: their members are gathered one at a time."""
    found: list[str] = []
    for path, module in built.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer in found):
            found.append(path)
    return found


def _described(built: PreTrainedModel, per_token: int | None) -> Iterator[tuple[str, list[Any]]]:
    """Every parameter under each of its names: its kind, its shape, and where not every token meets it, how many of its copies one does."""
    text = [id(p) for module in (built.get_decoder(), built.get_output_embeddings()) if module is not None for p in module.parameters()]
    for path, module in built.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}".lstrip(".")
            met = _met(built, full, module, parameter, per_token) if id(parameter) in text else (0, 1)
            yield full, [_kind(module, name, parameter), list(parameter.shape), *([list(met)] if met != EVERY else [])]


def _kind(module: nn.Module, name: str, parameter: nn.Parameter) -> str:
    if isinstance(module, nn.Embedding) or re.search(r"embed|table", name):
        return "lookup"
    if name.endswith("bias"):
        return "bias"
    return "matmul" if parameter.dim() > 1 else "scale"


def _met(built: nn.Module, full: str, module: nn.Module, parameter: nn.Parameter, per_token: int | None) -> tuple[int, int]:
    """Experts that a token meets, of how many; (1, 1) for what all tokens meet."""
    listed = re.match(r"(.*\bexperts)\.\d+\.", full)
    if not listed and not (type(module).__name__.endswith("Experts") and parameter.dim() > 1):
        return EVERY
    if per_token is None:
        raise ValueError(f"{full} is of an expert, and no {' or '.join(EXPERTS_PER_TOKEN)} says how many of them a token meets")
    members = built.get_submodule(listed[1]) if listed else None
    return per_token, len(members) if isinstance(members, nn.ModuleList) else parameter.shape[0]


def main(config: Path) -> None:
    """Print the facts of a config.json; end with 1 and the reason, in one line on stderr, where transformers cannot build it."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    try:
        sys.stdout.write(json.dumps(traced(json.loads(config.read_text(encoding="utf-8")))))
    except Exception as error:  # whatever the architecture's own code raises about a config
        said = (str(error).splitlines() or [""])[0]
        sys.stderr.write(f"{type(error).__name__}: {said}"[:500])
        raise SystemExit(1) from None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
