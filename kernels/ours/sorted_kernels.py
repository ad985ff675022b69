"""Triton kernels of the down projection on sorted rows: SwiGLU with quantization, sort, GEMM.

A row lies where its slot is in the alignment: rows of an expert side by side, in whole blocks, so
that a tile of activations is one box of a tensor descriptor (TMA).  The recipe is ``ours``, and so
is every operation on values: the kernels of the route-major layout differ in addresses alone.

Rows of slots that hold no pair have codes 0 and scales 1.  Blocks that are not used are left alone.
"""

# Triton kernels have no Python types: their arguments are pointers and compile-time constants.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from moe_parity.kernels.ours.activation_kernels import activated
from moe_parity.kernels.ours.quant_kernels import scale_and_multiplier


@triton.jit
def store_sorted(
    codes_ptr, scales_ptr, slot, live, code, scale,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store 128 columns of rows in slot order: scales lie by block, then group of K, then row."""
    group = tl.program_id(1)
    column = group * 128 + tl.arange(0, 128)
    code = tl.where(live[:, None], code, 0)
    tl.store(codes_ptr + slot.to(tl.int64)[:, None] * WIDTH + column[None, :], code)
    tile = (slot // BLOCK).to(tl.int64) * (WIDTH // 128) + group
    tl.store(scales_ptr + tile * BLOCK + slot % BLOCK, tl.where(live, scale, 1.0))


@triton.jit(do_not_specialize=["pairs", "limit", "alpha", "beta"])
def swiglu_quant_sorted_kernel(
    rows_ptr, codes_ptr, scales_ptr, slots_ptr, block_expert_ptr, limits_ptr,
    pairs, limit, alpha, beta,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    CLAMP: tl.constexpr, SCALED: tl.constexpr, SHIFTED: tl.constexpr, LIMITS: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """SwiGLU and quantization of ROWS slots by 128 columns: grid (slots / ROWS, WIDTH / 128)."""
    slot = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    owner = tl.load(block_expert_ptr + tl.program_id(0) * ROWS // BLOCK)
    if owner < 0:
        return
    pair = tl.load(slots_ptr + slot)
    live = pair < pairs
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    row = rows_ptr + pair.to(tl.int64)[:, None] * (2 * WIDTH) + column[None, :]
    y = activated(
        row, live[:, None], limits_ptr, tl.where(live, owner, -1), limit, alpha, beta,
        WIDTH, ROWS, CLAMP, SCALED, SHIFTED, LIMITS, FORM,
    ).to(tl.float32)  # fmt: skip
    scale, multiplier = scale_and_multiplier(tl.max(tl.abs(y), 1), POWER_OF_TWO)
    code = (y * multiplier[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    store_sorted(codes_ptr, scales_ptr, slot, live, code, scale, WIDTH, BLOCK)


@triton.jit(do_not_specialize=["pairs", "a_scale_row", "a_scale_column"])
def sort_kernel(
    a_ptr, a_scale_ptr, codes_ptr, scales_ptr, slots_ptr, block_expert_ptr, pairs,
    a_row, a_scale_row, a_scale_column,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copy quantized rows in pair order to their slots: grid (slots / ROWS, WIDTH / 128)."""
    slot = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.load(block_expert_ptr + tl.program_id(0) * ROWS // BLOCK) < 0:
        return
    pair = tl.load(slots_ptr + slot)
    live = pair < pairs
    wide = pair.to(tl.int64)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    code = tl.load(a_ptr + wide[:, None] * a_row + column[None, :], mask=live[:, None], other=0)
    place = a_scale_ptr + wide * a_scale_row + tl.program_id(1).to(tl.int64) * a_scale_column
    scale = tl.load(place, mask=live, other=1.0)
    store_sorted(codes_ptr, scales_ptr, slot, live, code, scale, WIDTH, BLOCK)


@triton.jit(do_not_specialize=["pairs"])
def sorted_gemm_kernel(
    a, a_scale_ptr, w_ptr, w_scale_ptr, bias_ptr, out_ptr, slots_ptr, block_expert_ptr, pairs,
    w_expert, w_row, w_scale_expert, w_scale_row, w_scale_column,
    N: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One expert's block of rows by BLOCK_N rows of its weight: grid (blocks, N / BLOCK_N).

    ``a`` is a descriptor of the sorted codes with boxes of BLOCK x 128; the output row is the pair.
    """
    first = tl.program_id(0) * BLOCK
    expert = tl.load(block_expert_ptr + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    lane = tl.arange(0, BLOCK)
    pair = tl.load(slots_ptr + first + lane)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_rows = w_ptr + expert * w_expert + n[:, None].to(tl.int64) * w_row
    w_tile = w_rows + tl.arange(0, 128)[None, :]
    scales_k: tl.constexpr = K // 128
    tile = (tl.program_id(1) * BLOCK_N // 128).to(tl.int64)
    w_scales = w_scale_ptr + expert * w_scale_expert + tile * w_scale_row
    a_scales = a_scale_ptr + tl.program_id(0).to(tl.int64) * scales_k * BLOCK + lane
    acc = tl.zeros((BLOCK_N, BLOCK), tl.float32)
    for block in range(scales_k):
        w = tl.load(w_tile, mask=(n < N)[:, None], other=0).to(tl.float8e4nv, bitcast=True)
        codes = a.load([first, block * 128]).to(tl.float8e4nv, bitcast=True)
        partial = tl.dot(w, tl.trans(codes))
        scale = tl.load(a_scales + block * BLOCK) * tl.load(w_scales + block * w_scale_column)
        acc = tl.fma(partial, tl.broadcast_to(scale[None, :], (BLOCK_N, BLOCK)), acc)
        w_tile += 128
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert * N + n, mask=n < N, other=0.0)[:, None]
    out = out_ptr + pair[None, :].to(tl.int64) * N + n[:, None]
    tl.store(out, acc.to(tl.bfloat16), mask=(pair < pairs)[None, :] & (n < N)[:, None])
