"""Inputs on which the decisions of a block-scaled GEMM show: small differences of large sums."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import BLOCK, E4M3


@dataclass(frozen=True, kw_only=True)
class GemmInputs:
    """Operands of one expert's GEMM, and its bias or None."""

    a: Tensor
    """E4M3 codes [M, K], uint8."""
    a_scale: Tensor
    """fp32 [M, K / 128]."""
    w: Tensor
    """E4M3 codes [N, K], uint8."""
    w_scale: Tensor
    """fp32 [ceil(N / 128), K / 128]."""
    bias: Tensor | None = None
    """fp32 [N]."""


def codes(seed: int, name: str, rows: int, columns: int, *, device: str = "cpu") -> Tensor:
    """Return finite E4M3 codes, uint8 [rows, columns]: six binades, few zeros."""
    word = random_bits.words(seed, name, rows, columns, device=device)
    exponent = 5 + ((word >> 8) & 0xFFFF) % 6
    code = (word & 0x87) | (exponent << 3)
    return torch.where((word >> 32) & 31 == 0, word & 0x80, code).to(torch.uint8)


def every_code(seed: int, name: str, rows: int, columns: int, *, device: str = "cpu") -> Tensor:
    """Return finite E4M3 codes, uint8 [rows, columns]: all exponents, subnormals and zeros too."""
    drawn = random_bits.integers(seed, name, rows, columns, below=254, device=device)
    return (drawn + (drawn >= E4M3.nan)).to(torch.uint8)


def nudged(seed: int, name: str, rows: int, columns: int, *, device: str = "cpu") -> Tensor:
    """Return fp32 [rows, columns] around 1: 1 + j * 2^-20 with |j| <= 8, full mantissas below."""
    word = random_bits.words(seed, name, rows, columns, device=device)
    return 1.0 + ((word & 15) - 7).float() * 2.0**-20 + ((word >> 8) & 7).float() * 2.0**-23


def cancelling_gemm(seed: int) -> GemmInputs:
    """K doubled, the second half negated, its scales moved by a few 2^-20.

    The result is a small difference of large sums, so every rounding on the way shows in it.
    """
    rows, columns, half = 96, 256, 512
    a = codes(seed, "gemm/a", rows, half)
    w = codes(seed, "gemm/w", columns, half)
    scale = 1.0 + random_bits.uniform(seed, "gemm/sa", rows, half // BLOCK)
    w_scale = 1.0 + random_bits.uniform(seed, "gemm/sb", columns // BLOCK, half // BLOCK)
    moved = w_scale * nudged(seed, "gemm/move", columns // BLOCK, half // BLOCK)
    return GemmInputs(
        a=torch.cat([a, a], 1),
        a_scale=torch.cat([scale, scale * nudged(seed, "gemm/move_a", rows, half // BLOCK)], 1),
        w=torch.cat([w, w ^ 0x80], 1),
        w_scale=torch.cat([w_scale, moved], 1),
    )


def negated_half(seed: int) -> GemmInputs:
    """K doubled, the weights' second half negated, its scales the same.

    Two accumulators cancel to zero at the end, whatever was rounded on the way; one accumulator
    keeps what the roundings left.
    """
    made = cancelling_gemm(seed)
    across = made.a_scale.shape[1] // 2
    a_scale, w_scale = (s[:, :across].repeat(1, 2) for s in (made.a_scale, made.w_scale))
    return GemmInputs(a=made.a, a_scale=a_scale, w=made.w, w_scale=w_scale)


def biased_gemm(seed: int) -> GemmInputs:
    """Ordinary operands and a bias that is no BF16 number."""
    inputs = cancelling_gemm(seed)
    bias = random_bits.normal(seed, "gemm/bias", 1, inputs.w.shape[0])[0]
    return GemmInputs(
        a=inputs.a, a_scale=inputs.a_scale, w=inputs.w, w_scale=inputs.w_scale, bias=bias
    )
