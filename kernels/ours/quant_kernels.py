"""Triton kernels that quantize to E4M3, following the recipe ``ours`` bit for bit.

Every rounding is asked for by name: ``div_rn`` for a division, ``tl.fma`` nowhere (there is none),
and the launch turns contraction off.  The maximum ignores NaN, so an all-NaN group has amax 0.
"""

# Triton kernels have no Python types: their arguments are pointers and compile-time constants.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(128)
E4M3_MAX = tl.constexpr(448.0)
# The smallest fp32 whose 448 / amax is finite; AMAX_OVERFLOW of the reference.
AMAX_FLOOR = tl.constexpr(1.3165537626040637e-36)


@triton.jit
def scale_and_multiplier(amax, POWER_OF_TWO: tl.constexpr):
    """Return the stored scale and the factor of the elements for groups with this maximum."""
    amax = tl.maximum(amax, 0.0)  # an all-NaN group
    floored = tl.maximum(amax, AMAX_FLOOR)
    if POWER_OF_TWO:
        bits = tl.math.div_rn(floored, E4M3_MAX).to(tl.int32, bitcast=True)
        exponent = ((bits >> 23) & 0xFF) + ((bits & 0x007FFFFF) != 0).to(tl.int32)
        # At least 1 by itself: a quotient below 2^-126 is not zero.  Infinity has no ceiling.
        exponent = tl.minimum(exponent, 254)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        multiplier = tl.math.div_rn(1.0, scale)
    else:
        multiplier = tl.math.div_rn(E4M3_MAX, floored)
        scale = tl.math.div_rn(1.0, multiplier)
    zero = amax == 0.0
    return tl.where(zero, 1.0, scale), tl.where(zero, 1.0, multiplier)


@triton.jit
def packed_byte(scale, exists):
    """Return the exponent byte of power-of-two scales; that of a group that is none is 0."""
    return tl.where(exists, (scale.to(tl.int32, bitcast=True) >> 23) & 0xFF, 0)


@triton.jit
def store_scales(scales_ptr, row, rows, padded, column, held, live, scales_row, scales_column):
    """Store a column of scales, or of packed words, of live rows, wherever their strides say.

    Rows ``rows`` .. ``padded`` are the padding of a layout: they get 0.
    """
    place = scales_ptr + row.to(tl.int64) * scales_row + column.to(tl.int64) * scales_column
    padding = (row >= rows) & (row < padded)
    tl.store(place, tl.where(padding, 0, held), mask=live | padding)


@triton.jit(do_not_specialize=["rows"])
def act_quant_kernel(
    x_ptr, codes_ptr, scales_ptr, rows,
    x_row, x_column, codes_row, scales_row, scales_column,
    G: tl.constexpr, ROWS: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """Quantize ROWS rows of one group: grid (ceil(rows / ROWS), groups)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    column = group * G + tl.arange(0, G)
    live = row < rows
    wide = row.to(tl.int64)
    place = x_ptr + wide[:, None] * x_row + column[None, :].to(tl.int64) * x_column
    x = tl.load(place, mask=live[:, None], other=0.0).to(tl.float32)
    scale, multiplier = scale_and_multiplier(tl.max(tl.abs(x), 1), POWER_OF_TWO)
    code = (x * multiplier[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(codes_ptr + wide[:, None] * codes_row + column[None, :], code, mask=live[:, None])
    store_scales(scales_ptr, row, rows, rows, group, scale, live, scales_row, scales_column)


@triton.jit(do_not_specialize=["rows"])
def act_quant_packed_kernel(
    x_ptr, codes_ptr, words_ptr, rows, groups,
    x_row, x_column, codes_row, words_row, words_column,
    G: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Quantize ROWS rows of four groups and pack their exponents: grid (.., ceil(groups / 4))."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.program_id(1)
    live = row < rows
    wide = row.to(tl.int64)
    packed = tl.zeros((ROWS,), tl.int32)
    for part in tl.static_range(4):
        group = word * 4 + part
        column = group * G + tl.arange(0, G)
        mask = live[:, None] & (group < groups)
        place = x_ptr + wide[:, None] * x_row + column[None, :].to(tl.int64) * x_column
        x = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        scale, multiplier = scale_and_multiplier(tl.max(tl.abs(x), 1), True)
        code = (x * multiplier[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        tl.store(codes_ptr + wide[:, None] * codes_row + column[None, :], code, mask=mask)
        packed |= packed_byte(scale, group < groups) << (8 * part)
    store_scales(words_ptr, row, rows, rows, word, packed, live, words_row, words_column)


@triton.jit
def weight_quant_kernel(
    w_ptr, codes_ptr, scales_ptr, rows, columns,
    w_row, w_column, codes_row, scales_row, scales_column,
    BLOCK: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """Quantize one BLOCK x BLOCK tile, edges ragged: grid (row tiles, column tiles)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    wide = row.to(tl.int64)[:, None]
    place = w_ptr + wide * w_row + column.to(tl.int64)[None, :] * w_column
    w = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    scale, multiplier = scale_and_multiplier(tl.max(tl.max(tl.abs(w), 1), 0), POWER_OF_TWO)
    code = (w * multiplier).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(codes_ptr + wide * codes_row + column[None, :], code, mask=mask)
    tile = scales_ptr + tl.program_id(0) * scales_row + tl.program_id(1) * scales_column
    tl.store(tile, scale)


@triton.jit
def requantize_kernel(
    old_ptr, old_scales_ptr, codes_ptr, scales_ptr, rows, columns,
    old_row, old_scales_row, codes_row, scales_row,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Requantize one tile of E4M3 weights from its fp32 scale to a power of two."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    wide = row.to(tl.int64)[:, None]
    old = tl.load(old_ptr + wide * old_row + column[None, :], mask=mask, other=0)
    old_scale = tl.load(old_scales_ptr + tl.program_id(0) * old_scales_row + tl.program_id(1))
    w = old.to(tl.float8e4nv, bitcast=True).to(tl.float32) * old_scale
    scale, multiplier = scale_and_multiplier(tl.max(tl.max(tl.abs(w), 1), 0), True)
    code = (w * multiplier).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(codes_ptr + wide * codes_row + column[None, :], code, mask=mask)
    tl.store(scales_ptr + tl.program_id(0) * scales_row + tl.program_id(1), scale)
