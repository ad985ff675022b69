"""What TensorRT-LLM's kernels do."""

from __future__ import annotations

from moe_parity.references.recipes.build import FUSED, layer, quantizer
from moe_parity.references.stages.combine import CombineRecipe
from moe_parity.references.stages.gemm.decisions import DotUnit, GemmRecipe, ScaleOrder
from moe_parity.references.stages.quant.decisions import (
    Apply,
    NanAmax,
    QuantRecipe,
    ScaleForm,
    ZeroGroup,
)
from moe_parity.references.stages.swiglu.decisions import SwigluRecipe
from moe_parity.references.stages.swiglu.silu import Silu

_GROUPED = quantizer(
    "trtllm_fused",
    "TensorRT-LLM scale_1x128_kernel, the grouped one, built without fast-math",
    QuantRecipe(
        zero_group=ZeroGroup.SCALE_ONE,
        scale_form=ScaleForm.RECIP_OF_MULTIPLIER,
        apply=Apply.MUL_MULTIPLIER,
        nan_amax=NanAmax.IGNORE_UNLESS_ALL,
    ),
)
TRTLLM_FUSED = layer(_GROUPED, *FUSED)
TRTLLM_DECODE = layer(
    quantizer(
        "trtllm_decode",
        "TensorRT-LLM PR 21250: Triton decode path, mma.sync, dot * a_s * b_s, tl.sigmoid",
        TRTLLM_FUSED.of("act_quant", QuantRecipe),
    ),
    GemmRecipe(unit=DotUnit.MMA_F16, scale_order=ScaleOrder.A_THEN_B),
    SwigluRecipe(silu=Silu.TL_SIGMOID),
    CombineRecipe(),
)
