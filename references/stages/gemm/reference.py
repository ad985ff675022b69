"""Block-scaled E4M3 GEMM, of one expert and of many, for any recipe, bit for bit.

Per interval of K, ascending: p = the unit's dot product from a fresh accumulator, then the two
scales and one accumulation step in fp32, as the recipe says, over K or over each half of it; at the
end one rounding to BF16.
DeepGEMM on SM90 is exactly ``product_first`` with ``fma`` on FP8 WGMMA (measured on an H200).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import BLOCK, E4M3, f32_to_bf16, round_bf16
from moe_parity.references.arithmetic.rounding import add_rn, fma_rn, mul_rn
from moe_parity.references.chips import tensor_core, unit_named
from moe_parity.references.errors import ParityError
from moe_parity.references.stages.gemm.decisions import (
    Accumulate,
    BiasAt,
    DotUnit,
    GemmRecipe,
    Interval,
    ScaleOrder,
    SplitK,
    half_of,
)

INTERVALS = {Interval.K128: 128, Interval.K64: 64, Interval.K32: 32}


def gemm(a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, recipe: GemmRecipe) -> Tensor:
    """Return the fp32 accumulator [M, N] of ``a`` [M, K] times the transpose of ``w`` [N, K].

    ``a`` and ``w`` are uint8 codes, ``a_scale`` fp32 [M, ceil(K / 128)], ``w_scale`` fp32
    [ceil(N / 128), ceil(K / 128)].  Raises ParityError where shapes do not fit.
    """
    _check(a, a_scale, w, w_scale)
    wide = w_scale.repeat_interleave(BLOCK, 0)[: w.shape[0]]
    step = INTERVALS[recipe.interval]
    accumulator = torch.zeros((a.shape[0], w.shape[0]), dtype=torch.float32, device=a.device)
    transposed = w.t()
    half = cut(a.shape[1], recipe)
    first: Tensor | None = None
    for start in range(0, a.shape[1], step):
        if start == half:
            first, accumulator = accumulator, torch.zeros_like(accumulator)
        part = a[:, start : start + step].contiguous()
        product = dot(part, transposed[start : start + step].contiguous(), recipe.unit)
        block = start // BLOCK
        s_a, s_b = a_scale[:, block, None], wide[None, :, block]
        accumulator = accumulate(accumulator, product, s_a, s_b, recipe)
    return accumulator if first is None else add_rn(first, accumulator)


def cut(k: int, recipe: GemmRecipe) -> int | None:
    """Return where a recipe begins another accumulator, None where it has one alone."""
    return half_of(k) if recipe.split_k is SplitK.HALVES else None


def dot(a: Tensor, b: Tensor, unit: DotUnit) -> Tensor:
    """Return the dot products of one interval, fp32 [M, N], from a fresh accumulator."""
    if unit is DotUnit.EXACT:
        # 128 products of 8 bits within 2^-18 .. 2^18 add up exactly in float64.
        return (E4M3.decode(a).double() @ E4M3.decode(b).double()).float()
    return tensor_core.dot(a, b, unit=unit_named(unit))


def accumulate(acc: Tensor, p: Tensor, s_a: Tensor, s_b: Tensor, recipe: GemmRecipe) -> Tensor:
    """Return the accumulator after the dot product of one interval, times its two scales."""
    if recipe.scale_order is ScaleOrder.PRODUCT_FIRST:
        left, right = p, mul_rn(s_a, s_b)
    elif recipe.scale_order is ScaleOrder.A_THEN_B:
        left, right = mul_rn(p, s_a), s_b
    else:
        left, right = mul_rn(p, s_b), s_a
    if recipe.accumulate is Accumulate.FMA:
        return fma_rn(left, right, acc)
    return add_rn(acc, mul_rn(left, right))


def finish(
    accumulator: Tensor, bias: Tensor | None, recipe: GemmRecipe, weight: Tensor | None = None
) -> Tensor:
    """Return BF16 rows [M, N] of an accumulator, plus a bias [N] or [M, N] (fp32) if any.

    ``weight`` [M] is a routing weight that the epilogue applies, on the sum with the bias (vLLM
    0.33.0 ``fused_moe_kernel``).
    """
    if bias is not None:
        early = recipe.bias_at is BiasAt.BEFORE_ROUNDING
        accumulator = add_rn(accumulator if early else round_bf16(accumulator), bias)
    return f32_to_bf16(accumulator if weight is None else mul_rn(accumulator, weight[:, None]))


def _check(a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor) -> None:
    blocks = -(-a.shape[1] // BLOCK)
    wanted = {
        "w": (w.shape, (w.shape[0], a.shape[1])),
        "a_scale": (a_scale.shape, (a.shape[0], blocks)),
        "w_scale": (w_scale.shape, (-(-w.shape[0] // BLOCK), blocks)),
    }
    for name, (got, expected) in wanted.items():
        if tuple(got) != expected:
            raise ParityError(f"gemm: {name} has shape {list(got)}, expected {list(expected)}.")


# --- experts ------------------------------------------------------------------------------------


def hit(expert: Tensor) -> list[int]:
    """Return the local experts that some pair takes, ascending."""
    return sorted(set(expert[expert >= 0].flatten().tolist()))


def grouped(
    a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, expert: Tensor, recipe: GemmRecipe
) -> Tensor:
    """Return the fp32 accumulators [P, N] of rows [P, K], each with its own expert's [N, K].

    Rows of expert -1 stay zero.  On a GPU the whole chain is one Triton kernel; it equals the loop
    over experts and intervals, which is what runs on a CPU and for an exact unit.
    """
    if a.is_cuda and recipe.unit is not DotUnit.EXACT:
        from moe_parity.references.stages.gemm import chain_triton

        return chain_triton.grouped(a, a_scale, w, w_scale, expert, recipe)
    return grouped_plain(a, a_scale, w, w_scale, expert, recipe)


def grouped_plain(
    a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, expert: Tensor, recipe: GemmRecipe
) -> Tensor:
    """Return :func:`grouped` as a loop over the experts that are hit."""
    out = torch.zeros((a.shape[0], w.shape[1]), dtype=torch.float32, device=a.device)
    for index in hit(expert):
        rows = (expert == index).nonzero()[:, 0]
        out[rows] = gemm(a[rows], a_scale[rows], w[index], w_scale[index], recipe)
    return out


def biased(
    rows: Tensor,
    bias: Tensor | None,
    expert: Tensor,
    recipe: GemmRecipe,
    weight: Tensor | None = None,
) -> Tensor:
    """Return BF16 rows [P, N] of accumulators, each with its own expert's bias [E, N] (fp32).

    ``weight`` [P] as in :func:`finish`.
    """
    own = None if bias is None else bias[expert.clamp(min=0)]
    return finish(rows, own, recipe, weight)
