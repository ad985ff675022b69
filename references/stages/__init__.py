"""The stages of a block-FP8 MoE layer, a room each; ``STAGES`` is the only table of them."""

from __future__ import annotations

from typing import Any

from moe_parity.references.errors import ParityError
from moe_parity.references.language.stage import Stage
from moe_parity.references.stages.align import ALIGN
from moe_parity.references.stages.combine import COMBINE
from moe_parity.references.stages.gemm.stage import FC1, FC2
from moe_parity.references.stages.layer.stage import LAYER
from moe_parity.references.stages.permute import PERMUTE
from moe_parity.references.stages.quant.stage import ACT_QUANT, WEIGHT_QUANT
from moe_parity.references.stages.quant_gemm.stage import QUANT_GEMM
from moe_parity.references.stages.swiglu.stage import SWIGLU, SWIGLU_QUANT

STAGES: dict[str, Stage[Any]] = {
    stage.name: stage
    for stage in (
        WEIGHT_QUANT, ACT_QUANT, ALIGN, PERMUTE, FC1, SWIGLU, SWIGLU_QUANT, FC2, COMBINE, LAYER,
        QUANT_GEMM,
    )
}  # fmt: skip
"""In the order in which the data passes them; the last is two of them as one op."""


def stage_named(name: str) -> Stage[Any]:
    """Return a stage; raises ParityError, listing the stages, for a name that is none."""
    if name not in STAGES:
        raise ParityError(f"unknown stage {name!r}; stages: {', '.join(STAGES)}.")
    return STAGES[name]


__all__ = [
    "ACT_QUANT",
    "ALIGN",
    "COMBINE",
    "FC1",
    "FC2",
    "LAYER",
    "PERMUTE",
    "QUANT_GEMM",
    "STAGES",
    "SWIGLU",
    "SWIGLU_QUANT",
    "WEIGHT_QUANT",
    "stage_named",
]
