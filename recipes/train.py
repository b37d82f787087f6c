"""Train with DDP: every process a whole replica, one all-reduce a step.

    torchrun --standalone --nproc-per-node=8 train.py

As it stands it trains a small model from random weights on the sums beside it (sample/); --model and --data make it yours. The flags are those
of finetune.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

from start import main

from pentamesh.translate.finetune import Defaults

SAMPLE = Path(__file__).resolve().parent / "sample"
ROWS = {"data.train": str(SAMPLE / "rows.jsonl"), "data.form": "text"}
FROM_SCRATCH = {"model.name": str(SAMPLE / "model"), "method": "pretrain", "batch.seq_len": 256, "optimizer.lr": 3e-3}
# A model of one's own is fine-tuned; the sample has no weights yet.
DEFAULTS = Defaults(ROWS, without_model=FROM_SCRATCH, fsdp="no_shard")

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], DEFAULTS, __doc__ or "", "train"))
