"""Fine-tune a model with the flags that people know.

    torchrun --standalone --nproc-per-node=8 finetune.py --model meta-llama/Llama-3.1-8B --batch-size 1 --grad-accum 16 --seq-len 4096 \\
        --bf16 --fsdp full_shard --fsdp-reshard-after-forward --gradient-checkpointing --torch-compile --data rows.jsonl

Without --data it trains on the sums beside it (sample/rows.jsonl), so that a line runs before there are rows. `pentamesh plan` answers the same
questions from a job file, and `--plan` shows here what would be run.
"""

from __future__ import annotations

import sys
from pathlib import Path

from start import main

from pentamesh.translate.finetune import Defaults

SAMPLE = Path(__file__).resolve().parent / "sample"
DEFAULTS = Defaults({"data.train": str(SAMPLE / "rows.jsonl"), "data.form": "text"})

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], DEFAULTS, __doc__ or "", "finetune"))
