"""Arithmetic by definition, for tests: exact fractions and one rule of rounding, no tensor.

Nothing here is read from the code under test: E4M3 is its specification, and the widths
of the units are those that an H200 showed, written down once more.
"""

from __future__ import annotations

import struct
from fractions import Fraction

UNITS = {
    "wgmma_fp8": (13, 13, [list(range(32))]),
    "mma_f16": (25, 23, [[k for k in range(32) if k % 4 in pair] for pair in ((0, 1), (2, 3))]),
}
"""Unit -> F, R, and the k of each step within 32 of K."""


def e4m3(code: int) -> Fraction | None:
    """Return the value of an E4M3 code, None for NaN; the sign of zero is lost."""
    sign, field, fraction = -1 if code & 0x80 else 1, code >> 3 & 15, code & 7
    if (field, fraction) == (15, 7):
        return None
    size = (8 + fraction) * Fraction(2) ** (field - 10) if field else fraction * Fraction(1, 512)
    return sign * size


def exponent(x: Fraction) -> int:
    """Return floor(log2 |x|)."""
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess if abs(x) >= Fraction(2) ** guess else guess - 1


def nearest(x: Fraction, bits: int, least: int) -> Fraction:
    """Round to ``bits`` significant bits, none below 2^least, to nearest even."""
    if not x:
        return x
    unit = Fraction(2) ** max(exponent(x) - bits + 1, least)
    return round(x / unit) * unit


def downward(x: Fraction, bits: int, least: int) -> Fraction:
    """Round likewise, toward minus infinity."""
    if not x:
        return x
    unit = Fraction(2) ** max(exponent(x) - bits + 1, least)
    return (x / unit).__floor__() * unit


def fp32(x: Fraction) -> Fraction:
    """Return x rounded to fp32; x must not overflow."""
    found = nearest(x, 24, -149)
    assert abs(found) < Fraction(2) ** 128, "overflows fp32"
    return found


def bf16(x: Fraction) -> Fraction:
    """Return x rounded to BF16."""
    return nearest(x, 8, -133)


def code_of(x: Fraction, *, negative: bool = False, saturates: bool = True) -> int:
    """Return the E4M3 code of x; past the end +-448, or the NaN that 480 would be.

    ``negative`` is the sign of a zero.
    """
    size = abs(nearest(x, 4, -9))
    sign = 0x80 if x < 0 or (not x and negative) else 0
    if size >= 480:
        return sign | 0x7E if saturates else 0x7F
    if size < Fraction(1, 64):
        return sign | int(size * 512)
    power = exponent(size)
    return sign | (power + 7) << 3 | int((size / Fraction(2) ** power - 1) * 8)


def word(x: Fraction, *, negative: bool = False) -> int:
    """Return the fp32 bits of a number that fp32 holds; ``negative`` is the sign of a zero."""
    value = float(x)
    assert Fraction(value) == x
    return signed(struct.pack("<f", -0.0 if negative and not x else value))


def signed(raw: bytes) -> int:
    """Return four bytes as int32, as tensors of bits hold them."""
    return int(struct.unpack("<i", raw)[0])


def value(bits: int) -> Fraction:
    """Return the number that int32 bits mean in fp32; they must be finite."""
    return Fraction(struct.unpack("<f", struct.pack("<i", bits))[0])


def dot(a: list[int], b: list[int], c: Fraction, unit: str) -> Fraction:
    """Return what a unit makes of codes and a finite accumulator: one fused dot product and sum.

    Every term is cut to a multiple of 2^(E - F), E the largest exponent of a product as its
    operands are decoded, or of c; the sum is cut to R fraction bits.  No NaN among the codes.
    """
    align, kept, steps = UNITS[unit]
    for start in range(0, len(a), 32):
        for step in steps:
            chosen = [start + k for k in step if start + k < len(a)]
            c = _step([(a[k], b[k]) for k in chosen], c, align, kept)
    return c


def _step(pairs: list[tuple[int, int]], c: Fraction, align: int, kept: int) -> Fraction:
    terms = [(c, max(exponent(c), -126))] if c else []
    for x, y in pairs:
        left, right = e4m3(x), e4m3(y)
        assert left is not None
        assert right is not None
        if left and right:
            terms.append((left * right, max(exponent(left), -6) + max(exponent(right), -6)))
    if not terms:
        return Fraction(0)
    unit = Fraction(2) ** (max(e for _, e in terms) - align)
    total = sum((int(term / unit) for term, _ in terms), 0) * unit  # int() cuts toward zero
    if not total:
        return total
    last = Fraction(2) ** (exponent(total) - kept)
    return int(total / last) * last
