"""Kernels that are registered nowhere: what a recipe says, with or without a planted fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from moe_parity.harness.checks.flow import check
from moe_parity.kernels import Call, Kernel, registry
from moe_parity.references.language import Case, Recipe, Values
from moe_parity.references.recipes.ours import NO_ROUNDING, OURS

CASES = {
    "weight_quant": Case(i=300, h=200, values=Values.AIMED),
    "act_quant": Case(m=24, h=512, values=Values.AIMED),
    "align": Case(m=20, e=5, k=3),
    "permute": Case(m=20, e=5, k=3, h=256, values=Values.AIMED),
    "fc1": Case(m=24, e=4, k=2, h=512, i=128, values=Values.AIMED),
    "swiglu": Case(m=64, i=256, clamp=9.97, values=Values.AIMED),
    "swiglu_quant": Case(m=128, i=256, values=Values.AIMED),
    "fc2": Case(m=24, e=4, k=2, h=256, i=512, values=Values.AIMED),
    "combine": Case(m=24, e=8, k=8, h=256, values=Values.AIMED),
    "layer": Case(m=4, e=4, k=2, h=256, i=256, values=Values.AIMED),
    "quant_gemm": Case(m=22, h=512, i=128, values=Values.AIMED),
}
Run = Callable[[Call], Any]
"""A kernel's function."""


def kernel_of(stage: str, run: Run, recipe: Recipe | None = None) -> Kernel:
    """Return a kernel that is registered nowhere."""
    chosen = recipe or (NO_ROUNDING if stage in ("align", "permute") else OURS)
    registry.register("faulty", stage=stage, recipes=chosen)(run)
    return registry._KERNELS.pop("faulty")


def following(recipe: Recipe | None = None) -> Callable[[Call], dict[str, Tensor]]:
    """Return a kernel that writes what a recipe says into memory of the harness."""

    def run(call: Call) -> dict[str, Tensor]:
        integers = call.stage.name in ("align", "permute")
        made = call.stage.reference(
            call.case, call.inputs, recipe or (NO_ROUNDING if integers else OURS)
        )
        written = {}
        for name, value in made.items():
            out = call.new(name, tuple(value.shape), dtype=value.dtype)
            written[name] = out.copy_(value)
        return written

    return run


def red(kernel: Kernel, case: Case, **options: Any) -> dict[str, str]:
    """Return the red checks of a kernel with their messages."""
    return {v.check: v.message for v in check(kernel, case, "cpu", **options) if v.failed}


right = following()
"""The kernel without a fault."""
