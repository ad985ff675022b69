"""What our own kernels do."""

from __future__ import annotations

import dataclasses

from moe_parity.references.language.recipe import Recipe
from moe_parity.references.recipes.build import FUSED, layer, quantizer
from moe_parity.references.stages.quant.decisions import (
    Apply,
    Floor,
    PowerOfTwo,
    QuantRecipe,
    ScaleForm,
    ZeroGroup,
)
from moe_parity.references.stages.swiglu.decisions import ClampOrder, SwigluRecipe

_QUANTIZER = quantizer(
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
OURS = layer(_QUANTIZER, *FUSED)
OURS_AFTER = dataclasses.replace(
    OURS.with_parts(
        swiglu=dataclasses.replace(OURS.of("swiglu", SwigluRecipe), clamp_order=ClampOrder.AFTER)
    ),
    name="ours_after",
    source="ours with the limit after SiLU",
)
NO_ROUNDING = Recipe(name="no_rounding", source="integers and copies: alignment, permutation")
