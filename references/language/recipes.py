"""The named recipes: what each project's quantizers do.

Each names the code it was read from; whether a recipe is proven against the real
kernel, and on what, is in docs/measurements.
"""

from __future__ import annotations

import dataclasses

from moe_parity.references.language.layer_decisions import (
    ClampNan,
    ClampRounding,
    DotUnit,
    ProductRounding,
    ScaleOrder,
    Shift,
    Silu,
    SumStep,
    WeightsAt,
)
from moe_parity.references.language.quant_decisions import (
    Apply,
    Floor,
    NanAmax,
    NanElement,
    Overflow,
    PowerOfTwo,
    ScaleForm,
    ZeroGroup,
)
from moe_parity.references.language.recipe import (
    CombineRecipe,
    GemmRecipe,
    QuantRecipe,
    Recipe,
    SwigluRecipe,
)
from moe_parity.references.language.stage import Stage


def _layer(base: Recipe, gemm: GemmRecipe, swiglu: SwigluRecipe, combine: CombineRecipe) -> Recipe:
    """Return ``base`` with the parts of a whole layer; its quantizer is used twice."""
    stages = base.stages | {Stage.SWIGLU_QUANT: base.of(Stage.ACT_QUANT)}
    return dataclasses.replace(base, stages=stages, gemm=gemm, swiglu=swiglu, combine=combine)


def _quantizer(name: str, source: str, recipe: QuantRecipe, *, weights: bool = False) -> Recipe:
    stages = {Stage.ACT_QUANT: recipe}
    if weights:
        stages[Stage.WEIGHT_QUANT] = recipe
    return Recipe(name=name, source=source, stages=stages)


