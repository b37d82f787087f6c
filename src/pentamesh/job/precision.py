"""What each named precision stores, computes, reduces and remembers: the one place where dtypes are decided."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ITEMSIZE", "PRECISIONS", "ROUNDED_AT_ONCE", "Precision"]

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# Elements that the optimizer of `bf16-pure` widens to float32 and rounds at a time, by kind of device: within a core's cache, 5.5 ns each where
# 2^20 took 10; on a GPU enough to outlast the launch of a kernel.
ROUNDED_AT_ONCE = {"cpu": 2**18, "cuda": 2**22}


@dataclass(frozen=True)
class Precision:
    """The dtypes of one named precision (torch's names).

    `weight` is what the optimizer updates and what a checkpoint keeps; when `compute` is narrower, `weight` is the master copy and blocks
    work on a cast that lives only while they need it. `reduce` is the dtype in which gradients are summed over ranks and micro-batches.
    """

    name: str
    weight: str
    compute: str
    reduce: str
    state: str
    stochastic_rounding: bool = False

    @property
    def moments_bytes(self) -> int:
        """Of one trained weight: Adam keeps two."""
        return 2 * ITEMSIZE[self.state]

    @property
    def gradient(self) -> str:
        """Dtype of the gradient the optimizer reads: that of the weight."""
        return self.weight


PRECISIONS = {
    p.name: p
    for p in (
        Precision("fp32", weight="float32", compute="float32", reduce="float32", state="float32"),
        Precision("bf16", weight="float32", compute="bfloat16", reduce="float32", state="float32"),
        Precision("bf16-pure", weight="bfloat16", compute="bfloat16", reduce="bfloat16", state="bfloat16", stochastic_rounding=True),
        # For proofs only: a job file cannot ask for it, `pentamesh.run.verify` does.
        Precision("fp64", weight="float64", compute="float64", reduce="float64", state="float64"),
    )
}
