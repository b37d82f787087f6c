"""`plan`: which layout carries a job on a machine - every candidate judged, the simplest of the fast ones that fit chosen, and why."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence

from pentamesh.cost.copies import copied, copy_bytes
from pentamesh.cost.holding import Holding
from pentamesh.cost.memory import verdict
from pentamesh.cost.needs import BEST_FIRST, Memory
from pentamesh.cost.predict import Prediction, predict
from pentamesh.job.hardware import Hardware
from pentamesh.job.job import Job
from pentamesh.job.precision import PRECISIONS
from pentamesh.layout.mesh import AXES, SHARDS, Layout
from pentamesh.model.spec import ModelSpec
from pentamesh.plan.candidates import described, layouts, policies
from pentamesh.plan.changes import changes_that_fit
from pentamesh.plan.drift import model_facts
from pentamesh.plan.plan import Alternative, Plan
from pentamesh.plan.reasons import reasons, why_not

__all__ = ["CLOSE", "judged", "plan"]

# Never more machinery than pays: what is within this share of the fastest and simpler wins. A choice, not a measurement: these times leave out
# casts and copies of parameters and gradients, and no receipt says yet what that is worth.
CLOSE = 0.08
# Tensor and pipeline have many degrees: so many of the best are told.
SHOWN_MULTI_AXIS = 4
_SIMPLEST_FIRST = ("ddp", "zero1", "zero2", "full_shard", "hybrid_shard", "multi_axis")
_RECOMPUTES = ("none", "selective", "full")


def plan(
    job: Job,
    model: ModelSpec,
    hardware: Hardware,
    *,
    trained_only: bool = False,
    overrides: dict[str, str] | None = None,
    parent: str | None = None,
) -> Plan:
    """The judged and chosen layout of `job`; what the request fixes is judged as it is, the rest is chosen.

    `trained_only` chooses among what is trained so far: all axes but pipeline. When nothing fits, the plan is the best attempt, with the changes
    that would fit.
    Raises InputError when the request cannot be laid out at all.
    """
    found = list(judged(job, model, hardware))
    # More axes are machinery: they are judged where pre-training may want them, or where the data axes do not do.
    for axes in _axes(job, model, found, trained_only=trained_only):
        found += judged(job, model, hardware, axes, besides={p.held.layout for p in found})
    chosen = _choose(found)
    memory = _with_copy(job, chosen)
    decided = verdict(memory) if job.checkpoint.asynchronous is True else chosen.verdict
    return Plan(
        job=job,
        model=model_facts(model),
        hardware=json.loads(json.dumps(hardware.to_json())),  # as a plan that was written reads back
        layout=chosen.held.layout,
        policy=chosen.policy,
        precision=chosen.precision,
        verdict=decided,
        memory=memory,
        time=chosen.time,
        communication=chosen.communication,
        tokens_per_s=chosen.tokens_per_s,
        tokens_per_s_per_gpu=chosen.tokens_per_s_per_gpu,
        mfu=chosen.mfu,
        reasons=reasons(chosen, found),
        alternatives=_alternatives(chosen, found),
        changes_that_fit=() if decided != "does_not_fit" else changes_that_fit(job, model, hardware, found),
        overrides=overrides or {},
        parent=parent,
    )


def _with_copy(job: Job, chosen: Prediction) -> Memory:
    """The memory of the chosen candidate, with the copy that is saved beside the steps, where saves are due among them."""
    kept = job.checkpoint
    if kept.every is None or (job.training.steps is not None and kept.every >= job.training.steps):
        return chosen.memory
    return copied(chosen.memory, copy_bytes(chosen.held, chosen.precision), chosen.hardware.device.kind, kept.asynchronous)


def _axes(job: Job, model: ModelSpec, found: Sequence[Prediction], *, trained_only: bool) -> Iterator[tuple[str, ...]]:
    """The axes beside data whose degrees are open where the request leaves them so, some together. `found` grows meanwhile: at first it is what data
    alone comes to."""

    if not model.is_described:
        return  # its dims have no names to cut
    alone_fits = any(p.verdict != "does_not_fit" for p in found)
    # Context cuts what passes; what rests is cut by data as far.
    has_room = any(p.memory.states_bytes < p.memory.usable_bytes for p in found)
    experts = ("expert",) if model.experts else ()
    several = bool(experts) and found[0].hardware.num_nodes > 1
    if experts:
        yield experts
    if several:
        yield ("expert", "nodes")
    if alone_fits and job.method != "pretrain":
        return  # nothing is to be gained
    # With tensor comes sequence parallel, which a stream that positions are added to is not trained with.
    if not (trained_only and model.learns_positions):
        yield ("tensor", *experts) if trained_only else ("tensor", "pipeline", *experts)
    if several and not trained_only:
        yield ("pipeline", "expert", "nodes")
    if has_room and not alone_fits and not (experts and any(p.verdict != "does_not_fit" for p in found)):
        yield ("context", *experts)


def judged(
    job: Job, model: ModelSpec, hardware: Hardware, axes: Sequence[str] = (), *, besides: Collection[Layout] = (), lean: bool = False
) -> Iterator[Prediction]:
    """Every candidate of the request, judged: of the data axes, and of `axes` where it leaves their degrees open; but for layouts in `besides`."""
    precision = PRECISIONS[job.precision]
    for layout in (found for found in layouts(job, model, hardware, axes) if found not in besides):
        held = Holding(model, layout, job.method)
        for policy in policies(layout, job, model, lean=lean):
            yield predict(held, policy, precision, job.batch, hardware)


def _choose(found: list[Prediction]) -> Prediction:
    """The rule of choice: of the candidates with the best verdict, the simplest within `CLOSE` of the fastest; of those that do not fit, the
    one that comes nearest."""
    best = min((p.verdict for p in found), key=BEST_FIRST.index)
    able = [p for p in found if p.verdict == best]
    if best == "does_not_fit":
        return min(able, key=lambda p: (p.memory.peak_bytes.expected, _simplicity(p)))
    fastest = min(p.time.step_s.expected for p in able)
    close = [p for p in able if p.time.step_s.expected <= fastest * (1 + CLOSE)]
    return min(close, key=lambda p: (*_simplicity(p), p.time.step_s.expected))


def _simplicity(p: Prediction) -> tuple[int, ...]:
    """Lower is simpler: strategy first, then fewer axes and less that is cut, then as little recomputed as may be. When parameters are gathered and
    gradients reduced is no machinery of anyone's: of those policies the fastest that fits is taken."""
    layout = p.held.layout
    cut = (sum(layout.mesh.degree(axis) > 1 for axis in AXES), SHARDS.index(layout.shard))
    return _SIMPLEST_FIRST.index(layout.strategy), *cut, _RECOMPUTES.index(p.policy.recompute)


