"""Triton kernels of the gated activation: SwiGLU alone, and with the quantization of its result.

Two ways to the rows, VECTOR or not, around one arithmetic, so that they agree bit for bit.  A
vector's rows start at multiples of 16 bytes and have whole groups, and what is loaded is as wide as
the GPU's widest load; the scalar way reads any strides and any width, the last group ragged.

The recipe is ``ours``, with FORM "torch" ``torch_silu_and_mul``.  Every division is ``div_rn``;
launches turn contraction off.
"""

# Triton kernels have no Python types: their arguments are pointers and compile-time constants.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from moe_parity.kernels.ours.align_kernels import local_expert
from moe_parity.kernels.ours.quant_kernels import (
    packed_byte,
    scale_and_multiplier,
    store_scales,
)


@triton.jit
def activated(
    row, inside, limits_ptr, expert, limit, alpha, beta, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    CLAMP: tl.constexpr, SCALED: tl.constexpr, SHIFTED: tl.constexpr, LIMITS: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """Return SwiGLU of ROWS rows at ``row``, rounded to BF16; up lies WIDTH after the gate.

    CLAMP is "none", "before" or "after" SiLU; LIMITS takes one limit for each expert.  FORM is
    "ours" or "torch".
    """
    return gated(
        row, row + WIDTH, inside, limits_ptr, expert, limit, alpha, beta,
        ROWS, CLAMP, SCALED, SHIFTED, LIMITS, FORM,
    )  # fmt: skip


@triton.jit
def gated(
    gate_ptr, up_ptr, inside, limits_ptr, expert, limit, alpha, beta, ROWS: tl.constexpr,
    CLAMP: tl.constexpr, SCALED: tl.constexpr, SHIFTED: tl.constexpr, LIMITS: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """Return SwiGLU of what lies at gates and ups, rounded to BF16; 0 where nothing is inside."""
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr, mask=inside, other=0.0).to(tl.float32)
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
    if FORM == "torch":
        # torch's eager kernels: SiLU as one quotient, which is a BF16 tensor before the product.
        value = tl.math.div_rn(gate, 1.0 + libdevice.exp(0.0 - inner)).to(tl.bfloat16)
        value = value.to(tl.float32)
    else:
        value = gate * tl.math.div_rn(1.0, 1.0 + libdevice.exp(0.0 - inner))
    if CLAMP == "after":
        value = tl.minimum(value, bound)
    if SHIFTED:
        up = up + beta
    return (value * up).to(tl.bfloat16)


@triton.jit
def read(
    rows_ptr, wide, column, inside, rows_row, rows_column, limits_ptr, expert, limit, alpha, beta,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, VECTOR: tl.constexpr,
    CLAMP: tl.constexpr, SCALED: tl.constexpr, SHIFTED: tl.constexpr, LIMITS: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """Return SwiGLU of the elements at rows ``wide`` and ``column``, the one way or the other."""
    if VECTOR:
        y = activated(
            rows_ptr + wide * tl.multiple_of(rows_row, 8) + column[None, :], inside,
            limits_ptr, expert, limit, alpha, beta, WIDTH, ROWS, CLAMP, SCALED, SHIFTED, LIMITS,
            FORM,
        )  # fmt: skip
    else:
        step = rows_column.to(tl.int64)
        gate = rows_ptr + wide * rows_row + column[None, :] * step
        y = gated(
            gate, gate + WIDTH * step, inside,
            limits_ptr, expert, limit, alpha, beta, ROWS, CLAMP, SCALED, SHIFTED, LIMITS, FORM,
        )  # fmt: skip
    return y


@triton.jit
def store_codes(place, y, inside, POWER_OF_TWO: tl.constexpr):
    """Quantize a group of each row and store its codes; return the scales."""
    scale, multiplier = scale_and_multiplier(tl.max(tl.abs(y), 1), POWER_OF_TWO)
    code = (y * multiplier[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(place, code, mask=inside)
    return scale


@triton.jit
def owner(ids_ptr, pair, pairs, first, experts, HAS_IDS: tl.constexpr):
    """Return the local expert of pairs, -1 for what is not to be touched; all are 0 without ids."""
    if HAS_IDS:
        expert = local_expert(ids_ptr, pair, pair < pairs, first, experts)
    else:
        expert = tl.where(pair < pairs, 0, -1)
    return expert


@triton.jit(
    do_not_specialize=[
        "pairs", "first", "experts", "limit", "alpha", "beta", "rows_row", "rows_column",
    ]
)  # fmt: skip
def swiglu_kernel(
    rows_ptr, out_ptr, ids_ptr, limits_ptr, pairs, first, experts, limit, alpha, beta,
    rows_row, rows_column, out_row,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, HAS_IDS: tl.constexpr, VECTOR: tl.constexpr,
    CLAMP: tl.constexpr, SCALED: tl.constexpr, SHIFTED: tl.constexpr, LIMITS: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """SwiGLU of ROWS pairs by 128 columns, BF16: grid (pairs / ROWS, ceil(WIDTH / 128))."""
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = owner(ids_ptr, pair, pairs, first, experts, HAS_IDS)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    inside = (expert >= 0)[:, None] & (column < WIDTH)[None, :]
    wide = pair.to(tl.int64)[:, None]
    y = read(
        rows_ptr, wide, column, inside, rows_row, rows_column, limits_ptr, expert, limit, alpha,
        beta, WIDTH, ROWS, VECTOR, CLAMP, SCALED, SHIFTED, LIMITS, FORM,
    )  # fmt: skip
    tl.store(out_ptr + wide * out_row + column[None, :], y, mask=inside)


@triton.jit(
    do_not_specialize=[
        "pairs", "padded", "first", "experts", "limit", "alpha", "beta", "rows_row", "rows_column",
        "scales_row", "scales_column",
    ]
)  # fmt: skip
def swiglu_quant_kernel(
    rows_ptr, codes_ptr, scales_ptr, ids_ptr, limits_ptr, pairs, padded, first, experts,
    limit, alpha, beta, rows_row, rows_column, codes_row, scales_row, scales_column,
    WIDTH: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    PACKED: tl.constexpr, HAS_IDS: tl.constexpr, VECTOR: tl.constexpr,
    CLAMP: tl.constexpr, SCALED: tl.constexpr, SHIFTED: tl.constexpr, LIMITS: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """SwiGLU of ROWS pairs by a group, or by the four of a packed word, quantized.

    Grid (padded / ROWS, scales or words of a row).
    """
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = owner(ids_ptr, pair, pairs, first, experts, HAS_IDS)
    owned = expert >= 0
    wide = pair.to(tl.int64)[:, None]
    parts: tl.constexpr = 4 if PACKED else 1
    held = tl.zeros((ROWS,), tl.int32)
    for part in tl.static_range(parts):
        group = tl.program_id(1) * parts + part
        column = group * G + tl.arange(0, G)
        if VECTOR:
            inside = owned[:, None] & (group * G < WIDTH)  # no mask inside a group
        else:
            inside = owned[:, None] & (column < WIDTH)[None, :]
        y = read(
            rows_ptr, wide, column, inside, rows_row, rows_column, limits_ptr, expert, limit, alpha,
            beta, WIDTH, ROWS, VECTOR, CLAMP, SCALED, SHIFTED, LIMITS, FORM,
        ).to(tl.float32)  # fmt: skip
        scale = store_codes(codes_ptr + wide * codes_row + column[None, :], y, inside, POWER_OF_TWO)
        if PACKED:
            held |= packed_byte(scale, group * G < WIDTH) << (8 * part)
        else:
            held = scale
    store_scales(
        scales_ptr, pair, pairs, padded, tl.program_id(1), held, owned, scales_row, scales_column
    )


@triton.jit(
    do_not_specialize=["pairs", "padded", "first", "experts", "scales_row", "scales_column"]
)
def quant_rows_kernel(
    rows_ptr, codes_ptr, scales_ptr, ids_ptr, pairs, padded, first, experts,
    rows_row, codes_row, scales_row, scales_column,
    WIDTH: tl.constexpr, G: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, PACKED: tl.constexpr, HAS_IDS: tl.constexpr,
):  # fmt: skip
    """Quantize ROWS rows of what SwiGLU left, by groups of any size; TILE is the next power of two.

    Grid (padded / ROWS, scales or words of a row).
    """
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    owned = owner(ids_ptr, pair, pairs, first, experts, HAS_IDS) >= 0
    wide = pair.to(tl.int64)[:, None]
    parts: tl.constexpr = 4 if PACKED else 1
    held = tl.zeros((ROWS,), tl.int32)
    for part in tl.static_range(parts):
        group = tl.program_id(1) * parts + part
        place = tl.arange(0, TILE)
        column = group * G + place
        inside = owned[:, None] & ((place < G) & (column < WIDTH))[None, :]
        y = tl.load(rows_ptr + wide * rows_row + column[None, :], mask=inside, other=0.0)
        y = y.to(tl.float32)
        scale = store_codes(codes_ptr + wide * codes_row + column[None, :], y, inside, POWER_OF_TWO)
        if PACKED:
            held |= packed_byte(scale, group * G < WIDTH) << (8 * part)
        else:
            held = scale
    store_scales(
        scales_ptr, pair, pairs, padded, tl.program_id(1), held, owned, scales_row, scales_column
    )
