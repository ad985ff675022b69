"""Triton kernels of batched experts [E, T, ...]: quantization, after SwiGLU or alone, and the GEMM.

The live rows of an expert are its first ``counts[e]`` ones; those past them are neither read nor
written.  A count is held between 0 and T, so that no other expert's rows are touched either.  The
recipe is ``ours``: every rounding is that of the kernels on routed pairs, launches turn contraction
off.
"""

# Triton kernels have no Python types: their arguments are pointers and compile-time constants.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from moe_parity.kernels.ours.activation_kernels import activated
from moe_parity.kernels.ours.quant_kernels import scale_and_multiplier


@triton.jit
def live_rows(counts_ptr, expert, inside, tokens):
    """Return the live rows of experts, between 0 and ``tokens``; 0 where ``inside`` is false."""
    count = tl.load(counts_ptr + expert, mask=inside, other=0)
    return tl.minimum(tl.maximum(count, 0), tokens)


@triton.jit
def tile_of(number, count, ends, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """Return the expert of a tile, its first row and the expert's live rows.

    ``count`` and ``ends`` [EXPERTS] are the live rows and the end of the tiles of each expert.
    """
    expert = tl.sum((ends <= number).to(tl.int32), 0)
    own = tl.arange(0, EXPERTS) == expert
    live = tl.sum(tl.where(own, count, 0), 0)
    end = tl.sum(tl.where(own, ends, 0), 0)
    return expert, (number - end) * ROWS + (live + ROWS - 1) // ROWS * ROWS, live


@triton.jit(
    do_not_specialize=[
        "tokens", "limit", "alpha", "beta", "scales_expert", "scales_row", "scales_column",
    ]
)  # fmt: skip
def batched_quant_kernel(
    rows_ptr, codes_ptr, scales_ptr, counts_ptr, limits_ptr, experts, tokens, limit, alpha, beta,
    scales_expert, scales_row, scales_column,
    WIDTH: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
    GATED: tl.constexpr, PACKED: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    CLAMP: tl.constexpr, SCALED: tl.constexpr, SHIFTED: tl.constexpr, LIMITS: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """Quantize the live rows of all experts, of their SwiGLU where GATED; any grid of one axis.

    Persistent: program p takes the tiles p, p + programs ... of ROWS rows and a group, or the four
    groups that share a word.  The grid says how many programs, the counts how many tiles.
    """
    lane = tl.arange(0, EXPERTS)
    count = live_rows(counts_ptr, lane, lane < experts, tokens)
    ends = tl.cumsum((count + ROWS - 1) // ROWS, 0)
    tiles = tl.sum((count + ROWS - 1) // ROWS, 0)
    groups: tl.constexpr = WIDTH // G
    parts: tl.constexpr = 4 if PACKED else 1
    across: tl.constexpr = (groups + parts - 1) // parts
    pitch: tl.constexpr = 2 * WIDTH if GATED else WIDTH
    for item in range(tl.program_id(0), tiles * across, tl.num_programs(0)):
        expert, first, live_count = tile_of(item // across, count, ends, ROWS, EXPERTS)
        row = first + tl.arange(0, ROWS)
        live = row < live_count
        wide = expert.to(tl.int64) * tokens + row
        owner = tl.where(live, expert, -1)
        column = item % across
        packed = tl.zeros((ROWS,), tl.int32)
        scale = tl.zeros((ROWS,), tl.float32)
        for part in tl.static_range(parts):
            group = column * parts + part
            inside = live[:, None] & (group < groups)
            at = group * G + tl.arange(0, G)[None, :]
            place = rows_ptr + wide[:, None] * pitch + at
            if GATED:
                y = activated(
                    place, inside, limits_ptr, owner, limit, alpha, beta,
                    WIDTH, ROWS, CLAMP, SCALED, SHIFTED, LIMITS, FORM,
                ).to(tl.float32)  # fmt: skip
            else:
                y = tl.load(place, mask=inside, other=0.0).to(tl.float32)
            scale, multiplier = scale_and_multiplier(tl.max(tl.abs(y), 1), POWER_OF_TWO)
            code = (y * multiplier[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
            tl.store(codes_ptr + wide[:, None] * WIDTH + at, code, mask=inside)
            byte = (scale.to(tl.int32, bitcast=True) >> 23) & 0xFF
            packed |= tl.where(group < groups, byte, 0) << (8 * part)
        to = scales_ptr + expert.to(tl.int64) * scales_expert
        to += row.to(tl.int64) * scales_row + column.to(tl.int64) * scales_column
        if PACKED:
            tl.store(to, packed, mask=live)
        else:
            tl.store(to, scale, mask=live)


@triton.jit(
    do_not_specialize=["tokens", "tiles", "a_scale_expert", "a_scale_row", "a_scale_column"]
)
def batched_gemm_kernel(
    w_ptr, w_scale_ptr, a_ptr, a_scale_ptr, bias_ptr, out_ptr, counts_ptr, tokens, tiles,
    a_scale_expert, a_scale_row, a_scale_column, w_expert, w_row,
    w_scale_expert, w_scale_row, w_scale_column,
    N: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK rows of one expert by BLOCK_N rows of its weight: grid (E * tiles, N / BLOCK_N).

    ``tiles`` are those of T rows; a tile past the expert's count ends at once.  Weights stand on
    the M side of the dot, as in ``layer_kernels.gemm_kernel``, whose unit and bits it has.
    """
    expert = (tl.program_id(0) // tiles).to(tl.int64)
    first = tl.program_id(0) % tiles * BLOCK
    count = live_rows(counts_ptr, expert, True, tokens)
    if first >= count:
        return
    row = first + tl.arange(0, BLOCK)
    live = row < count
    wide = expert * tokens + row
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, 128)
    w_tile = w_ptr + expert * w_expert + n[:, None].to(tl.int64) * w_row + k[None, :]
    a_tile = a_ptr + wide[None, :] * K + k[:, None]
    a_scales = a_scale_ptr + expert * a_scale_expert + row.to(tl.int64) * a_scale_row
    tile = (tl.program_id(1) * BLOCK_N // 128).to(tl.int64)
    w_scales = w_scale_ptr + expert * w_scale_expert + tile * w_scale_row
    acc = tl.zeros((BLOCK_N, BLOCK), tl.float32)
    blocks: tl.constexpr = K // 128
    for block in range(blocks):
        w = tl.load(w_tile, mask=(n < N)[:, None], other=0).to(tl.float8e4nv, bitcast=True)
        a = tl.load(a_tile, mask=live[None, :], other=0).to(tl.float8e4nv, bitcast=True)
        partial = tl.dot(w, a)
        s_a = tl.load(a_scales + block * a_scale_column, mask=live, other=0.0)
        scale = s_a * tl.load(w_scales + block * w_scale_column)
        acc = tl.fma(partial, tl.broadcast_to(scale[None, :], (BLOCK_N, BLOCK)), acc)
        w_tile += 128
        a_tile += 128
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert * N + n, mask=n < N, other=0.0)[:, None]
    out = out_ptr + wide[None, :] * N + n[:, None]
    tl.store(out, acc.to(tl.bfloat16), mask=live[None, :] & (n < N)[:, None])