OURS = _quantizer(
    "ours",
    "moe_parity.kernels.ours: trtllm_fused with a floor where 448/amax overflows",
    QuantRecipe(
        floor=Floor.AMAX_OVERFLOW,
        zero_group=ZeroGroup.SCALE_ONE,
        scale_form=ScaleForm.RECIP_OF_MULTIPLIER,
        apply=Apply.MUL_MULTIPLIER,
        power_of_two=PowerOfTwo.BIT_CEIL_CLAMPED,
    ),
    weights=True,
)
TRTLLM_FUSED = _quantizer(
    "trtllm_fused",
    "TensorRT-LLM scale_1x128_kernel, the grouped one, built without fast-math",
    QuantRecipe(
        zero_group=ZeroGroup.SCALE_ONE,
        scale_form=ScaleForm.RECIP_OF_MULTIPLIER,
        apply=Apply.MUL_MULTIPLIER,
        nan_amax=NanAmax.IGNORE_UNLESS_ALL,
    ),
)
DEEPGEMM = _quantizer(
    "deepgemm",
    "DeepGEMM 2.6.1 deep_gemm/utils/math.py per_token_cast_to_fp8, per_block_cast_to_fp8",
    QuantRecipe(
        floor=Floor.AMAX_1E_4,
        apply=Apply.MUL_RECIP,
        power_of_two=PowerOfTwo.BIT_CEIL_CLAMPED,
        nan_amax=NanAmax.PROPAGATE,
    ),
    weights=True,
)
_CASTS = DEEPGEMM.of(Stage.ACT_QUANT)
DEEPGEMM_CUDA = _quantizer(
    "deepgemm_cuda",
    "the same helpers on CUDA tensors, where torch turns amax / 448.0 into a product",
    dataclasses.replace(_CASTS, scale_form=ScaleForm.MUL_RECIP_448),
    weights=True,
)
DEEPGEMM_NAN = _quantizer(
    "deepgemm_nan",
    "the same helpers on CPU tensors under a torch whose E4M3 cast does not saturate (2.11)",
    dataclasses.replace(_CASTS, overflow=Overflow.NAN),
    weights=True,
)
DEEPGEMM_CUDA_NAN = _quantizer(
    "deepgemm_cuda_nan",
    "the same helpers on CUDA tensors under a torch whose E4M3 cast does not saturate (2.11)",
    dataclasses.replace(_CASTS, scale_form=ScaleForm.MUL_RECIP_448, overflow=Overflow.NAN),
    weights=True,
)
VLLM_CUDA = _quantizer(
    "vllm_cuda",
    "vLLM 0.33.0 _C.per_token_group_fp8_quant, fp32 scales",
    QuantRecipe(floor=Floor.AMAX_1E_10, apply=Apply.MUL_RECIP, nan_element=NanElement.LOW),
)
VLLM_CUDA_UE8M0 = _quantizer(
    "vllm_cuda_ue8m0",
    "vLLM 0.33.0 _C.per_token_group_fp8_quant, scale_ue8m0, register kernel; and _packed",
    QuantRecipe(floor=Floor.SCALE_1E_10, apply=Apply.MUL_RECIP, nan_element=NanElement.LOW),
)
VLLM_CUDA_UE8M0_GENERIC = _quantizer(
    "vllm_cuda_ue8m0_generic",
    "vLLM 0.33.0 _C.per_token_group_fp8_quant, scale_ue8m0, generic kernel (fp32 input, group 64)",
    QuantRecipe(
        floor=Floor.SCALE_1E_10,
        apply=Apply.MUL_RECIP,
        power_of_two=PowerOfTwo.LOG2,
        nan_element=NanElement.LOW,
    ),
)
VLLM_CUDA_0_26 = _quantizer(
    "vllm_cuda_0_26",
    "vLLM 0.26.0 _C.per_token_group_fp8_quant, fp32 scales: divides",
    QuantRecipe(floor=Floor.AMAX_1E_10, apply=Apply.DIVIDE, nan_element=NanElement.LOW),
)
VLLM_TRITON_QUANT = _quantizer(
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
SGLANG_JIT = _quantizer(
    "sglang_jit",
    "SGLang 0.5.23 per_token_group_quant.cuh, built with --use_fast_math",
    QuantRecipe(
        floor=Floor.AMAX_1E_10,
        scale_form=ScaleForm.MUL_RECIP_448,
        apply=Apply.MUL_MULTIPLIER_FAST,
    ),
)
SGLANG_TRITON = _quantizer(
    "sglang_triton",
    "SGLang 0.5.23 fp8_kernel.py; its two layouts write y / s and y * (1 / s), the same bits here",
    QuantRecipe(
        floor=Floor.AMAX_1E_10,
        scale_form=ScaleForm.MUL_RECIP_448,
        apply=Apply.DIVIDE_FULL,
        power_of_two=PowerOfTwo.LOG2,
        nan_element=NanElement.LOW,
    ),
)
FLASHINFER_CUTLASS = _quantizer(
    "flashinfer_cutlass",
    "FlashInfer 0.7.4 fp8_blockscale_gemm_90: TensorRT-LLM's source under -use_fast_math",
    QuantRecipe(
        zero_group=ZeroGroup.SCALE_ONE,
        scale_form=ScaleForm.RECIP_OF_MULTIPLIER_FAST,
        apply=Apply.MUL_MULTIPLIER_FAST,
        nan_amax=NanAmax.IGNORE_UNLESS_ALL,
    ),
)
FLASHINFER_TRTLLM_GEN = _quantizer(
    "flashinfer_trtllm_gen",
    "FlashInfer 0.7.4 trtllm_fused_moe_dev_kernel.cu as written, with IEEE divisions",
    QuantRecipe(floor=Floor.SCALE_MIN_NORMAL, apply=Apply.DIVIDE),
)
FLASHINFER_MONO = _quantizer(
    "flashinfer_mono",
    "FlashInfer 0.7.4 mono_moe, finite input",
    QuantRecipe(
        floor=Floor.AMAX_1E_10,
        scale_form=ScaleForm.MUL_RECIP_448,
        apply=Apply.MUL_MULTIPLIER_FAST,
    ),
)

FUSED = (GemmRecipe(), SwigluRecipe(), CombineRecipe())
"""DeepGEMM's chain, CUTLASS SiLU rounded once, weights on BF16 rows in k order."""

OURS = _layer(OURS, *FUSED)
TRTLLM_FUSED = _layer(TRTLLM_FUSED, *FUSED)
TRTLLM_DECODE = _layer(
    _quantizer(
        "trtllm_decode",
        "TensorRT-LLM PR 21250: Triton decode path, mma.sync, dot * a_s * b_s, tl.sigmoid",
        TRTLLM_FUSED.of(Stage.ACT_QUANT),
    ),
    GemmRecipe(unit=DotUnit.MMA_F16, scale_order=ScaleOrder.A_THEN_B),
    SwigluRecipe(silu=Silu.TL_SIGMOID),
    CombineRecipe(),
)


def _experts(
    name: str,
    source: str,
    act: Recipe,
    mid: QuantRecipe,
    gemm: GemmRecipe,
    swiglu: SwigluRecipe,
    combine: CombineRecipe,
) -> Recipe:
    """Return a layer whose two quantizers differ."""
    stages = {Stage.ACT_QUANT: act.of(Stage.ACT_QUANT), Stage.SWIGLU_QUANT: mid}
    return Recipe(
        name=name, source=source, stages=stages, gemm=gemm, swiglu=swiglu, combine=combine
    )


_UNFUSED = SwigluRecipe(
    silu=Silu.DIV,
    product_rounding=ProductRounding.TWICE,
    clamp_rounding=ClampRounding.GATE,
    shift=Shift.ALWAYS,
)
_EPILOGUE = CombineRecipe(weights_at=WeightsAt.EPILOGUE, step=SumStep.MUL_ADD)
VLLM_TRITON = _experts(
    "vllm_triton",
    "vLLM 0.33.0 TritonExperts with BLOCK_M of 64 or more; silu_and_mul, moe_sum",
    VLLM_CUDA,
    VLLM_CUDA.of(Stage.ACT_QUANT),
    GemmRecipe(scale_order=ScaleOrder.A_THEN_B),
    _UNFUSED,
    _EPILOGUE,
)
VLLM_TRITON_SWAP = _experts(
    "vllm_triton_swap",
    "vLLM 0.33.0 TritonExperts with BLOCK_M below 64 on SM90: swap-AB, the other scale order",
    VLLM_CUDA,
    VLLM_CUDA.of(Stage.ACT_QUANT),
    GemmRecipe(scale_order=ScaleOrder.B_THEN_A),
    _UNFUSED,
    _EPILOGUE,
)
VLLM_CLAMPED_SCALAR = dataclasses.replace(
    VLLM_TRITON,
    name="vllm_clamped_scalar",
    source="vLLM 0.33.0 silu_and_mul_with_clamp where I is no multiple of 8: the scalar path",
    swiglu=dataclasses.replace(_UNFUSED, clamp_rounding=ClampRounding.BOTH),
)
VLLM_FUSED_SILU = _experts(
    "vllm_fused_silu",
    "vLLM 0.33.0 _C.silu_and_mul_per_block_quant (TritonExperts without UE8M0; compile fusion)",
    VLLM_CUDA,
    QuantRecipe(floor=Floor.SCALE_FUSED, apply=Apply.DIVIDE, nan_element=NanElement.HIGH),
    GemmRecipe(scale_order=ScaleOrder.A_THEN_B),
    SwigluRecipe(product_rounding=ProductRounding.NONE),
    _EPILOGUE,
)
_COLMAJOR = SwigluRecipe(
    silu=Silu.DIV_FULL,
    product_rounding=ProductRounding.TWICE,
    clamp_rounding=ClampRounding.BOTH,
    shift=Shift.ALWAYS_BF16,
    clamp_nan=ClampNan.LOW,
)
VLLM_DEEPGEMM = _experts(
    "vllm_deepgemm",
    "vLLM 0.33.0 DeepGemmExperts on SM90: silu_mul_per_token_group_quant_fp8_colmajor, ep_gather",
    VLLM_CUDA_UE8M0,
    VLLM_TRITON_QUANT.of(Stage.ACT_QUANT),
    GemmRecipe(),
    _COLMAJOR,
    CombineRecipe(),
)
VLLM_DEEPGEMM_PACKED = _experts(
    "vllm_deepgemm_packed",
    "vLLM 0.33.0 DeepGemmExperts with packed UE8M0: silu_mul_quant_fp8_packed",
    VLLM_CUDA_UE8M0,
    dataclasses.replace(VLLM_TRITON_QUANT.of(Stage.ACT_QUANT), floor=Floor.SCALE_1E_10),
    GemmRecipe(),
    SwigluRecipe(silu=Silu.DIV_FULL, shift=Shift.ALWAYS, clamp_nan=ClampNan.LOW),
    CombineRecipe(),
)
VLLM_BATCHED = _experts(
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
DEEPGEMM_GEMM = Recipe(
    name="deepgemm_gemm",
    source="DeepGEMM 2.6.1 sm90_fp8_gemm_1d2d, every layout",
    gemm=GemmRecipe(),
)
NO_ROUNDING = Recipe(name="no_rounding", source="integers and copies: alignment, permutation")

ALL: dict[str, Recipe] = {
    recipe.name: recipe for recipe in tuple(globals().values()) if isinstance(recipe, Recipe)
}
