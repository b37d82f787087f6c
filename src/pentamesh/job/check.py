"""What is wrong with a section as it was written: keys that are not declared, values that are not of their kind. In our own words."""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from pentamesh.errors import Problem
from pentamesh.job.job import MAX_COUNT, Job, Section
from pentamesh.job.written import KeyPath, dotted
from pentamesh.units import parse_bytes, parse_count

__all__ = ["expected", "faults", "sections"]

# Words of other trainers for what is called otherwise here.
OTHER_WORDS = {
    "learning_rate": "optimizer.lr",
    "model_name_or_path": "model.name",
    "base_model": "model.name",
    "num_train_epochs": "training.epochs",
    "num_epochs": "training.epochs",
    "max_steps": "training.steps",
    "max_seq_length": "batch.seq_len",
    "max_length": "batch.seq_len",
    "sequence_len": "batch.seq_len",
    "per_device_train_batch_size": "batch.micro_batch",
    "micro_batch_size": "batch.micro_batch",
    "batch_size": "batch.micro_batch",
    "gradient_accumulation_steps": "batch.global_batch",
    "grad_accum": "batch.global_batch",
    "gradient_checkpointing": "layout.activation_checkpointing",
    "torch_compile": "training.compile",
    "activation_cpu_offload": "layout.activation_offload",
    "activation_offloading": "layout.activation_offload",
    "max_norm": "optimizer.max_grad_norm",
    "lr_scheduler_type": "optimizer.schedule",
    "output_dir": "logging.folder",
    "save_steps": "checkpoint.every",
    "save_interval": "checkpoint.every",
    "every_n_train_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "keep_latest_k": "checkpoint.keep",
    "save_retain_interval": "checkpoint.keep_every",
    "load_best_model_at_end": "checkpoint.keep_best",
    "save_top_k": "checkpoint.keep_best",
    "save_best": "checkpoint.keep_best",
    "dataset": "data.train",
    "dataset_name": "data.train",
    "dataset_config": "data.subset",
    "dataset_split": "data.split",
    "report_to": "logging.tensorboard",
    "train_file": "data.train",
    "bf16": "precision",
    "sample_packing": "batch.packing",
    "packed_sequence": "batch.packing",
    "length_grouped_sampling": "batch.group_by_length",
    "push_to_hub_model_id": "checkpoint.push_to_hub",
    "hub_model_id": "checkpoint.push_to_hub",
    "hub_private_repo": "checkpoint.private",
    "freeze_layers": "training.freeze",
    "frozen_parameters": "training.freeze",
    "output_router_logits": "experts.balance",
    "moe_router_load_balancing_type": "experts.balance",
    "load_balance_type": "experts.balance",
    "router_aux_loss_coef": "experts.loss_weight",
    "moe_aux_loss_coeff": "experts.loss_weight",
    "aux_loss_alpha": "experts.loss_weight",
    "moe_router_bias_update_rate": "experts.bias_step",
    "load_balance_coeff": "experts.bias_step",
}
OTHER_VALUES = {
    "full": "parameters",
    "full_shard": "parameters",
    "fsdp": "parameters",
    "zero3": "parameters",
    "hybrid_shard": "parameters",
    "zero2": "gradients",
    "zero1": "optimizer",
    "ddp": "none",
    "bfloat16": "bf16",
    "float32": "fp32",
    "adam": "adamw",
    "wsd": "constant",
}


