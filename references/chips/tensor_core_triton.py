"""The tensor-core model as a Triton kernel for a GPU; bit-equal to ``tensor_core.dot_plain``.

The same three instructions a multiply-add as the CPU form: two exact fp32 products and a
truncating conversion.  It runs on the ordinary cores, so it does not assume what it checks.
"""

# Triton kernels have no Python types: their arguments are pointers and compile-time constants.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_parity.references.chips.chip import GROUP, Unit
from moe_parity.references.chips.tensor_core import mark_nan, value_and_exponent


@triton.jit
def _dot_kernel(
    va_ptr, ea_ptr, vb_ptr, eb_ptr, c_ptr, order_ptr, M, N, K,
    STEPS: tl.constexpr, ALIGN: tl.constexpr, DROP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    row_ok, column_ok = rows < M, columns < N
    ok = row_ok[:, None] & column_ok[None, :]
    place = c_ptr + rows[:, None].to(tl.int64) * N + columns[None, :]
    c = tl.load(place, mask=ok, other=0.0)
    row_start = rows.to(tl.int64) * K
    for step in range((K // 32) * STEPS):
        first = (step // STEPS) * 32
        part = (step % STEPS) * (32 // STEPS)
        field = (c.to(tl.int32, bitcast=True) >> 23) & 0xFF
        top = tl.where(c != 0.0, tl.maximum(field, 1) - 127, -8192)
        for i in range(32 // STEPS):
            k = first + tl.load(order_ptr + part + i)
            ea = tl.load(ea_ptr + row_start + k, mask=row_ok, other=-4096)
            eb = tl.load(eb_ptr + k * N + columns, mask=column_ok, other=-4096)
            top = tl.maximum(top, ea[:, None] + eb[None, :])
        scale = ((ALIGN - tl.maximum(top, -100) + 127) << 23).to(tl.float32, bitcast=True)
        total = tl.zeros((BM, BN), tl.int64)
        for i in range(32 // STEPS):
            k = first + tl.load(order_ptr + part + i)
            va = tl.load(va_ptr + row_start + k, mask=row_ok, other=0.0)
            vb = tl.load(vb_ptr + k * N + columns, mask=column_ok, other=0.0)
            total += ((va[:, None] * vb[None, :]) * scale).to(tl.int32)
        # c is scaled in float64, where a subnormal one loses nothing.
        top = tl.maximum(top, -126)
        unit = ((ALIGN - top + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
        back = ((top - ALIGN + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
        finite = field != 255
        total += tl.where(finite, c.to(tl.float64) * unit, 0.0).to(tl.int64)
        bits = (total.to(tl.float64).to(tl.int64, bitcast=True) >> DROP) << DROP
        c = tl.where(finite, (bits.to(tl.float64, bitcast=True) * back).to(tl.float32), c)
    tl.store(place, c, mask=ok)


def dot(a: Tensor, b: Tensor, c: Tensor, unit: Unit) -> Tensor:
    """Return the dot product; arguments as checked by :func:`tensor_core.dot`, K % 32 == 0."""
    (va, ea), (vb, eb) = value_and_exponent(a), value_and_exponent(b)
    result = c.contiguous().clone()
    flat = [k for step in unit.steps for k in step]
    order = torch.tensor(flat, dtype=torch.int32, device=a.device)
    (rows, depth), columns = a.shape, b.shape[1]
    if rows and columns:
        grid = (triton.cdiv(rows, 64), triton.cdiv(columns, 64))
        _dot_kernel[grid](
            va, ea, vb, eb, result, order, rows, columns, depth,
            STEPS=len(unit.steps), ALIGN=unit.alignment_bits, DROP=52 - unit.result_bits,
            BM=64, BN=64, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return mark_nan(result, a, b)


assert GROUP == 32  # the kernel's literal
