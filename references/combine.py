"""The top-k sum, for any recipe, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import f32_to_bf16, f32_to_f16, round_bf16, to_f32
from moe_parity.references.arithmetic.rounding import add_rn, fma_rn, mul_rn
from moe_parity.references.language.layer_decisions import SumOrder, SumStep, WeightsAt
from moe_parity.references.language.recipe import CombineRecipe


def combine(
    rows: Tensor,
    weights: Tensor | None,
    owned: Tensor,
    recipe: CombineRecipe,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Return [M, H] in ``dtype`` from BF16 expert rows [M, k, H].

    ``weights`` fp32 [M, k], None for ones; ``owned`` bool [M, k]: only those rows are looked at.
    Rows whose weight was applied in FC2's epilogue come with it (``WeightsAt.EPILOGUE``).
    """
    tokens, k, columns = rows.shape
    total = torch.zeros((tokens, columns), dtype=torch.float32, device=rows.device)
    steps = range(k) if recipe.order is SumOrder.ASCENDING else reversed(range(k))
    for slot in steps:
        row = to_f32(rows[:, slot])
        if weights is None or recipe.weights_at is WeightsAt.EPILOGUE:
            added = add_rn(total, row)
        elif recipe.step is SumStep.FMA:
            added = fma_rn(weights[:, slot, None].expand_as(row), row, total)
        else:
            added = add_rn(total, mul_rn(weights[:, slot, None], row))
        total = torch.where(owned[:, slot, None], added, total)
    return cast_output(total, dtype)


def weighted(accumulator: Tensor, weight: Tensor | None, recipe: CombineRecipe) -> Tensor:
    """Return FC2's fp32 accumulator [P, H], times its weight [P] where the epilogue applies it."""
    if weight is None or recipe.weights_at is WeightsAt.TOPK_SUM:
        return accumulator
    return mul_rn(accumulator, weight[:, None])


def cast_output(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 to the output type, bf16, fp16 or fp32."""
    if dtype is torch.bfloat16:
        return f32_to_bf16(total)
    return f32_to_f16(total) if dtype is torch.float16 else total


def sum_of(rows: Tensor, weights: Tensor, recipe: CombineRecipe) -> Tensor:
    """Combine fp32 rows [M, k, H] that were not yet rounded: the two stages of a weight's place."""
    if recipe.weights_at is WeightsAt.EPILOGUE:
        rows = mul_rn(rows, weights[:, :, None])
    owned = torch.ones(weights.shape, dtype=torch.bool, device=rows.device)
    return combine(f32_to_bf16(round_bf16(rows)), weights, owned, recipe)
