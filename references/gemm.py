"""Block-scaled E4M3 GEMM of one expert, for any recipe, bit for bit.

Per interval of K, ascending: p = the unit's dot product from a fresh accumulator, then the two
scales and one accumulation step in fp32, as the recipe says; at the end one rounding to BF16.
DeepGEMM on SM90 is exactly ``product_first`` with ``fma`` on FP8 WGMMA (measured on an H200).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import e4m3_decode, f32_to_bf16, round_bf16
from moe_parity.references.arithmetic.rounding import add_rn, fma_rn, mul_rn
from moe_parity.references.chips import tensor_core
from moe_parity.references.language.layer_decisions import (
    Accumulate,
    BiasAt,
    DotUnit,
    Interval,
    ScaleOrder,
)
from moe_parity.references.language.recipe import GemmRecipe

BLOCK = 128
"""Columns of K, and rows of a weight, that share a scale."""

UNITS = {
    DotUnit.WGMMA_FP8: tensor_core.WGMMA_FP8,
    DotUnit.MMA_F16: tensor_core.MMA_F16,
}
INTERVALS = {Interval.K128: 128, Interval.K64: 64, Interval.K32: 32}


def gemm(a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, recipe: GemmRecipe) -> Tensor:
    """Return the fp32 accumulator [M, N] of ``a`` [M, K] times the transpose of ``w`` [N, K].

    ``a`` and ``w`` are uint8 codes, ``a_scale`` fp32 [M, ceil(K / 128)], ``w_scale`` fp32
    [ceil(N / 128), ceil(K / 128)].  Raises ValueError where shapes do not fit.
    """
    _check(a, a_scale, w, w_scale)
    wide = w_scale.repeat_interleave(BLOCK, 0)[: w.shape[0]]
    step = INTERVALS[recipe.interval]
    accumulator = torch.zeros((a.shape[0], w.shape[0]), dtype=torch.float32, device=a.device)
    transposed = w.t()
    for start in range(0, a.shape[1], step):
        part = a[:, start : start + step].contiguous()
        product = dot(part, transposed[start : start + step].contiguous(), recipe.unit)
        block = start // BLOCK
        s_a, s_b = a_scale[:, block, None], wide[None, :, block]
        accumulator = _accumulate(accumulator, product, s_a, s_b, recipe)
    return accumulator


def dot(a: Tensor, b: Tensor, unit: DotUnit) -> Tensor:
    """Return the dot products of one interval, fp32 [M, N], from a fresh accumulator."""
    if unit is DotUnit.EXACT:
        # 128 products of 8 bits within 2^-18 .. 2^18 add up exactly in float64.
        return (e4m3_decode(a).double() @ e4m3_decode(b).double()).float()
    return tensor_core.dot(a, b, unit=UNITS[unit])


def _accumulate(acc: Tensor, p: Tensor, s_a: Tensor, s_b: Tensor, recipe: GemmRecipe) -> Tensor:
    if recipe.scale_order is ScaleOrder.PRODUCT_FIRST:
        left, right = p, mul_rn(s_a, s_b)
    elif recipe.scale_order is ScaleOrder.A_THEN_B:
        left, right = mul_rn(p, s_a), s_b
    else:
        left, right = mul_rn(p, s_b), s_a
    if recipe.accumulate is Accumulate.FMA:
        return fma_rn(left, right, acc)
    return add_rn(acc, mul_rn(left, right))


def finish(accumulator: Tensor, bias: Tensor | None, recipe: GemmRecipe) -> Tensor:
    """Return BF16 rows [M, N] of an accumulator, with a bias [N] (fp32) where there is one."""
    if bias is None:
        return f32_to_bf16(accumulator)
    if recipe.bias_at is BiasAt.BEFORE_ROUNDING:
        return f32_to_bf16(add_rn(accumulator, bias))
    return f32_to_bf16(add_rn(round_bf16(accumulator), bias))


def _check(a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor) -> None:
    blocks = -(-a.shape[1] // BLOCK)
    wanted = {
        "w": (w.shape, (w.shape[0], a.shape[1])),
        "a_scale": (a_scale.shape, (a.shape[0], blocks)),
        "w_scale": (w_scale.shape, (-(-w.shape[0] // BLOCK), blocks)),
    }
    for name, (got, expected) in wanted.items():
        if tuple(got) != expected:
            raise ValueError(f"gemm: {name} has shape {list(got)}, expected {list(expected)}.")
