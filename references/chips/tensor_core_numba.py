"""The tensor-core model compiled for a CPU by numba; bit-equal to ``tensor_core.dot_plain``.

A product of two E4M3 values is exact in fp32, so is its product with the power of two that brings
it to units of 2^(E - F), and the conversion to an integer truncates toward zero: three vector
instructions a multiply-add.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from torch import Tensor

from moe_parity.references.chips.chip import GROUP, Unit
from moe_parity.references.chips.tensor_core import NO_EXPONENT, mark_nan, value_and_exponent

_SERIAL_BELOW = 1 << 20
"""Multiply-adds under which starting threads costs more than it saves."""

_COLUMNS = 256
"""Columns walked at once: 32 rows of values and exponents of this width stay in the L1 cache."""


def dot(a: Tensor, b: Tensor, c: Tensor, unit: Unit) -> Tensor:
    """Return the dot product; arguments as checked by :func:`tensor_core.dot`, K % 32 == 0."""
    (va, ea), (vb, eb) = value_and_exponent(a), value_and_exponent(b)
    result = c.contiguous().clone()
    order = np.array([k for step in unit.steps for k in step], dtype=np.int64)
    walk = _serial if result.numel() * a.shape[1] < _SERIAL_BELOW else _parallel
    walk(
        va.numpy(), ea.numpy(), vb.numpy(), eb.numpy(), result.numpy(),
        order, len(unit.steps), unit.alignment_bits, 52 - unit.result_bits,
    )  # fmt: skip
    return mark_nan(result, a, b)


def _compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return numba's decorator, which keeps what it compiles where it finds a place for it."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:  # neither the package nor a home may be written: compiled every time
            return numba.njit(**options)(function)

    return decorate


@_compiled(inline="always")
def _pow2(exponent: Any) -> Any:
    """2^exponent as fp32 for -126 <= exponent <= 127."""
    return np.int32((exponent + 127) << 23).view(np.float32)


@_compiled(inline="always")
def _pow2_64(exponent: Any) -> Any:
    """2^exponent as float64 for any exponent met here."""
    return np.int64((exponent + 1023) << 52).view(np.float64)


@_compiled(parallel=True, error_model="numpy")
def _parallel(
    va: Any, ea: Any, vb: Any, eb: Any, out: Any, order: Any, steps: Any, align: Any, drop: Any
) -> None:
    for row in numba.prange(va.shape[0]):
        _row(va[row], ea[row], vb, eb, out[row], order, steps, align, drop)


@_compiled(error_model="numpy")
def _serial(
    va: Any, ea: Any, vb: Any, eb: Any, out: Any, order: Any, steps: Any, align: Any, drop: Any
) -> None:
    for row in range(va.shape[0]):
        _row(va[row], ea[row], vb, eb, out[row], order, steps, align, drop)


@_compiled(error_model="numpy")
def _row(
    va: Any, ea: Any, vb: Any, eb: Any, out: Any, order: Any, steps: Any, align: Any, drop: Any
) -> None:
    """Compute one row of the result, ``_COLUMNS`` columns at a time."""
    columns = vb.shape[1]
    length = GROUP // steps
    top = np.empty(_COLUMNS, np.int32)
    scale = np.empty(_COLUMNS, np.float32)
    part = np.empty(_COLUMNS, np.int32)
    total = np.empty(_COLUMNS, np.float64)
    for left in range(0, columns, _COLUMNS):
        width = min(_COLUMNS, columns - left)
        c = out[left : left + width]
        for start in range(0, len(va), GROUP):
            for step in range(steps):
                chosen = order[step * length : (step + 1) * length]
                _top(top, c, ea, eb, chosen, start, left)
                for j in range(width):
                    # Only a tiny c beside zero products lies under -100: see _finish.
                    scale[j] = _pow2(align - max(top[j], -100))
                    total[j] = 0.0
                # Eight products of 2^27 fit an int32; float64 holds any sum of them exactly.
                for block in range(0, length, 8):
                    _terms(part, va, vb, scale, chosen[block : block + 8], start, left, width)
                    for j in range(width):
                        total[j] += part[j]
                _finish(c, top, total, align, drop)


@_compiled(error_model="numpy")
def _top(top: Any, c: Any, ea: Any, eb: Any, chosen: Any, start: Any, left: Any) -> None:
    """Find the largest exponent of each column's terms."""
    width = len(c)
    bits = c.view(np.int32)
    for j in range(width):
        field = np.int32((bits[j] >> 23) & 0xFF)
        top[j] = max(field, np.int32(1)) - np.int32(127) if c[j] != 0 else np.int32(2 * NO_EXPONENT)
    for position in chosen:
        k = start + position
        e = ea[k]
        if e > NO_EXPONENT:
            row = eb[k, left : left + width]
            for j in range(width):
                top[j] = max(top[j], np.int32(e + row[j]))


@_compiled(error_model="numpy")
def _terms(
    part: Any, va: Any, vb: Any, scale: Any, chosen: Any, start: Any, left: Any, width: Any
) -> None:
    """Sum the truncated products of up to eight k."""
    for j in range(width):
        part[j] = 0
    for position in chosen:
        k = start + position
        v = va[k]
        if v != 0:
            row = vb[k, left : left + width]
            for j in range(width):
                part[j] = np.int32(part[j] + np.int32(np.float32(v * row[j]) * scale[j]))


@_compiled(error_model="numpy")
def _finish(c: Any, top: Any, total: Any, align: Any, drop: Any) -> None:
    """Add the truncated accumulator in float64, cut the sum to the result's width, store it."""
    words = total.view(np.int64)
    for j in range(len(c)):
        if np.isfinite(c[j]):
            e = np.int64(max(top[j], -126))
            up, down = _pow2_64(align - e), _pow2_64(e - align)
            total[j] += np.trunc(np.float64(c[j]) * up)
            words[j] = (words[j] >> drop) << drop
            c[j] = np.float32(total[j] * down)
