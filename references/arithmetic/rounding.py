"""Correctly rounded fp32 arithmetic: the operations every recipe is made of.

Subnormals are kept and a NaN result is ``0x7fffffff``, as ``*.rn.f32`` without ``.ftz`` gives on
an H200.  Tensors broadcast; the device is that of the arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import bits_of, from_bits, with_canonical_nan


def f32(value: float, like: Tensor) -> Tensor:
    """Return ``value`` rounded to fp32 as a 0-d tensor beside ``like``.

    torch turns a division by a Python number into a product with its reciprocal on a GPU; a
    tensor operand keeps the division.
    """
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def add_rn(a: Tensor, b: Tensor) -> Tensor:
    """Return RN32(a + b)."""
    return with_canonical_nan(a + b)


def mul_rn(a: Tensor, b: Tensor) -> Tensor:
    """Return RN32(a * b)."""
    return with_canonical_nan(a * b)


def div_rn(a: Tensor, b: Tensor) -> Tensor:
    """Return RN32(a / b): ``div.rn.f32``.  Both arguments are fp32 tensors."""
    return with_canonical_nan(a / b)


def fma_rn(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return RN32(a * b + c) with one rounding: ``fma.rn.f32``.

    The product is exact in float64 (48 bits).  TwoSum gives the error of the float64 sum, and
    rounding that sum to odd makes the final cast to fp32 the only rounding that counts (Boldo and
    Melquiond, "Emulation of FMA and correctly rounded sums", IEEE TC 2008).
    """
    return with_canonical_nan(_round_to_odd_sum(a.double() * b.double(), c.double()).float())


def fma_rm(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c rounded once toward minus infinity: ``fma.rm.f32``, finite results only.

    A sum that is exactly zero is -0, unless product and c are both +0 (IEEE 754, section 6.3).
    """
    product, third = a.double() * b.double(), c.double()
    exact = _round_to_odd_sum(product, third)
    near = exact.float()
    near = torch.where(near.double() > exact, _next_below(near), near)
    signed = torch.signbit(product) | torch.signbit(third)
    return with_canonical_nan(torch.where((exact == 0) & signed, -0.0, near))


def _round_to_odd_sum(p: Tensor, c: Tensor) -> Tensor:
    """Return p + c in float64, rounded to odd: an inexact sum never looks exact."""
    total = p + c
    back = total - p
    error = (p - (total - back)) + (c - back)
    bits = total.contiguous().view(torch.int64)
    # An even sum with an error moves one unit toward the error; that neighbour is odd.
    toward = torch.where((error > 0) == (total > 0), 1, -1)
    # Of a sum that is not finite the error is NaN, and no NaN is greater.
    inexact = (error.abs() > 0) & ((bits & 1) == 0)
    return torch.where(inexact, bits + toward, bits).view(torch.float64)


def _next_below(x: Tensor) -> Tensor:
    bits = bits_of(x)
    below = torch.where(bits > 0, bits - 1, bits + 1)
    smallest = torch.full_like(bits, -0x7FFFFFFF)
    return from_bits(torch.where((bits & 0x7FFFFFFF) == 0, smallest, below))


def ceil_pow2(x: Tensor) -> Tensor:
    """Return the smallest power of two not below ``|x|``, by bits: exponent, +1 if a fraction.

    Zero gives 0, subnormals 2^-126, values past 2^127 and Inf give Inf; NaN gives -0, since the
    carry runs into the sign.  Source: vLLM 0.33.0's register kernel (exponent field plus
    0x00800000 if the fraction is not zero).
    """
    bits = bits_of(x) & 0x7FFFFFFF
    carry = torch.where((bits & 0x007FFFFF) != 0, 0x00800000, 0)
    exponent = (bits & 0x7F800000).to(torch.int64) + carry
    return from_bits(torch.where(exponent >= 1 << 31, exponent - (1 << 32), exponent).int())


def ceil_pow2_clamped(x: Tensor) -> Tensor:
    """Return :func:`ceil_pow2` with the exponent byte clamped to 1..254: always a normal number.

    Source: DeepGEMM 2.6.1 ``ceil_to_ue8m0``.
    """
    bits = bits_of(x) & 0x7FFFFFFF
    exponent = (bits >> 23) + ((bits & 0x007FFFFF) != 0).to(torch.int32)
    return from_bits(exponent.clamp(1, 254) << 23)
