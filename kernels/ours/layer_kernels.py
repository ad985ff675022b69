"""Triton kernels of the layer: grouped GEMM, SwiGLU with quantization, top-k sum.

The recipe is ``ours``.  Weights stand on the M side of the dot (swap-AB), so that 16 tokens reach
the FP8 WGMMA unit as 128 do, and a token's bits depend on nothing but the token.  Every FMA is
written as one, every division is ``div_rn``; launches turn contraction off.
"""

# Triton kernels have no Python types: their arguments are pointers and compile-time constants.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from moe_parity.kernels.ours.align_kernels import local_expert
from moe_parity.kernels.ours.quant_kernels import scale_and_multiplier


@triton.jit(do_not_specialize=["pairs", "a_scale_row", "a_scale_column"])
def gemm_kernel(
    w_ptr, w_scale_ptr, a_ptr, a_scale_ptr, bias_ptr, out_ptr, slots_ptr, block_expert_ptr, pairs,
    a_row, a_scale_row, a_scale_column, w_expert, w_row,
    w_scale_expert, w_scale_row, w_scale_column,
    N: tl.constexpr, K: tl.constexpr, SHARED: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One expert's block of tokens by BLOCK_N rows of its weight: grid (blocks, N / BLOCK_N).

    A pair's activation row is pair // SHARED; its output row is the pair.
    """
    expert = tl.load(block_expert_ptr + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(slots_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    live = pair < pairs
    source = (pair // SHARED).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, 128)
    w_tile = w_ptr + expert * w_expert + n[:, None].to(tl.int64) * w_row + k[None, :]
    a_tile = a_ptr + source[None, :] * a_row + k[:, None]
    scales_k: tl.constexpr = K // 128
    tile = (tl.program_id(1) * BLOCK_N // 128).to(tl.int64)
    w_scales = w_scale_ptr + expert * w_scale_expert + tile * w_scale_row
    acc = tl.zeros((BLOCK_N, BLOCK), tl.float32)
    for block in range(scales_k):
        w = tl.load(w_tile, mask=(n < N)[:, None], other=0).to(tl.float8e4nv, bitcast=True)
        a = tl.load(a_tile, mask=live[None, :], other=0).to(tl.float8e4nv, bitcast=True)
        partial = tl.dot(w, a)
        s_a = tl.load(
            a_scale_ptr + source * a_scale_row + block * a_scale_column, mask=live, other=0.0
        )
        scale = s_a * tl.load(w_scales + block * w_scale_column)
        acc = tl.fma(partial, tl.broadcast_to(scale[None, :], (BLOCK_N, BLOCK)), acc)
        w_tile += 128
        a_tile += 128
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert * N + n, mask=n < N, other=0.0)[:, None]
    out = out_ptr + pair[None, :].to(tl.int64) * N + n[:, None]
    tl.store(out, acc.to(tl.bfloat16), mask=live[None, :] & (n < N)[:, None])


@triton.jit
def activated(
    row, inside, limits_ptr, expert, limit, alpha, beta, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    CLAMP: tl.constexpr, SCALED: tl.constexpr, SHIFTED: tl.constexpr, LIMITS: tl.constexpr,
):  # fmt: skip
    """Return SwiGLU of ROWS rows at ``row``, rounded to BF16; up lies WIDTH after the gate.

    CLAMP is "none", "before" or "after" SiLU; LIMITS takes one limit for each expert.
    """
    gate = tl.load(row, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row + WIDTH, mask=inside, other=0.0).to(tl.float32)
    bound = tl.zeros((ROWS, 1), tl.float32) + limit
    if LIMITS:
        bound = tl.load(limits_ptr + expert, mask=expert >= 0, other=0.0)[:, None]
    if CLAMP != "none":
        up = tl.maximum(tl.minimum(up, bound), 0.0 - bound)
    if CLAMP == "before":
        gate = tl.minimum(gate, bound)
    inner = gate
    if SCALED:
        inner = gate * alpha
    value = gate * tl.math.div_rn(1.0, 1.0 + libdevice.exp(0.0 - inner))
    if CLAMP == "after":
        value = tl.minimum(value, bound)
    if SHIFTED:
        up = up + beta
    return (value * up).to(tl.bfloat16)


@triton.jit(do_not_specialize=["pairs", "first", "experts", "limit", "alpha", "beta"])
def swiglu_kernel(
    rows_ptr, out_ptr, ids_ptr, limits_ptr, pairs, first, experts, limit, alpha, beta,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
    CLAMP: tl.constexpr, SCALED: tl.constexpr, SHIFTED: tl.constexpr, LIMITS: tl.constexpr,
):  # fmt: skip
    """SwiGLU of ROWS pairs by 128 columns, BF16: grid (pairs / ROWS, ceil(WIDTH / 128))."""
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = local_expert(ids_ptr, pair, pair < pairs, first, experts)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    inside = (expert >= 0)[:, None] & (column < WIDTH)[None, :]
    wide = pair.to(tl.int64)[:, None]
    row = rows_ptr + wide * (2 * WIDTH) + column[None, :]
    y = activated(
        row, inside, limits_ptr, expert, limit, alpha, beta,
        WIDTH, ROWS, CLAMP, SCALED, SHIFTED, LIMITS,
    )  # fmt: skip
    tl.store(out_ptr + wide * WIDTH + column[None, :], y, mask=inside)


@triton.jit(do_not_specialize=["pairs", "first", "experts", "limit", "alpha", "beta"])
def swiglu_quant_kernel(
    rows_ptr, codes_ptr, scales_ptr, ids_ptr, limits_ptr, pairs, first, experts, limit, alpha, beta,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    CLAMP: tl.constexpr, SCALED: tl.constexpr, SHIFTED: tl.constexpr, LIMITS: tl.constexpr,
):  # fmt: skip
    """SwiGLU and quantization of ROWS pairs by 128 columns: grid (pairs / ROWS, WIDTH / 128)."""
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = local_expert(ids_ptr, pair, pair < pairs, first, experts)
    owned = (expert >= 0)[:, None]
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    wide = pair.to(tl.int64)[:, None]
    row = rows_ptr + wide * (2 * WIDTH) + column[None, :]
    y = activated(
        row, owned, limits_ptr, expert, limit, alpha, beta,
        WIDTH, ROWS, CLAMP, SCALED, SHIFTED, LIMITS,
    ).to(tl.float32)  # fmt: skip
    scale, multiplier = scale_and_multiplier(tl.max(tl.abs(y), 1), POWER_OF_TWO)
    code = (y * multiplier[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(codes_ptr + wide * WIDTH + column[None, :], code, mask=owned)
    place = scales_ptr + pair.to(tl.int64) * (WIDTH // 128) + tl.program_id(1)
    tl.store(place, scale, mask=expert >= 0)


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
