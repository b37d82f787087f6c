"""Plan: the promise. What will be run, whether it fits, how long it takes and why; the same object is run and compared afterwards."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pentamesh.cost.needs import Communication, Memory, Range, Stage, Time
from pentamesh.errors import InputError
from pentamesh.job.job import Job
from pentamesh.job.precision import PRECISIONS, Precision
from pentamesh.layout.mesh import Layout, Mesh
from pentamesh.layout.policy import Policy

__all__ = ["SCHEMA", "VERSION", "Alternative", "Communication", "Memory", "Plan", "Range", "Stage", "Time"]

SCHEMA, VERSION = "pentamesh.plan", 1


@dataclass(frozen=True)
class Alternative:
    """A layout that was judged and not chosen."""

    layout: dict[str, Any]
    verdict: str
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
    verdict: str
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
            "policy": {**asdict(self.policy), "schedule": None},
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
    def read(cls, path: Path) -> Plan:
        """A plan as `write` left it. Raises InputError for a file that is none, or of another version."""
        try:
            found = json.loads(path.read_text())
            if found["schema"] != SCHEMA or found["version"] != VERSION:
                raise InputError(f"{path} is {found['schema']} version {found['version']}, not {SCHEMA} version {VERSION}")
            return cls._from_json(found)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is not a plan: {error}", hint="make one with `pentamesh plan job.yaml --json > plan.json`") from error

    @classmethod
    def _from_json(cls, found: dict[str, Any]) -> Plan:
        layout = dict(found["layout"])
        mesh = Mesh(**{axis: layout.pop(axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")})
        del layout["edp"]
        policy = {key: value for key, value in found["policy"].items() if key != "schedule"}

        def memory(part: dict[str, Any]) -> dict[str, Any]:
            return {**part, "peak_bytes": Range(**part["peak_bytes"])}

        stages = tuple(Stage(**memory(stage)) for stage in found["memory"]["stages"])
        return cls(
            job=Job(**found["job"]),
            model=found["model"],
            hardware=found["hardware"],
            layout=Layout(mesh, **layout),
            policy=Policy(**policy),
            precision=PRECISIONS[found["precision"]["name"]],
            verdict=found["verdict"],
            memory=Memory(**{**memory(found["memory"]), "stages": stages}),
            time=Time(**{**found["time"], "step_s": Range(**found["time"]["step_s"])}),
            communication=tuple(Communication(**c) for c in found["communication"]),
            tokens_per_s=found["tokens_per_s"],
            tokens_per_s_per_gpu=found["tokens_per_s_per_gpu"],
            mfu=found["mfu"],
            reasons=tuple(found["reasons"]),
            alternatives=tuple(Alternative(**a) for a in found["alternatives"]),
            changes_that_fit=tuple(found["changes_that_fit"]),
            overrides=found["overrides"],
            parent=found["parent"],
        )


def _decisive(job: Job) -> dict[str, Any]:
    """The job without its logging, and with names of files for their paths."""
    found = job.model_dump(mode="json", exclude={"logging"})
    for section, key in (("model", "name"), ("data", "train"), ("data", "held_out")):
        if isinstance(found[section][key], str):
            found[section][key] = Path(found[section][key]).name
    return found
