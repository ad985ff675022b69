"""The grouped GEMM chain as one Triton kernel for a GPU; bit-equal to the loop in ``reference``.

Rows are sorted by expert into blocks of 16; a program walks K for 16 rows and 64 columns with the
tensor-core model of ``tensor_core_gpu`` and the recipe's scale order and accumulation.
"""

# Triton kernels have no Python types: their arguments are pointers and compile-time constants.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_parity.references.chips import unit_named
from moe_parity.references.chips.tensor_core import has_nan, mark_nan
from moe_parity.references.stages.gemm.decisions import Accumulate, GemmRecipe, ScaleOrder
from moe_parity.references.stages.gemm.reference import INTERVALS, cut
from moe_parity.references.stages.routing import place

ROWS = 16
COLUMNS = 64


@triton.jit
def _exponent(code):
    """Exponent of E4M3 codes as decoded; far below every other for zeros and NaN."""
    field = (code.to(tl.int32) >> 3) & 15
    magnitude = code.to(tl.int32) & 0x7F
    known = (magnitude != 0) & (magnitude != 0x7F)
    return tl.where(known, tl.maximum(field, 1) - 7, -4096)


@triton.jit
def _value(code):
    """Value of E4M3 codes in fp32; 0 for NaN, which is put in afterwards."""
    known = (code & 0x7F) != 0x7F
    return tl.where(known, code, 0).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _chain_kernel(
    a_ptr, sa_ptr, w_ptr, sw_ptr, out_ptr, rows_ptr, block_expert_ptr, order_ptr,
    P, N, K, BLOCKS_K, BLOCKS_N,
    STEPS: tl.constexpr, ALIGN: tl.constexpr, DROP: tl.constexpr, INTERVAL: tl.constexpr,
    A_FIRST: tl.constexpr, B_FIRST: tl.constexpr, FMA: tl.constexpr, HALVES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    expert = tl.load(block_expert_ptr + tl.program_id(0)).to(tl.int64)
    row = tl.load(rows_ptr + tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    live, column_ok = row < P, column < N
    a_row = a_ptr + row * K
    w_row = w_ptr + expert * N * K + column.to(tl.int64) * K
    acc = tl.zeros((BM, BN), tl.float32)
    first_half = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, INTERVAL):
        c = tl.zeros((BM, BN), tl.float32)
        for step in range((INTERVAL // 32) * STEPS):
            first = start + (step // STEPS) * 32
            part = (step % STEPS) * (32 // STEPS)
            field = (c.to(tl.int32, bitcast=True) >> 23) & 0xFF
            top = tl.where(c != 0.0, tl.maximum(field, 1) - 127, -8192)
            for i in range(32 // STEPS):
                k = first + tl.load(order_ptr + part + i)
                ca = tl.load(a_row + k, mask=live & (k < K), other=0)
                cw = tl.load(w_row + k, mask=column_ok & (k < K), other=0)
                top = tl.maximum(top, _exponent(ca)[:, None] + _exponent(cw)[None, :])
            scale = ((ALIGN - tl.maximum(top, -100) + 127) << 23).to(tl.float32, bitcast=True)
            total = tl.zeros((BM, BN), tl.int64)
            for i in range(32 // STEPS):
                k = first + tl.load(order_ptr + part + i)
                ca = tl.load(a_row + k, mask=live & (k < K), other=0)
                cw = tl.load(w_row + k, mask=column_ok & (k < K), other=0)
                total += ((_value(ca)[:, None] * _value(cw)[None, :]) * scale).to(tl.int32)
            top = tl.maximum(top, -126)
            unit = ((ALIGN - top + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
            back = ((top - ALIGN + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
            total += (c.to(tl.float64) * unit).to(tl.int64)
            bits = (total.to(tl.float64).to(tl.int64, bitcast=True) >> DROP) << DROP
            c = (bits.to(tl.float64, bitcast=True) * back).to(tl.float32)
        block = start // 128
        s_a = tl.load(sa_ptr + row * BLOCKS_K + block, mask=live, other=0.0)[:, None]
        place = (expert * BLOCKS_N + column // 128) * BLOCKS_K + block
        s_b = tl.load(sw_ptr + place, mask=column_ok, other=0.0)[None, :]
        if A_FIRST:
            left, right = c * s_a, s_b + tl.zeros((BM, BN), tl.float32)
        elif B_FIRST:
            left, right = c * s_b, s_a + tl.zeros((BM, BN), tl.float32)
        else:
            left, right = c, s_a * s_b
        if HALVES:
            first_half = tl.where(start == K // 2, acc, first_half)
            acc = tl.where(start == K // 2, 0.0, acc)
        acc = tl.fma(left, right, acc) if FMA else acc + left * right
    if HALVES:
        acc = first_half + acc
    out = out_ptr + row[:, None] * N + column[None, :]
    tl.store(out, acc, mask=live[:, None] & column_ok[None, :])


def grouped(
    a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, expert: Tensor, recipe: GemmRecipe
) -> Tensor:
    """Return the fp32 accumulators [P, N]; arguments as in :func:`reference.grouped`."""
    rows, depth = a.shape
    columns = w.shape[1]
    out = torch.zeros((rows, columns), dtype=torch.float32, device=a.device)
    placed = place(expert, w.shape[0], ROWS)
    order, block_expert = placed.pairs(), placed.block_expert()
    if not block_expert.numel() or not columns:
        return out
    unit = unit_named(recipe.unit)
    walk = torch.tensor([k for s in unit.steps for k in s], dtype=torch.int32, device=a.device)
    grid = (block_expert.numel(), triton.cdiv(columns, COLUMNS))
    _chain_kernel[grid](
        a.contiguous(), a_scale.contiguous(), w.contiguous(), w_scale.contiguous(), out,
        order, block_expert, walk, rows, columns, depth, a_scale.shape[1], w_scale.shape[1],
        STEPS=len(unit.steps), ALIGN=unit.alignment_bits, DROP=52 - unit.result_bits,
        INTERVAL=INTERVALS[recipe.interval],
        A_FIRST=recipe.scale_order is ScaleOrder.A_THEN_B,
        B_FIRST=recipe.scale_order is ScaleOrder.B_THEN_A,
        FMA=recipe.accumulate is Accumulate.FMA, HALVES=cut(depth, recipe) is not None,
        BM=ROWS, BN=COLUMNS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return _with_nan(out, a, w, expert)


def _with_nan(out: Tensor, a: Tensor, w: Tensor, expert: Tensor) -> Tensor:
    """Put the unit's NaN into rows and columns that hold a NaN."""
    if not has_nan(a) and not has_nan(w):
        return out
    for index in sorted(set(expert[expert >= 0].tolist())):
        rows = (expert == index).nonzero()[:, 0]
        out[rows] = mark_nan(out[rows], a[rows], w[index].t())
    return out
