"""SwiGLU between the two GEMMs, for any recipe, bit for bit.

Input rows are BF16 [gate | up]; out = silu(gate) * (up + beta) with silu(g) = g * sigmoid(alpha g).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import round_bf16, to_f32
from moe_parity.references.arithmetic.rounding import add_rn, f32, mul_rn
from moe_parity.references.stages.swiglu.decisions import (
    ClampNan,
    ClampOrder,
    ClampRounding,
    ProductRounding,
    Shift,
    SwigluRecipe,
)
from moe_parity.references.stages.swiglu.silu import silu


def swiglu(
    gate_up: Tensor,
    recipe: SwigluRecipe,
    *,
    limit: float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> Tensor:
    """Return fp32 [P, I] of BF16 rows [P, 2 * I], BF16 numbers where the recipe rounds.

    ``limit`` clamps, None does not.  No NaN passes a clamp: one in the gate becomes the limit, one
    in up the limit or its negative (``swiglu.clamp_nan``), as min and max of a GPU do.
    """
    gate, up = to_f32(gate_up).chunk(2, dim=1)
    clamp = limit is not None and recipe.clamp_order is not ClampOrder.IGNORED
    bound = f32(limit if limit is not None else 0.0, gate)
    if clamp:
        if recipe.clamp_nan is ClampNan.HIGH:
            up = _at_least(_at_most(up, bound), -bound)
        else:
            up = _at_most(_at_least(up, -bound), bound)
        if recipe.clamp_order is ClampOrder.BEFORE:
            gate = _at_most(gate, bound)
            if recipe.clamp_rounding in (ClampRounding.GATE, ClampRounding.BOTH):
                gate = round_bf16(gate)
        if recipe.clamp_rounding in (ClampRounding.BOTH, ClampRounding.PRODUCT):
            up = round_bf16(up)
    value = silu(gate, recipe.silu, alpha)
    if clamp and recipe.clamp_order is ClampOrder.AFTER:
        value = _at_most(value, bound)
    if beta or recipe.shift is not Shift.IF_ANY:
        up = add_rn(up, f32(beta, up))
    if recipe.shift is Shift.ALWAYS_BF16:
        up = round_bf16(up)
    rounded = clamp and recipe.clamp_rounding is ClampRounding.PRODUCT
    if rounded or recipe.product_rounding is ProductRounding.TWICE:
        value = round_bf16(value)
    product = mul_rn(value, up)
    if not rounded and recipe.product_rounding is ProductRounding.NONE:
        return product
    return round_bf16(product)


def _at_most(x: Tensor, bound: Tensor) -> Tensor:
    """Return min(x, bound); a NaN gives the bound, as ``min.f32`` does."""
    return torch.where(x <= bound, x, bound)


def _at_least(x: Tensor, bound: Tensor) -> Tensor:
    return torch.where(x >= bound, x, bound)
