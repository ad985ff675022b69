"""Triton kernels of the gated activation: SwiGLU alone, and with the quantization of its result.

The recipe is ``ours``.  Every division is ``div_rn``; launches turn contraction off.
"""

# Triton kernels have no Python types: their arguments are pointers and compile-time constants.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from moe_parity.kernels.ours.align_kernels import local_expert
from moe_parity.kernels.ours.quant_kernels import scale_and_multiplier


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
