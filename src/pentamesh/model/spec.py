"""ModelSpec: a model as data - its tensors with named dims, in the order in which a forward pass meets them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, Literal, NamedTuple

from pentamesh.model.dims import TensorSpec

__all__ = ["Experts", "Kept", "Latent", "ModelSpec", "Sublayer", "Unit"]


class Sublayer(NamedTuple):
    """One branch of a block: it is entered from the residual stream and leaves onto it once. Shared experts are an `mlp` beside the `experts`."""

    layer: int
    kind: str  # attention | experts | mlp


@dataclass(frozen=True, eq=False)
class Unit:
    """One kind of unit (the root "" or a block), how many the model has, the tensors of one, and whether a gradient reaches it. Equal to itself
    only, as a key of caches."""

    name: str
    tensors: tuple[TensorSpec, ...]
    count: int
    reached: bool = True

    @property
    def is_root(self) -> bool:
        return not self.name


@dataclass(frozen=True)
class Experts:
    """The experts of a model's sparse layers, and how each token comes to some of them.

    count, per_token    how many a layer has, and how many of them a token meets
    ffn                 the width of one
    layers              the layers that have them; others have a dense MLP
    shared_ffn          the width of the dense MLP that every token of such a layer meets beside them, 0 where there is none
    scores              of the router's logits: `softmax` over all, `sigmoid` of each, or `softmax of chosen` over those of the chosen alone
    normed, scale       whether the weights of a token's experts are made to add up to one, and by what they are multiplied then
    groups, groups_met  a token chooses among the best `groups_met` of `groups` of neighbouring experts (1 of 1: among all)
    group_by            what tells the best groups: the `best` score in each, or the sum of its `best two`
    wide                whether the router computes logits in float32, whatever the model does
    biased              whether a bias of each expert, which balances their loads, enters the choice but not the weights
    """

    count: int
    per_token: int
    ffn: int
    layers: frozenset[int]
    shared_ffn: int = 0
    scores: Literal["softmax", "sigmoid", "softmax of chosen"] = "softmax"
    normed: bool = False
    scale: float = 1.0
    groups: int = 1
    groups_met: int = 1
    group_by: Literal["best", "best two"] = "best"
    wide: bool = False
    biased: bool = False


class Latent(NamedTuple):
    """The widths that multi-head latent attention presses tokens into: of queries (0 where these are projected at once), and of keys with values; and
    of each head's part that positions rotate, which all heads' keys share."""

    queries: int
    keys: int
    rotated: int


class Kept(NamedTuple):
    """What autograd keeps of one token in a mean block, in elements: matmuls' inputs and outputs beside the stream, and what norms scale."""

    by_matmuls: int
    by_norms: int


