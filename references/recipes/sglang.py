"""What SGLang's quantizers do."""

from __future__ import annotations

from moe_parity.references.recipes.build import quantizer
from moe_parity.references.stages.quant.decisions import (
    Apply,
    Floor,
    NanElement,
    PowerOfTwo,
    QuantRecipe,
    ScaleForm,
)

SGLANG_JIT = quantizer(
    "sglang_jit",
    "SGLang 0.5.23 per_token_group_quant.cuh, built with --use_fast_math",
    QuantRecipe(
        floor=Floor.AMAX_1E_10,
        scale_form=ScaleForm.MUL_RECIP_448,
        apply=Apply.MUL_MULTIPLIER_FAST,
    ),
)
SGLANG_TRITON = quantizer(
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
