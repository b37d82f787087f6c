"""Multi-head latent attention (DeepSeek): keys and values of all heads are unfolded from one latent a token, queries mostly from another.

What presses tokens into latents belongs to no head: every tensor rank computes it whole, for its own heads, which give only their part of its
gradient. Of the keys a part is not pressed but rotated by positions; all heads share it. Source: arXiv 2405.04434 section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pentamesh.model.dims import Acts, Dim, TensorSpec
from pentamesh.model.families.modules import linear
from pentamesh.model.roles import Role
from pentamesh.model.spec import Latent

__all__ = ["OPTIONAL_SIZES", "SIZES", "LatentAttention", "faults"]

SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
OPTIONAL_SIZES = ("q_lora_rank",)  # null: queries are projected at once


@dataclass(frozen=True)
class LatentAttention:
    """The attention of a config. Raises KeyError for a config without one of its sizes."""

    config: dict[str, Any]
    hidden: Dim

    @cached_property
    def widths(self) -> Latent:
        return Latent(self.config.get("q_lora_rank") or 0, self.config["kv_lora_rank"], self.config["qk_rope_head_dim"])

    @property
    def head_dim(self) -> int:
        """Of queries and keys."""
        return self.config["qk_nope_head_dim"] + self.widths.rotated

    @property
    def value_dim(self) -> int:
        return self.config["v_head_dim"]

    def heads(self, head_dim: int) -> Dim:
        return Dim("heads", self.config["num_attention_heads"] * head_dim, head_dim)

    def tensors(self, unit: str, bias: bool) -> Iterator[TensorSpec]:
        """In the order of a forward pass."""
        path, queries, keys = f"{unit}.self_attn", self.heads(self.head_dim), self.heads(self.config["qk_nope_head_dim"] + self.value_dim)
        q_latent, kv_latent = (Dim(name, size) for name, size in (("q_latent", self.widths.queries), ("kv_latent", self.widths.keys)))
        if q_latent.size:
            yield from self._pressed(f"{path}.q_a_proj", f"{path}.q_a_layernorm", q_latent, q_latent, bias, unit)
            yield from linear(f"{path}.q_b_proj", queries, q_latent, False, unit)
        else:
            yield from linear(f"{path}.q_proj", queries, self.hidden, False, unit)
        with_rotated = Dim("kv_latent", kv_latent.size + self.widths.rotated, 1, (kv_latent.size, self.widths.rotated))
        yield from self._pressed(f"{path}.kv_a_proj_with_mqa", f"{path}.kv_a_layernorm", with_rotated, kv_latent, bias, unit)
        yield from linear(f"{path}.kv_b_proj", keys, kv_latent, False, unit)
        yield from linear(f"{path}.o_proj", self.hidden, self.heads(self.value_dim), bias, unit)

    def _pressed(self, path: str, norm: str, out: Dim, latent: Dim, bias: bool, unit: str) -> Iterator[TensorSpec]:
        """A projection to a latent (and what comes with it), and the norm of the latent."""
        yield from linear(path, out, self.hidden, bias, unit, readers=("heads",))
        yield TensorSpec(f"{norm}.weight", (latent,), Acts(Role.USE, ("batch", "seq", "heads", latent.name)), "scale", unit)


def faults(model_type: str, size: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What is wrong with sizes that are whole numbers: key, what, hint."""
    heads, hidden = size["num_attention_heads"], size["hidden_size"]
    if (kv_heads := size.get("num_key_value_heads", heads)) != heads:
        what = f"num_key_value_heads = {kv_heads} is not num_attention_heads = {heads}: every head has its own keys from the latent"
        yield "num_key_value_heads", what, "give as many, or leave the key out"
    if size["qk_rope_head_dim"] % 2:
        yield "qk_rope_head_dim", f"qk_rope_head_dim = {size['qk_rope_head_dim']} is odd, and rotary positions turn pairs", "use an even one"
    if model_type == "deepseek_v2" and hidden % heads:
        yield "hidden_size", f"hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}", "transformers asks for one: mend the sizes"