def faults(section: type[Section], raw: Any, at: Callable[[KeyPath], str], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Problem]]:
    """The problems of `raw` as a `section`, each with the path of the key that is at fault."""
    if not isinstance(raw, Mapping):
        keys = ", ".join(section.model_fields)
        what = f"{_called(path) if path else '`the job`'} is a section of keys, not {_shown(raw)}"
        yield path, Problem(what, at(path), f"its keys are {keys}")
        return
    for key, value in raw.items():
        inner = (*path, str(key))
        field = section.model_fields.get(str(key))
        if field is None:
            yield inner, Problem(f"`{key}` is not a key of {_called(path)}", at(inner), _meant(str(key), section))
        elif (nested := _section_of(field.annotation)) and (isinstance(value, Mapping) or field.annotation is nested):
            yield from faults(nested, value, at, inner)
        elif entries := _entries(field.annotation, value):
            yield from _entry_faults(field, entries, value, at, inner)
        elif (listed := _listed_in(field.annotation)) and isinstance(value, list) and value:
            for i, item in enumerate(value):
                yield from faults(listed, item, at, (*inner, f"[{i}]"))
        elif not _fits(field, value):
            yield inner, Problem(f"{key} = {_shown(value)} is not {expected(field)}", at(inner), _cure(field, value))
    for key, field in section.model_fields.items():
        if field.is_required() and key not in raw:
            yield (*path, key), Problem(f"{_called(path)} lacks `{key}`", at(path), f"{key}: {field.description}")


def sections() -> dict[str, type[Section]]:
    """The sections of a job by their key."""
    return {key: nested for key, field in Job.model_fields.items() if (nested := _section_of(field.annotation))}


def expected(field: FieldInfo) -> str:
    """What a value of `field` is, in words: `a whole number of at least 1`."""
    return _kind(field.annotation, field.metadata)


def _section_of(annotation: Any) -> type[Section] | None:
    candidates = get_args(annotation) or (annotation,)
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Section)), None)


def _entries(annotation: Any, value: Any) -> tuple[Any, Any] | None:
    """The kinds of the keys and of the values of a mapping, where `value` is written as one."""
    return get_args(annotation) if get_origin(annotation) is dict and isinstance(value, Mapping) else None


def _entry_faults(
    field: FieldInfo, kinds: tuple[Any, Any], value: Mapping[str, Any], at: Callable[[KeyPath], str], path: KeyPath
) -> Iterator[tuple[KeyPath, Problem]]:
    """The entries of a mapping whose keys or values are not of their kind."""
    name, entry = (FieldInfo.from_annotated_attribute(kind, Field(description=field.description)) for kind in kinds)
    for key, inner in value.items():
        place = (*path, str(key))
        if not _fits(name, key):
            yield place, Problem(f"`{key}` is not a key of {_called(path)}", at(place), _near(str(key), _choices(kinds[0])) or _about(name))
        elif not _fits(entry, inner):
            yield place, Problem(f"{key} = {_shown(inner)} is not {expected(entry)}", at(place), _cure(entry, inner))


