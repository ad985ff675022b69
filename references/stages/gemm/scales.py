"""Scales that a GEMM may read: every exponent, and another one in each block.

Where a format has powers of two only, the byte b stands for 2^(b - 127): byte 0 is a subnormal
number of fp32, 255 is NaN.  Scales of other formats have all mantissas beside these exponents, so
that byte 0 holds subnormals of every size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import F32_NAN_BITS, bits_of, from_bits, ue8m0_decode

EDGES = (0, 254, 1, 253, 126, 128, 23, 231)
"""Bytes at the ends of the range, beside 1, and where a product with ordinary scales ends it."""

STRIDE = 73
"""Steps through all 255 bytes, far from one row to the next."""

SPREAD = 11
"""Exponents that the blocks of a row lie apart: all of them reach the accumulator."""

ORDINARY = 122
"""The lowest byte of rows whose scales are ordinary: around 1."""

LARGEST = 254
SPECIAL, NAN, SILENT = (16, 9), (16, 13), (32, 4)
"""Of how many rows which one holds a special scale, a NaN, a block of zeros beside huge scales."""


def coded(
    seed: int, name: str, first: int, rows: int, across: int, *, power_of_two: bool, nan: bool,
    device: str,
) -> Tensor:  # fmt: skip
    """Return fp32 scales [rows, across] of the rows from ``first`` on, a row always the same ones.

    Rows take turns: extreme ones, whose blocks lie near one byte, and ordinary ones, which bring
    the extremes of the other operand to light.  Products of two extremes overflow, or end in zeros
    and subnormals.  ``nan`` puts a NaN into some rows.
    """
    row = torch.arange(first, first + rows, dtype=torch.int64, device=device)[:, None]
    block = torch.arange(across, dtype=torch.int64, device=device)[None]
    turn = row // 2
    edges = torch.tensor(EDGES, device=device)
    base = torch.where(
        turn < len(EDGES), edges[(turn + seed) % len(EDGES)], (STRIDE * turn + seed) % (LARGEST + 1)
    )
    base = torch.where(_is(row, SILENT), LARGEST, base)
    base = torch.where(row % 2 == 1, ORDINARY, base)
    # Neighbours, and places with row and block exchanged, differ.
    step = (5 * block + 3 * row + block // SPREAD) % SPREAD
    byte = torch.where(base + step > LARGEST, base - step, base + step)
    lap = row // SPECIAL[0]
    here = block == lap % max(across, 1)
    if power_of_two:
        made = ue8m0_decode(byte.to(torch.uint8))
        ends = ue8m0_decode(torch.tensor((0, LARGEST), dtype=torch.uint8, device=device))
        special = ends[lap % 2]
    else:
        word = random_bits.words(seed, f"{name}/mantissa", first + rows, across, device=device)
        mantissa = (word[first:] & 0x007FFFFF) | 1
        low = torch.where(base == 0, (step - SPREAD // 2).clamp(min=0), byte)
        made = from_bits(((low << 23) | mantissa).int())
        largest = torch.finfo(torch.float32).max
        ends = torch.tensor((0.0, -0.0, 2.0**-149, largest), device=device)
        special = torch.where(lap % 2 == 1, from_bits(mantissa.int()), ends[lap // 2 % 4])
    made = torch.where(_is(row, SPECIAL) & here, special, made)
    if nan:
        bits = torch.full_like(bits_of(made), F32_NAN_BITS)
        made = torch.where(_is(row, NAN) & here, from_bits(bits), made)
    return made


def silenced(codes: Tensor, block: int) -> Tensor:
    """Return codes [rows, K] with zeros of both signs in one block of some rows.

    Beside scales whose product is infinite, or NaN, it counts in which order they are multiplied.
    """
    rows, k = codes.shape
    row = torch.arange(rows, device=codes.device)[:, None]
    column = torch.arange(k, device=codes.device)[None]
    here = (column // block) == (row // SILENT[0]) % max(-(-k // block), 1)
    return torch.where(_is(row, SILENT) & here, codes & 0x80, codes)


def _is(row: Tensor, turn: tuple[int, int]) -> Tensor:
    return row % turn[0] == turn[1]
