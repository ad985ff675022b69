"""What DeepGEMM's kernels and cast helpers do."""

from __future__ import annotations

import dataclasses

from moe_parity.references.language.recipe import Recipe
from moe_parity.references.recipes.build import quantizer
from moe_parity.references.stages.gemm.decisions import GemmRecipe
from moe_parity.references.stages.quant.decisions import (
    Apply,
    Floor,
    NanAmax,
    Overflow,
    PowerOfTwo,
    QuantRecipe,
    ScaleForm,
)

DEEPGEMM = quantizer(
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
_CASTS = DEEPGEMM.of("act_quant", QuantRecipe)
DEEPGEMM_CUDA = quantizer(
    "deepgemm_cuda",
    "the same helpers on CUDA tensors, where torch turns amax / 448.0 into a product",
    dataclasses.replace(_CASTS, scale_form=ScaleForm.MUL_RECIP_448),
    weights=True,
)
DEEPGEMM_NAN = quantizer(
    "deepgemm_nan",
    "the same helpers on CPU tensors under a torch whose E4M3 cast does not saturate (2.11)",
    dataclasses.replace(_CASTS, overflow=Overflow.NAN),
    weights=True,
)
DEEPGEMM_CUDA_NAN = quantizer(
    "deepgemm_cuda_nan",
    "the same helpers on CUDA tensors under a torch whose E4M3 cast does not saturate (2.11)",
    dataclasses.replace(_CASTS, scale_form=ScaleForm.MUL_RECIP_448, overflow=Overflow.NAN),
    weights=True,
)
DEEPGEMM_GEMM = Recipe(
    name="deepgemm_gemm",
    source="DeepGEMM 2.6.1 sm90_fp8_gemm_1d2d, every layout",
    parts={"gemm": GemmRecipe()},
)
