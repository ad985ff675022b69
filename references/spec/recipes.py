"""The named recipes: what each project's quantizers do.

Each names the code it was read from; whether a recipe is proven against the real
kernel, and on what, is in docs/measurements.
"""

from __future__ import annotations

import dataclasses

from moe_parity.references.spec.layer_decisions import DotUnit, ScaleOrder, Silu
from moe_parity.references.spec.quant_decisions import (
    Apply,
    Floor,
    NanAmax,
    NanElement,
    Overflow,
    PowerOfTwo,
    ScaleForm,
    ZeroGroup,
)
from moe_parity.references.spec.recipe import (
    CombineRecipe,
    GemmRecipe,
    QuantRecipe,
    Recipe,
    SwigluRecipe,
)
from moe_parity.references.spec.stage import Stage


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
    "moe_parity.kernels.moe_triton: trtllm_fused with a floor where 448/amax overflows",
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
        nan_element=NanElement.LOW,
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

ALL: dict[str, Recipe] = {
    recipe.name: recipe for recipe in tuple(globals().values()) if isinstance(recipe, Recipe)
}
