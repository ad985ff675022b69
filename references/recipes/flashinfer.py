"""What FlashInfer's quantizers do."""

from __future__ import annotations

from moe_parity.references.recipes.build import layer, quantizer
from moe_parity.references.stages.combine import CombineRecipe
from moe_parity.references.stages.gemm.decisions import GemmRecipe
from moe_parity.references.stages.quant.decisions import (
    Apply,
    Floor,
    NanAmax,
    QuantRecipe,
    ScaleForm,
    SubnormalAmax,
    ZeroGroup,
)
from moe_parity.references.stages.swiglu.decisions import SwigluRecipe
from moe_parity.references.stages.swiglu.silu import Silu

_CUTLASS = quantizer(
    "flashinfer_cutlass",
    "FlashInfer 0.7.4 fp8_blockscale_gemm_90: TensorRT-LLM's source under -use_fast_math",
    QuantRecipe(
        zero_group=ZeroGroup.SCALE_ONE,
        subnormal_amax=SubnormalAmax.FIRST_LANE,
        scale_form=ScaleForm.RECIP_OF_MULTIPLIER_FAST,
        apply=Apply.MUL_MULTIPLIER_FAST,
        nan_amax=NanAmax.IGNORE_UNLESS_ALL,
    ),
)
# The GEMMs are compiled at their first use, without that flag.  Under it CUTLASS' g * (1 / d) is
# g * rcp.approx.ftz(d), the bits of g / d.
FLASHINFER_CUTLASS = layer(
    _CUTLASS, GemmRecipe(), SwigluRecipe(silu=Silu.FAST), CombineRecipe()
)  # fmt: skip
FLASHINFER_TRTLLM_GEN = quantizer(
    "flashinfer_trtllm_gen",
    "FlashInfer 0.7.4 trtllm_fused_moe_dev_kernel.cu as written, with IEEE divisions",
    QuantRecipe(floor=Floor.SCALE_MIN_NORMAL, apply=Apply.DIVIDE),
)
FLASHINFER_MONO = quantizer(
    "flashinfer_mono",
    "FlashInfer 0.7.4 mono_moe, finite input",
    QuantRecipe(
        floor=Floor.AMAX_1E_10,
        scale_form=ScaleForm.MUL_RECIP_448,
        apply=Apply.MUL_MULTIPLIER_FAST,
    ),
)
