"""Triton kernels that visit the live rows of a prefix-sum layout: GEMM, SwiGLU, top-k sum.

``ends`` are the exclusive ends of the experts' live rows; an expert starts at the end before,
rounded up to ALIGN.  Rows between an end and the next start are neither read nor written.  The
recipe is ``ours``: every operation on values is a function of the kernels on routed pairs.
"""

# Triton kernels have no Python types: their arguments are pointers and compile-time constants.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from moe_parity.kernels.ours.activation_kernels import activated, store_codes
from moe_parity.kernels.ours.batched_kernels import tile_of
from moe_parity.kernels.ours.layer_kernels import product
from moe_parity.kernels.ours.permute_kernels import start_of
from moe_parity.kernels.ours.quant_kernels import packed_byte


@triton.jit
def expert_of(ends_ptr, row, experts, ALIGN: tl.constexpr, EXPERTS: tl.constexpr):
    """Return the expert in whose room a row lies, and the end of its live rows.

    The end is 0, before any row, for rows past the last expert's room.
    """
    lane = tl.arange(0, EXPERTS)
    end = tl.load(ends_ptr + lane, mask=lane < experts, other=0)
    passed = (lane < experts) & ((end + ALIGN - 1) // ALIGN * ALIGN <= row)
    expert = tl.sum(passed.to(tl.int32), 0)
    return expert, tl.load(ends_ptr + expert, mask=expert < experts, other=0)


@triton.jit(do_not_specialize=["experts", "a_scale_row", "a_scale_column"])
def prefix_gemm_kernel(
    w_ptr, w_scale_ptr, a_ptr, a_scale_ptr, bias_ptr, out_ptr, ends_ptr, experts,
    a_row, a_scale_row, a_scale_column, w_expert, w_row,
    w_scale_expert, w_scale_row, w_scale_column,
    N: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr, ALIGN: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK rows by BLOCK_N rows of their expert's weight: grid (rows / BLOCK, N / BLOCK_N).

    BLOCK divides ALIGN, so that no tile crosses an expert; a tile without a live row ends at once.
    """
    first = tl.program_id(0) * BLOCK
    owner, end = expert_of(ends_ptr, first, experts, ALIGN, EXPERTS)
    if first >= end:
        return
    expert = owner.to(tl.int64)
    row = first + tl.arange(0, BLOCK)
    live = row < end
    wide = row.to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, 128)
    w_tile = w_ptr + expert * w_expert + n[:, None].to(tl.int64) * w_row + k[None, :]
    a_tile = a_ptr + wide[None, :] * a_row + k[:, None]
    tile = (tl.program_id(1) * BLOCK_N // 128).to(tl.int64)
    w_scales = w_scale_ptr + expert * w_scale_expert + tile * w_scale_row
    acc = product(
        w_tile, w_scales, w_scale_column, (n < N)[:, None],
        a_tile, a_scale_ptr + wide * a_scale_row, a_scale_column, live, K, BLOCK_N, BLOCK,
    )  # fmt: skip
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert * N + n, mask=n < N, other=0.0)[:, None]
    out = out_ptr + wide[None, :] * N + n[:, None]
    tl.store(out, acc.to(tl.bfloat16), mask=live[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["experts", "limit", "alpha", "beta", "scales_row", "scales_column"])
def prefix_quant_kernel(
    rows_ptr, codes_ptr, scales_ptr, ends_ptr, limits_ptr, experts, limit, alpha, beta,
    scales_row, scales_column,
    WIDTH: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, ALIGN: tl.constexpr,
    EXPERTS: tl.constexpr, PACKED: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    CLAMP: tl.constexpr, SCALED: tl.constexpr, SHIFTED: tl.constexpr, LIMITS: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """SwiGLU and quantization of all live rows; any grid of one axis.

    Persistent: program p takes the tiles p, p + programs ... of ROWS live rows and a group, or the
    four groups that share a word.  The grid says how many programs, the ends how many tiles.
    """
    lane = tl.arange(0, EXPERTS)
    begin = start_of(ends_ptr, lane, lane < experts, ALIGN)
    end = tl.load(ends_ptr + lane, mask=lane < experts, other=0)
    count = tl.maximum(end - begin, 0)
    tile_ends = tl.cumsum((count + ROWS - 1) // ROWS, 0)
    tiles = tl.sum((count + ROWS - 1) // ROWS, 0)
    groups: tl.constexpr = WIDTH // G
    parts: tl.constexpr = 4 if PACKED else 1
    across: tl.constexpr = (groups + parts - 1) // parts
    for item in range(tl.program_id(0), tiles * across, tl.num_programs(0)):
        expert, first, own = tile_of(item // across, count, tile_ends, ROWS, EXPERTS)
        start = tl.sum(tl.where(lane == expert, begin, 0), 0)
        inner = first + tl.arange(0, ROWS)
        live = inner < own
        wide = (start + inner).to(tl.int64)
        owner = tl.where(live, expert, -1)
        column = item % across
        packed = tl.zeros((ROWS,), tl.int32)
        scale = tl.zeros((ROWS,), tl.float32)
        for part in tl.static_range(parts):
            group = column * parts + part
            inside = live[:, None] & (group < groups)
            at = group * G + tl.arange(0, G)[None, :]
            y = activated(
                rows_ptr + wide[:, None] * (2 * WIDTH) + at, inside, limits_ptr, owner,
                limit, alpha, beta, WIDTH, ROWS, CLAMP, SCALED, SHIFTED, LIMITS, FORM,
            ).to(tl.float32)  # fmt: skip
            scale = store_codes(codes_ptr + wide[:, None] * WIDTH + at, y, inside, POWER_OF_TWO)
            packed |= packed_byte(scale, group < groups) << (8 * part)
        to = scales_ptr + wide * scales_row + column.to(tl.int64) * scales_column
        if PACKED:
            tl.store(to, packed, mask=live)
        else:
            tl.store(to, scale, mask=live)


@triton.jit
def prefix_combine_kernel(
    rows_ptr, weights_ptr, place_ptr, out_ptr, out_row,
    TOPK: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Sum the rows at a token's places, k ascending, in fp32: grid (tokens, COLUMNS / BLOCK)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(TOPK):
        pair = token * TOPK + slot
        place = tl.load(place_ptr + pair).to(tl.int64)
        owned = place >= 0
        row = tl.load(rows_ptr + place * COLUMNS + column, mask=inside & owned, other=0.0)
        row = row.to(tl.float32)
        if WEIGHTED:
            weight = tl.load(weights_ptr + pair, mask=owned, other=0.0)
            added = tl.fma(tl.zeros((BLOCK,), tl.float32) + weight, row, total)
        else:
            added = total + row
        total = tl.where(owned, added, total)
    out = out_ptr + token * out_row + column
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)
