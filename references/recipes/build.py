"""How recipes are put together from parts."""

from __future__ import annotations

from moe_parity.references.language.recipe import Recipe
from moe_parity.references.stages.combine import CombineRecipe
from moe_parity.references.stages.gemm.decisions import GemmRecipe
from moe_parity.references.stages.quant.decisions import QuantRecipe
from moe_parity.references.stages.swiglu.decisions import SwigluRecipe

FUSED = (GemmRecipe(), SwigluRecipe(), CombineRecipe())
"""DeepGEMM's chain, CUTLASS SiLU rounded once, weights on BF16 rows in k order."""


def quantizer(name: str, source: str, recipe: QuantRecipe, *, weights: bool = False) -> Recipe:
    """Return a recipe of activations, and of weights where they are quantized alike."""
    parts = {"act_quant": recipe} | ({"weight_quant": recipe} if weights else {})
    return Recipe(name=name, source=source, parts=parts)


def layer(base: Recipe, gemm: GemmRecipe, swiglu: SwigluRecipe, combine: CombineRecipe) -> Recipe:
    """Return ``base`` with the parts of a whole layer; its quantizer is used twice."""
    mid = base.of("act_quant", QuantRecipe)
    return base.with_parts(swiglu_quant=mid, gemm=gemm, swiglu=swiglu, combine=combine)


def experts(
    name: str,
    source: str,
    act: Recipe,
    mid: QuantRecipe,
    gemm: GemmRecipe,
    swiglu: SwigluRecipe,
    combine: CombineRecipe,
) -> Recipe:
    """Return a layer whose two quantizers differ."""
    parts = {
        "act_quant": act.of("act_quant", QuantRecipe), "swiglu_quant": mid, "gemm": gemm,
        "swiglu": swiglu, "combine": combine,
    }  # fmt: skip
    return Recipe(name=name, source=source, parts=parts)
