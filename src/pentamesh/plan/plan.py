"""Plan: the promise. What will be run, whether it fits, how long it takes and why; the same object is run and compared afterwards."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pentamesh.cost.needs import Communication, Memory, Range, Stage, Time, Verdict
from pentamesh.errors import InputError, Problem
from pentamesh.job.job import Job
from pentamesh.job.precision import PRECISIONS, Precision
from pentamesh.layout.mesh import Layout
from pentamesh.layout.policy import Policy

__all__ = ["SCHEMA", "VERSION", "Alternative", "Communication", "Memory", "Plan", "Range", "Stage", "Time"]

SCHEMA, VERSION = "pentamesh.plan", 1
MAX_PROBLEMS = 10
# The schedule of a pipeline that memory and bubble are predicted for. Source: PipeDream-Flush (arXiv 2006.09503), Megatron-LM's default.
SCHEDULE = "1f1b"


@dataclass(frozen=True)
class Alternative:
    """A layout that was judged and not chosen."""

    layout: dict[str, Any]
    verdict: Verdict
    step_s: float
    why_not: str


@dataclass(frozen=True)
class Plan:
    """A judged layout for a job on a machine. `verdict` is `fits`, `at_risk` or `does_not_fit`."""

    job: Job
    model: dict[str, Any]
    hardware: dict[str, Any]
    layout: Layout
    policy: Policy
    precision: Precision
    verdict: Verdict
    memory: Memory
    time: Time
    communication: tuple[Communication, ...]
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    reasons: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    changes_that_fit: tuple[str, ...] = ()
    overrides: dict[str, str] = field(default_factory=dict)
    parent: str | None = None

    @property
    def strategy(self) -> str:
        return self.layout.strategy

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits of what decides the run: job, layout, policy and precision - not the predictions, nor in which folder files lie."""
        decides = [_decisive(self.job), asdict(self.layout), asdict(self.policy), self.precision.name]
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]

    def to_json(self) -> dict[str, Any]:
        """The JSON contract of `pentamesh plan --json` and of plan.json."""
        layout = asdict(self.layout)
        mesh = layout.pop("mesh")
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "parent": self.parent,
            "verdict": self.verdict,
            "strategy": self.strategy,
            "layout": {**mesh, "edp": self.layout.mesh.edp, **layout},
            "policy": {**asdict(self.policy), "schedule": SCHEDULE if self.layout.mesh.pp > 1 else None},
            "precision": asdict(self.precision),
            "memory": asdict(self.memory),
            "time": asdict(self.time),
            "communication": [asdict(c) for c in self.communication],
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "mfu": self.mfu,
            "reasons": list(self.reasons),
            "alternatives": [asdict(a) for a in self.alternatives],
            "changes_that_fit": list(self.changes_that_fit),
            "model": self.model,
            "hardware": self.hardware,
            "job": self.job.model_dump(mode="json"),
            "overrides": self.overrides,
        }

    def write(self, path: Path) -> None:
        """Write plan.json at once: the file is whole or absent."""
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(self.to_json(), indent=2) + "\n")
        os.replace(partial, path)

    @classmethod
    def read(cls, path: Path, *, as_made: bool = False) -> Plan:
        """A plan as `write` left it. Raises InputError for a file that is none, or of another version, or (`as_made`) was altered since."""
        hint = "make one with `pentamesh plan job.yaml --json > plan.json`"
        try:
            found = json.loads(path.read_text(), parse_constant=_no_number)
            if found["schema"] != SCHEMA or found["version"] != VERSION:
                raise InputError(f"{path} is {found['schema']} version {found['version']}, not {SCHEMA} version {VERSION}", hint=hint)
            plan = cls._from_json(found)
        except ValidationError as error:
            raise InputError(*(Problem(f"{path} is not a plan: {_told(e)}", hint=hint) for e in error.errors()[:MAX_PROBLEMS])) from None
        except KeyError as error:
            raise InputError(f"{path} is not a plan: it has no {error}", hint=hint) from None
        except OSError as error:
            raise InputError(f"there is no plan to read: {error.strerror}", where=str(path), hint=hint) from None
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{path} is not a plan: {error}", hint=hint) from None
        if as_made and found["fingerprint"] != plan.fingerprint:
            what = f"{path} was altered since it was made: it is plan {found['fingerprint']}, and what it says makes {plan.fingerprint}"
            raise InputError(what, hint="change the job and plan it again: what a plan predicts holds for what was planned")
        return plan

    @classmethod
    def _from_json(cls, found: dict[str, Any]) -> Plan:
        """Raises ValidationError for every value that is not of its field's type, and KeyError for what is missing."""
        layout = dict(found["layout"])
        mesh = {axis: layout.pop(axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}
        content = {part.name: found[part.name] for part in fields(cls)}
        content |= {"layout": {"mesh": mesh, **layout}, "policy": dict(found["policy"])}
        plan = TypeAdapter(cls).validate_json(json.dumps(content), strict=True)
        if plan.precision != PRECISIONS.get(plan.precision.name):
            raise ValueError(f"{plan.precision} is no precision that is known")
        return plan


def _no_number(constant: str) -> float:
    raise ValueError(f"{constant} is no number of JSON")


def _told(error: Any) -> str:
    """One of pydantic's errors: `layout.mesh.tp: Input should be a valid integer`."""
    return f"{'.'.join(map(str, error['loc']))}: {error['msg']}"


def _decisive(job: Job) -> dict[str, Any]:
    """The job without its logging, and with names of files for their paths."""
    found = job.model_dump(mode="json", exclude={"logging"})
    for section, key in (("model", "name"), ("data", "train"), ("data", "held_out")):
        if isinstance(found[section][key], str):
            found[section][key] = Path(found[section][key]).name
    return found
