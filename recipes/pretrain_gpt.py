#!/usr/bin/env python
"""Pre-train a GPT by the flags of Megatron-LM's pretrain_gpt.py: so far their plan, and the reason why it is not run.

    pretrain_gpt.py --hardware 8x8xH100@8x400gbps --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --bf16 --plan

Exit code 0 with --plan, 3 when nothing fits; without --plan, what would be trained is refused with 2. Under torchrun the first process speaks.
"""

from __future__ import annotations

import json
import sys

from start import ended, speaks

from pentamesh.errors import DoesNotFit, InputError
from pentamesh.plan.plan import Plan
from pentamesh.plan.search import plan
from pentamesh.report.terminal import show_plan
from pentamesh.translate.megatron import read_flags


def main() -> int:
    """Plan what the flags describe, show it once, and refuse to run it."""
    asked = read_flags(sys.argv[1:], __doc__ or "")
    found = plan(asked.job, asked.model, asked.hardware)
    if speaks():
        show(found, as_json=asked.as_json)
    if found.verdict == "does_not_fit":
        return DoesNotFit.exit_code
    if not asked.plan_only:
        raise InputError("what these flags describe is planned and not trained yet", where="pretrain_gpt.py", hint="--plan is content with the plan")
    return 0


def show(found: Plan, *, as_json: bool) -> None:
    """Print the plan, for people or as JSON."""
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        show_plan(found)


if __name__ == "__main__":
    raise SystemExit(ended(main))