def _choices(kind: Any) -> tuple[str, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def _near(key: str, known: Sequence[str]) -> str:
    """The names of a closed list that someone who wrote `key` may have meant, or nothing where any name is one."""
    near = difflib.get_close_matches(key, known, n=2)
    return f"did you mean {' or '.join(f'`{name}`' for name in near)}?" if near else f"known are {', '.join(known)}" if known else ""


def _listed_in(annotation: Any) -> type[Section] | None:
    """The section of which a value may be a list."""
    if get_origin(annotation) is tuple:
        return _section_of(annotation)
    return next(filter(None, map(_listed_in, get_args(annotation))), None)


def _fits(field: FieldInfo, value: Any) -> bool:
    annotated: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    try:
        TypeAdapter(annotated, config=ConfigDict(allow_inf_nan=False)).validate_python(value)
    except (ValidationError, OverflowError):
        return False
    return True


def _kind(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(args[0], [*args[1:], *metadata])
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(arg, metadata) for arg in args if arg is not type(None))
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(f"`{value}`" for value in args)
    if origin is dict:
        return f"a mapping to {_kind(args[1])}"
    if origin is tuple and _section_of(annotation):
        return "a list of sections"
    if origin is tuple and args[-1] is Ellipsis:
        return f"a list of {_kind(args[0])}"
    if origin is tuple:
        return f"a list of {len(args)} numbers, each {_kind(args[0]).removeprefix('a number ')}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "a section of keys"
    parsers = [m.func for m in metadata if isinstance(m, BeforeValidator)]
    plain = (
        "an amount of memory" if parse_bytes in parsers else {int: "a whole number", float: "a number", bool: "true or false"}.get(annotation, "text")
    )
    return " ".join((plain, *_bounds(metadata))) if plain != "text" else plain


def _bounds(metadata: Sequence[Any]) -> Iterator[str]:
    words = ((annotated_types.Ge, "ge", "of at least"), (annotated_types.Gt, "gt", "above"))
    words += ((annotated_types.Le, "le", "of at most"), (annotated_types.Lt, "lt", "below"))
    nested = [m for item in metadata if isinstance(item, FieldInfo) for m in item.metadata]
    for bound, name, word in words:
        yield from (f"{word} {getattr(m, name):g}" for m in (*metadata, *nested) if isinstance(m, bound))


def _cure(field: FieldInfo, value: Any) -> str:
    """A value that would work, when one can be guessed."""
    choices = [str(c) for option in (field.annotation, *get_args(field.annotation)) if get_origin(option) is Literal for c in get_args(option)]
    if get_origin(field.annotation) is tuple and value in choices:
        return f"write it as a list: [{value}]"
    if choices:
        near = difflib.get_close_matches(str(value).lower(), choices, n=1) or [OTHER_VALUES.get(str(value).lower().replace("-", "_"), "")]
        return f"did you mean `{near[0]}`?" if near[0] in choices else _about(field)
    kind = expected(field)
    if kind.startswith("text") and not isinstance(value, (Mapping, list)) and value not in ("", None):
        return f'put it in quotes: "{value}"'
    if kind.startswith("an amount"):
        return "write it like `80 GB` or `79.2 GiB`"
    if kind.startswith("a whole number") and isinstance(value, int | float | str):
        count = _count(value)
        if count is not None and count > MAX_COUNT:
            return f"no count goes beyond {MAX_COUNT:.0e}"
        return "write it like `500`, `128k` or `4M tokens`" if count is None and isinstance(value, str) else _about(field)
    return _about(field)


def _about(field: FieldInfo) -> str:
    default = "" if field.is_required() or field.default in (None, ()) else f" Left out, it is {_shown(field.default)}."
    return f"{field.description}{default}"


def _count(value: str | float) -> int | None:
    try:
        return parse_count(value)
    except (ValueError, OverflowError):
        return None


def _meant(key: str, section: type[Section]) -> str:
    """What someone who wrote `key` in `section` meant, as far as one can tell."""
    if section not in (Job, *sections().values()):
        return _near(key, tuple(section.model_fields))
    homes = [name for name, other in sections().items() if key in other.model_fields and other is not section]
    if homes:
        return f"`{key}` belongs to {' or '.join(f'`{home}`' for home in homes)}"
    if key in Job.model_fields and section is not Job:
        return f"`{key}` stands at the top of the file, not in a section"
    if meant := OTHER_WORDS.get(key.lower()):
        return f"here it is `{meant}`: {_description(meant)}"
    elsewhere = {field: f"{name}.{field}" for name, other in sections().items() for field in other.model_fields}
    near = difflib.get_close_matches(key, elsewhere, n=1, cutoff=0.7)
    if near and not difflib.get_close_matches(key, section.model_fields, n=1):
        return f"did you mean `{elsewhere[near[0]]}`?"
    return _near(key, tuple(section.model_fields))


def _description(name: str) -> str:
    section, _, key = name.rpartition(".")
    fields = (sections()[section] if section else Job).model_fields
    return fields[key].description or ""


def _called(path: KeyPath) -> str:
    return f"`{dotted(path)}`" if path else "the job"


def _shown(value: Any) -> str:
    """A value as its writer would recognise it, cut where it is long."""
    text = {None: "null", True: "true", False: "false"}.get(value) if value is None or isinstance(value, bool) else None
    text = text or (repr(value) if isinstance(value, (str, list, dict)) else str(value))
    return text if len(text) <= 60 else text[:57] + "..."
