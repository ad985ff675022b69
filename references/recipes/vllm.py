"""What vLLM's kernels do, and which of its expert classes has which of them."""

from __future__ import annotations

import dataclasses

from moe_parity.references.recipes.build import experts, quantizer
from moe_parity.references.stages.combine import CombineRecipe, SumStep, WeightsAt
from moe_parity.references.stages.gemm.decisions import GemmRecipe, ScaleOrder
from moe_parity.references.stages.quant.decisions import (
    Apply,
    Floor,
    NanElement,
    PowerOfTwo,
    QuantRecipe,
    ScaleForm,
)
from moe_parity.references.stages.swiglu.decisions import (
    ClampNan,
    ClampRounding,
    ProductRounding,
    Shift,
    SwigluRecipe,
)
from moe_parity.references.stages.swiglu.silu import Silu

VLLM_CUDA = quantizer(
    "vllm_cuda",
    "vLLM 0.33.0 _C.per_token_group_fp8_quant, fp32 scales",
    QuantRecipe(floor=Floor.AMAX_1E_10, apply=Apply.MUL_RECIP, nan_element=NanElement.LOW),
)
VLLM_CUDA_UE8M0 = quantizer(
    "vllm_cuda_ue8m0",
    "vLLM 0.33.0 _C.per_token_group_fp8_quant, scale_ue8m0, register kernel; and _packed",
    QuantRecipe(floor=Floor.SCALE_1E_10, apply=Apply.MUL_RECIP, nan_element=NanElement.LOW),
)
VLLM_CUDA_UE8M0_GENERIC = quantizer(
    "vllm_cuda_ue8m0_generic",
    "vLLM 0.33.0 _C.per_token_group_fp8_quant, scale_ue8m0, generic kernel (fp32 input, group 64)",
    QuantRecipe(
        floor=Floor.SCALE_1E_10,
        apply=Apply.MUL_RECIP,
        power_of_two=PowerOfTwo.LOG2,
        nan_element=NanElement.LOW,
    ),
)
VLLM_CUDA_0_26 = quantizer(
    "vllm_cuda_0_26",
    "vLLM 0.26.0 _C.per_token_group_fp8_quant, fp32 scales: divides",
    QuantRecipe(floor=Floor.AMAX_1E_10, apply=Apply.DIVIDE, nan_element=NanElement.LOW),
)
VLLM_TRITON_QUANT = quantizer(
    "vllm_triton_quant",
    "vLLM 0.33.0 fp8_utils._per_token_group_quant_fp8 (non-contiguous input)",
    QuantRecipe(
        floor=Floor.AMAX_1E_10,
        scale_form=ScaleForm.MUL_RECIP_448,
        apply=Apply.DIVIDE_FULL,
        power_of_two=PowerOfTwo.LOG2,
        nan_element=NanElement.HIGH,
    ),
)
_UNFUSED = SwigluRecipe(
    silu=Silu.DIV,
    product_rounding=ProductRounding.TWICE,
    clamp_rounding=ClampRounding.GATE,
    shift=Shift.ALWAYS,
)
_EPILOGUE = CombineRecipe(weights_at=WeightsAt.EPILOGUE, step=SumStep.MUL_ADD)
VLLM_TRITON = experts(
    "vllm_triton",
    "vLLM 0.33.0 TritonExperts with BLOCK_M of 64 or more; silu_and_mul, moe_sum",
    VLLM_CUDA,
    VLLM_CUDA.of("act_quant", QuantRecipe),
    GemmRecipe(scale_order=ScaleOrder.A_THEN_B),
    _UNFUSED,
    _EPILOGUE,
)
VLLM_TRITON_SWAP = experts(
    "vllm_triton_swap",
    "vLLM 0.33.0 TritonExperts with BLOCK_M below 64 on SM90: swap-AB, the other scale order",
    VLLM_CUDA,
    VLLM_CUDA.of("act_quant", QuantRecipe),
    GemmRecipe(scale_order=ScaleOrder.B_THEN_A),
    _UNFUSED,
    _EPILOGUE,
)
_CLAMPED = dataclasses.replace(_UNFUSED, clamp_rounding=ClampRounding.BOTH)
VLLM_CLAMPED_SCALAR = dataclasses.replace(
    VLLM_TRITON,
    name="vllm_clamped_scalar",
    source="vLLM 0.33.0 silu_and_mul_with_clamp where I is no multiple of 8: the scalar path",
    parts={**VLLM_TRITON.parts, "swiglu": _CLAMPED},
)
VLLM_FUSED_SILU = experts(
    "vllm_fused_silu",
    "vLLM 0.33.0 _C.silu_and_mul_per_block_quant (TritonExperts without UE8M0; compile fusion)",
    VLLM_CUDA,
    QuantRecipe(floor=Floor.SCALE_FUSED, apply=Apply.DIVIDE, nan_element=NanElement.HIGH),
    GemmRecipe(scale_order=ScaleOrder.A_THEN_B),
    SwigluRecipe(product_rounding=ProductRounding.NONE),
    _EPILOGUE,
)
VLLM_FUSED_SILU_SEED = experts(
    "vllm_fused_silu_seed",
    "vLLM silu_and_mul_per_block_quant(use_ue8m0, clamp_limit): from the seed, not run",
    VLLM_CUDA_UE8M0,
    VLLM_FUSED_SILU.of("swiglu_quant", QuantRecipe),
    GemmRecipe(scale_order=ScaleOrder.A_THEN_B),
    SwigluRecipe(product_rounding=ProductRounding.NONE),
    _EPILOGUE,
)
VLLM_FUSED_SILU_PR_53875 = experts(
    "vllm_fused_silu_pr_53875",
    "vLLM PR 53875, the same op with roundings beside a limit, another floor: not run",
    VLLM_CUDA_UE8M0,
    QuantRecipe(floor=Floor.SCALE_FUSED_OR_1E_10, apply=Apply.DIVIDE, nan_element=NanElement.HIGH),
    GemmRecipe(scale_order=ScaleOrder.A_THEN_B),
    SwigluRecipe(product_rounding=ProductRounding.NONE, clamp_rounding=ClampRounding.PRODUCT),
    _EPILOGUE,
)
_COLMAJOR = SwigluRecipe(
    silu=Silu.DIV_FULL,
    product_rounding=ProductRounding.TWICE,
    clamp_rounding=ClampRounding.BOTH,
    shift=Shift.ALWAYS_BF16,
    clamp_nan=ClampNan.LOW,
)
VLLM_DEEPGEMM = experts(
    "vllm_deepgemm",
    "vLLM 0.33.0 DeepGemmExperts on SM90: silu_mul_per_token_group_quant_fp8_colmajor, ep_gather",
    VLLM_CUDA_UE8M0,
    VLLM_TRITON_QUANT.of("act_quant", QuantRecipe),
    GemmRecipe(),
    _COLMAJOR,
    CombineRecipe(),
)
VLLM_DEEPGEMM_PACKED = experts(
    "vllm_deepgemm_packed",
    "vLLM 0.33.0 DeepGemmExperts with packed UE8M0: silu_mul_quant_fp8_packed",
    VLLM_CUDA_UE8M0,
    dataclasses.replace(VLLM_TRITON_QUANT.of("act_quant", QuantRecipe), floor=Floor.SCALE_1E_10),
    GemmRecipe(),
    SwigluRecipe(silu=Silu.DIV_FULL, shift=Shift.ALWAYS, clamp_nan=ClampNan.LOW),
    CombineRecipe(),
)
VLLM_BATCHED = experts(
    "vllm_batched",
    "vLLM 0.33.0 BatchedDeepGemmExperts: _C.persistent_masked_m_silu_mul_quant, all in BF16",
    VLLM_CUDA,
    QuantRecipe(
        # It floors at BF16(1e-10): after the scale's rounding the same function.
        floor=Floor.AMAX_1E_10,
        scale_form=ScaleForm.MUL_RECIP_448_BF16,
        apply=Apply.MUL_RECIP_BF16,
        power_of_two=PowerOfTwo.LOG2_BF16,
        nan_element=NanElement.LOW,
    ),
    GemmRecipe(),
    SwigluRecipe(silu=Silu.DIV_APPROX, product_rounding=ProductRounding.TWICE),
    CombineRecipe(),
)
