"""One tensor-core dot product, bit for bit, for any unit of the kind that ``chip`` describes.

For one output element and one step of L products with the accumulator c (fp32), the unit

1. takes every product exactly, with the exponent e(a) + e(b) of the operands as decoded (an E4M3
   subnormal has exponent -6); zero products take no part in the next step;
2. finds E, the largest exponent among the products and c;
3. truncates every term, c included, toward zero to a multiple of 2^(E - F);
4. adds the terms exactly;
5. truncates the sum toward zero to R fraction bits and stores it as fp32; a zero is +0.

Measured on an H200; the public MMA-Sim model (arXiv 2511.10909) has the same numbers.  An E4M3
NaN makes its own row or column ``0x7fffffff``; an infinite c stays infinite.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import E4M3, F32_NAN_BITS, bits_of, from_bits
from moe_parity.references.chips.chip import GROUP, Unit
from moe_parity.references.errors import ParityError

NO_EXPONENT = -4096
"""Stands for the exponent of a zero: below every other one."""


def dot(a: Tensor, b: Tensor, c: Tensor | None = None, *, unit: Unit) -> Tensor:
    """Return a @ b + c as the unit computes it.

    ``a`` is uint8 E4M3 codes [M, K], ``b`` uint8 [K, N], ``c`` fp32 [M, N] or None for zeros; the
    result is fp32 [M, N].  On a CPU this is the compiled form, on a GPU a Triton kernel; both
    equal :func:`dot_plain`.  Raises ParityError for other dtypes or shapes that do not fit.
    """
    a, b, c = _checked(a, b, c)
    if a.is_cuda:
        from moe_parity.references.chips import tensor_core_triton

        return tensor_core_triton.dot(a, b, c, unit)
    from moe_parity.references.chips import tensor_core_numba

    return tensor_core_numba.dot(a, b, c, unit)


def dot_plain(a: Tensor, b: Tensor, c: Tensor | None = None, *, unit: Unit) -> Tensor:
    """Return :func:`dot` in the plainest form: integers, one step at a time, any device."""
    a, b, c = _checked(a, b, c)
    for start in range(0, a.shape[1], GROUP):
        for step in unit.steps:
            k = torch.tensor(step, device=a.device) + start
            c = _step(a[:, k], b[k], c, unit)
    return mark_nan(c, a, b)


def _step(a: Tensor, b: Tensor, c: Tensor, unit: Unit) -> Tensor:
    """One step: ``a`` [M, L] and ``b`` [L, N] codes, ``c`` fp32 [M, N]."""
    (ma, ea), (mb, eb) = operand(a), operand(b)
    product = ma[:, :, None] * mb[None]
    exponent = ea[:, :, None] + eb[None]
    mc, ec = accumulator(c)
    top = torch.maximum(exponent.amax(1), ec)
    # A product is m * 2^(e - 6), c is m * 2^(e - 23); both go to units of 2^(E - F).
    terms = _shift(product, exponent - 6 - (top[:, None] - unit.alignment_bits))
    total = terms.sum(1) + _shift(mc, ec - 23 - (top - unit.alignment_bits))
    size = total.abs()
    length = torch.where(size > 0, torch.frexp(size.double())[1], 0).long()
    surplus = (length - (unit.result_bits + 1)).clamp(min=0)
    size = (size >> surplus) << surplus
    unit_value = torch.pow(2.0, (top.clamp(min=-126) - unit.alignment_bits).double())
    value = (size.double() * unit_value).float()
    value = torch.where(total < 0, -value, value)
    return torch.where(torch.isfinite(c), value, c)


def operand(code: Tensor) -> tuple[Tensor, Tensor]:
    """Decode codes to (signed integer significand, exponent): value = m * 2^(e - 3), int64."""
    word = code.long()
    field, fraction = (word >> 3) & 15, word & 7
    significand = torch.where(field == 0, fraction, fraction + 8)
    exponent = torch.where(field == 0, -6, field - 7)
    exponent = torch.where(significand == 0, NO_EXPONENT, exponent)
    return torch.where(word >= 128, -significand, significand), exponent


def accumulator(c: Tensor) -> tuple[Tensor, Tensor]:
    """Decode fp32 to (signed integer significand, exponent): value = m * 2^(e - 23), int64."""
    bits = bits_of(c).long()
    field, fraction = (bits >> 23) & 0xFF, bits & 0x007FFFFF
    significand = torch.where(field == 0, fraction, fraction + (1 << 23))
    exponent = torch.where(field == 0, -126, field - 127)
    exponent = torch.where(significand == 0, 2 * NO_EXPONENT, exponent)
    return torch.where(bits < 0, -significand, significand), exponent


def _shift(value: Tensor, places: Tensor) -> Tensor:
    """Multiply integers by 2^places, truncating toward zero."""
    size = value.abs()
    up = size << places.clamp(0, 40)
    down = size >> (-places).clamp(0, 62)
    moved = torch.where(places >= 0, up, down)
    return torch.where(value < 0, -moved, moved)


def has_nan(codes: Tensor) -> bool:
    """Whether any operand is a NaN."""
    return bool(E4M3.is_nan(codes).any())


def mark_nan(result: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Put the unit's NaN where an operand's row or column, or the accumulator, holds one."""
    row = E4M3.is_nan(a).any(1)[:, None]
    column = E4M3.is_nan(b).any(0)[None]
    bits = bits_of(result)
    nan = row | column | torch.isnan(result)
    return from_bits(torch.where(nan, torch.full_like(bits, F32_NAN_BITS), bits))


def value_and_exponent(code: Tensor) -> tuple[Tensor, Tensor]:
    """Decode codes for the fast forms: value (fp32, NaN as 0) and exponent (int32)."""
    index = code.flatten().int()
    value, exponent = (table.index_select(0, index).view(code.shape) for table in _of(code.device))
    return value, exponent


@lru_cache(maxsize=8)
def _of(device: torch.device) -> tuple[Tensor, Tensor]:
    """Decode all 256 codes: many small products decode the same ones again and again."""
    code = torch.arange(256, device=device).to(torch.uint8)
    value = E4M3.decode(code)
    return value.masked_fill(torch.isnan(value), 0.0), operand(code)[1].to(torch.int32)


def _checked(a: Tensor, b: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    if a.dtype is not torch.uint8 or b.dtype is not torch.uint8:
        raise ParityError(f"dot takes uint8 E4M3 codes, got {a.dtype} and {b.dtype}.")
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ParityError(f"dot takes [M, K] and [K, N], got {list(a.shape)} and {list(b.shape)}.")
    shape = (a.shape[0], b.shape[1])
    if c is None:
        c = torch.zeros(shape, dtype=torch.float32, device=a.device)
    if c.dtype is not torch.float32 or c.shape != shape:
        raise ParityError(f"c must be float32 {list(shape)}, got {c.dtype} {list(c.shape)}.")
    short = -a.shape[1] % GROUP
    if short:
        a = torch.nn.functional.pad(a, (0, short))
        b = torch.nn.functional.pad(b, (0, 0, 0, short))
    return a, b, c