def _alternatives(chosen: Prediction, found: list[Prediction]) -> tuple[Alternative, ...]:
    """The best candidate of every other layout, and of the chosen layout with the other choices of recompute."""
    rivals: dict[tuple[Layout, str], list[Prediction]] = {}
    for p in found:
        same_layout = p.held.layout == chosen.held.layout
        rivals.setdefault((p.held.layout, p.policy.recompute if same_layout else ""), []).append(p)
    others = _told([_choose(group) for key, group in rivals.items() if key != (chosen.held.layout, chosen.policy.recompute)])
    others.sort(key=lambda p: (BEST_FIRST.index(p.verdict), p.time.step_s.expected))
    return tuple(Alternative(described(p.held.layout, p.policy), p.verdict, p.time.step_s.expected, why_not(p, chosen)) for p in others)


def _told(others: list[Prediction]) -> list[Prediction]:
    """All of the data axes; of several axes the fastest that fit, and where these are few those that come nearest to it."""

    def rank(p: Prediction) -> tuple[int, float]:
        return BEST_FIRST.index(p.verdict), p.memory.peak_bytes.expected if p.verdict == "does_not_fit" else p.time.step_s.expected

    several = sorted((p for p in others if p.held.layout.strategy == "multi_axis"), key=rank)
    return [p for p in others if p.held.layout.strategy != "multi_axis"] + several[:SHOWN_MULTI_AXIS]
