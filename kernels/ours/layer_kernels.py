"""Triton kernels of the layer around the activation: grouped GEMM, top-k sum.

The recipe is ``ours``.  Weights stand on the M side of the dot (swap-AB), so that 16 tokens reach
the FP8 WGMMA unit as 128 do, and a token's bits depend on nothing but the token.  Every FMA is
written as one; launches turn contraction off.
"""

# Triton kernels have no Python types: their arguments are pointers and compile-time constants.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from moe_parity.kernels.ours.align_kernels import local_expert


@triton.jit
def product(
    w_tile, w_scales, w_scale_column, inside, a_tile, a_scales, a_scale_column, live,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return BLOCK_N rows of a weight times BLOCK rows of codes, fp32, before a bias.

    The tiles point at the first 128 columns, the scales at the first of their rows; what is not
    ``inside`` or ``live`` is not read.
    """
    scales_k: tl.constexpr = K // 128
    acc = tl.zeros((BLOCK_N, BLOCK), tl.float32)
    for block in range(scales_k):
        w = tl.load(w_tile, mask=inside, other=0).to(tl.float8e4nv, bitcast=True)
        a = tl.load(a_tile, mask=live[None, :], other=0).to(tl.float8e4nv, bitcast=True)
        partial = tl.dot(w, a)
        s_a = tl.load(a_scales + block * a_scale_column, mask=live, other=0.0)
        scale = s_a * tl.load(w_scales + block * w_scale_column)
        acc = tl.fma(partial, tl.broadcast_to(scale[None, :], (BLOCK_N, BLOCK)), acc)
        w_tile += 128
        a_tile += 128
    return acc


@triton.jit(do_not_specialize=["pairs", "a_scale_row", "a_scale_column"])
def gemm_kernel(
    w_ptr, w_scale_ptr, a_ptr, a_scale_ptr, bias_ptr, out_ptr, slots_ptr, block_expert_ptr, pairs,
    a_row, a_scale_row, a_scale_column, w_expert, w_row,
    w_scale_expert, w_scale_row, w_scale_column,
    N: tl.constexpr, K: tl.constexpr, SHARED: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, DENSE: tl.constexpr = False,
):  # fmt: skip
    """One expert's block of tokens by BLOCK_N rows of its weight: grid (blocks, N / BLOCK_N).

    A pair's activation row is pair // SHARED; its output row is the pair.  DENSE: there is one
    expert, pairs are as they come, and no alignment is read.
    """
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    block = tl.program_id(0) * 0 if DENSE else tl.load(block_expert_ptr + tl.program_id(0))
    expert = block.to(tl.int64)
    if expert < 0:
        return
    pair = slot if DENSE else tl.load(slots_ptr + slot)
    live = pair < pairs
    source = (pair // SHARED).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, 128)
    w_tile = w_ptr + expert * w_expert + n[:, None].to(tl.int64) * w_row + k[None, :]
    a_tile = a_ptr + source[None, :] * a_row + k[:, None]
    tile = (tl.program_id(1) * BLOCK_N // 128).to(tl.int64)
    w_scales = w_scale_ptr + expert * w_scale_expert + tile * w_scale_row
    acc = product(
        w_tile, w_scales, w_scale_column, (n < N)[:, None],
        a_tile, a_scale_ptr + source * a_scale_row, a_scale_column, live, K, BLOCK_N, BLOCK,
    )  # fmt: skip
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert * N + n, mask=n < N, other=0.0)[:, None]
    out = out_ptr + pair[None, :].to(tl.int64) * N + n[:, None]
    tl.store(out, acc.to(tl.bfloat16), mask=live[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["first", "experts"])
def combine_kernel(
    rows_ptr, weights_ptr, ids_ptr, out_ptr, out_row, first, experts,
    TOPK: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Sum a token's owned rows, k ascending, in fp32: grid (tokens, COLUMNS / BLOCK)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(TOPK):
        pair = token * TOPK + slot
        owned = local_expert(ids_ptr, pair, True, first, experts) >= 0
        row = tl.load(rows_ptr + pair * COLUMNS + column, mask=inside & owned, other=0.0)
        row = row.to(tl.float32)
        if WEIGHTED:
            weight = tl.load(weights_ptr + pair, mask=owned, other=0.0)
            added = tl.fma(tl.zeros((BLOCK,), tl.float32) + weight, row, total)
        else:
            added = total + row
        total = tl.where(owned, added, total)
    out = out_ptr + token * out_row + column
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)