@dataclass(frozen=True)
class ModelSpec:
    """What is trained.

    name          as the user wrote it, resolved
    family        the described family, or "generic": tensors without names for their dims, data axes only
    config        the config.json as read, for whoever builds the modules
    tensors       every parameter, tied ones under both names, in forward order
    windows       per layer how many tokens one token attends to (None: all before it; 0: no softmax attention); empty where all see all
    steady        up to how many positions rotary frequencies are the same whatever a micro-batch holds; None where they always are
    rotary        the width of every table of cosines that positions are rotated by; empty where none is
    logit_cap     where logits saturate, None where they do not; score_cap of attention's scores
    score_drop    the share of attention's weights that are dropped at random
    value_dim     elements of a head's values where they are not as many as `head_dim`, those of its queries and keys; else 0
    latent        of attention whose keys and values are pressed into a latent, its widths
    experts       of a model with sparse layers, what they are; `ffn` is then the width of dense layers, 0 where there are none
    buffers       what is no parameter and yet in the model's files, whole on every rank; of the kind `buffer`
    unbuilt       what names in its files begin with where they are of layers that no modules are built for
    kept          of a generic model, from which its activations are estimated; a described family lists them
    untrainable   what keeps the trainer from it; empty where nothing does
    is_assumed    whether the config is the catalogue's and not the model's own
    """

    name: str
    family: str
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    max_positions: int
    tensors: tuple[TensorSpec, ...]
    config: dict[str, Any] = field(repr=False, default_factory=dict)
    notes: tuple[str, ...] = ()
    windows: tuple[int | None, ...] = ()
    steady: int | None = None
    rotary: tuple[int, ...] = ()
    logit_cap: float | None = None
    score_cap: float | None = None
    score_drop: float = 0.0
    value_dim: int = 0
    latent: Latent | None = None
    experts: Experts | None = None
    buffers: tuple[TensorSpec, ...] = ()
    unbuilt: tuple[str, ...] = ()
    kept: Kept | None = None
    untrainable: str = ""
    is_assumed: bool = False

    def __hash__(self) -> int:
        """Of what tells models apart at a glance: hashing thousands of tensors would take longer than what is remembered under it."""
        return hash((self.name, self.num_layers, len(self.tensors)))

    @property
    def is_described(self) -> bool:
        """Whether a family of ours says what its dims are; of a generic model only shapes are known."""
        return self.family != "generic"

    @property
    def given_dim(self) -> int:
        """Elements of what a head gives: as many as its values have."""
        return self.value_dim or self.head_dim

    @cached_property
    def parameters(self) -> tuple[TensorSpec, ...]:
        """The tensors that own storage: tied ones once, under the first name."""
        return tuple(t for t in self.tensors if t.tied_to is None)

    @cached_property
    def num_parameters(self) -> int:
        return sum(t.numel for t in self.parameters)

    @cached_property
    def units(self) -> dict[str, tuple[TensorSpec, ...]]:
        """Parameters by the module that is gathered as one; the root, "", holds embedding, final norm and head."""
        ordered = sorted(self.parameters, key=lambda t: t.unit)
        return {unit: tuple(group) for unit, group in groupby(ordered, key=lambda t: t.unit)}

    @cached_property
    def num_trained_parameters(self) -> int:
        return sum(t.numel for t in self.parameters if t.trained)

    @cached_property
    def first_trained(self) -> int:
        """The place among `parameters` of the first that is trained, from which on there are gradients."""
        return next((place for place, t in enumerate(self.parameters) if t.trained), 0)

    @cached_property
    def reached(self) -> frozenset[str]:
        """The units that a gradient reaches: the root, where the loss is, and every block from the first trained parameter on."""
        return frozenset(("", *(t.unit for t in self.parameters[self.first_trained :])))

    @cached_property
    def _alike(self) -> list[list[tuple[TensorSpec, ...]]]:
        """The units, the root first: together those whose tensors have the same kinds and dims, meet the same activations and are trained alike."""
        found: dict[tuple[object, ...], list[tuple[TensorSpec, ...]]] = {}
        for name, tensors in self.units.items():
            key = (bool(name), name in self.reached, *((t.kind, t.dims, t.acts_on, t.trained) for t in tensors))
            found.setdefault(key, []).append(tensors)
        return list(found.values())

    @cached_property
    def kinds(self) -> tuple[Unit, ...]:
        """The distinct units, the root first: of those that are alike the first, counted as often as it occurs."""
        return tuple(Unit(name := alike[0][0].unit, alike[0], len(alike), name in self.reached) for alike in self._alike)

    @cached_property
    def first_alike(self) -> dict[str, TensorSpec]:
        """For each parameter, by its name, the one in its place in the first unit of its kind."""
        return {t.name: first for alike in self._alike for tensors in alike for first, t in zip(alike[0], tensors, strict=True)}

    @cached_property
    def block(self) -> tuple[TensorSpec, ...]:
        """The parameters of the first block; all blocks of a dense family are alike."""
        first = next((t.unit for t in self.tensors if t.unit), None)
        return self.units[first] if first else ()

    @cached_property
    def norms_what_it_adds(self) -> bool:
        """Whether what a sublayer leaves is normed before it is added to the stream."""
        return bool(self.block) and len(self.block[-1].dims) == 1 and self.block[-1].kind != "bias"

    @cached_property
    def learns_positions(self) -> bool:
        """Whether each position is looked up in a table, beyond whose end there is none."""
        return any(t.kind == "lookup" and t.dims[0].name == "positions" for t in self.tensors)

    @cached_property
    def sublayers(self) -> tuple[Sublayer, ...]:
        """In the order of a forward pass."""
        dense, sparse = ("attention", "mlp"), ("attention", "experts")
        if self.experts and self.experts.shared_ffn:
            sparse = (*sparse, "mlp")
        has = self.experts.layers if self.experts else frozenset()
        return tuple(Sublayer(layer, kind) for layer in range(self.num_layers) for kind in (sparse if layer in has else dense))

    @cached_property
    def matmul_parameters(self) -> int:
        """Parameters that multiply each token: every projection and the head (tied or not), of experts those that a token meets; not the
        embedding's lookup."""
        return sum(t.met_numel for t in self.tensors if t.kind == "matmul")

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that a token of text meets: all but the other experts, and towers for what is not text."""
        return sum(t.met_numel for t in self.parameters)

    def attention_flop_per_token(self, seq_len: int) -> int:
        """FLOP of scores and weighted values, forward and backward: 12 (heads * head_dim) per token attended to, in each layer; of heads whose values
        have other sizes 6 of each."""
        attended = sum(seq_len if w is None else min(seq_len, w) for w in self.windows) if self.windows else self.num_layers * seq_len
        return 6 * attended * self.num_heads * (self.head_dim + self.given_dim)

    def flop_per_token(self, seq_len: int, *, causal: bool = False) -> float:
        """Model FLOP of forward and backward per token: 6 per matmul parameter it meets and 12 L s (heads * head_dim) of attention.

        Source: PaLM (arXiv 2204.02311) appendix B; `causal` halves the attention term, as some sources do.
        """
        return 6 * self.matmul_parameters + self.attention_flop_per_token(seq_len) / (2 if causal else 1)
