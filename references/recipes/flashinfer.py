"""What FlashInfer's quantizers do."""

from __future__ import annotations

from moe_parity.references.recipes.build import quantizer
from moe_parity.references.stages.gemm.decisions import GemmRecipe
from moe_parity.references.stages.quant.decisions import (
    Apply,
    Floor,
    NanAmax,
    QuantRecipe,
    ScaleForm,
    ZeroGroup,
)

_CUTLASS = quantizer(
    "flashinfer_cutlass",
    "FlashInfer 0.7.4 fp8_blockscale_gemm_90: TensorRT-LLM's source under -use_fast_math",
    QuantRecipe(
        zero_group=ZeroGroup.SCALE_ONE,
        scale_form=ScaleForm.RECIP_OF_MULTIPLIER_FAST,
        apply=Apply.MUL_MULTIPLIER_FAST,
        nan_amax=NanAmax.IGNORE_UNLESS_ALL,
    ),
)
# The GEMM behind it is compiled at its first use, without that flag.
FLASHINFER_CUTLASS = _CUTLASS.with_parts(gemm=GemmRecipe())
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
