"""Inputs on which the decisions of the GEMMs, SwiGLU and the top-k sum show."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import bits_of, from_bits, round_bf16


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
    limit: float | None = None


def codes(seed: int, name: str, rows: int, columns: int, *, device: str = "cpu") -> Tensor:
    """Return finite E4M3 codes, uint8 [rows, columns]: six binades, few zeros."""
    word = random_bits.words(seed, name, rows, columns, device=device)
    exponent = 5 + ((word >> 8) & 0xFFFF) % 6
    code = (word & 0x87) | (exponent << 3)
    return torch.where((word >> 32) & 31 == 0, word & 0x80, code).to(torch.uint8)


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
    scale = 1.0 + random_bits.uniform(seed, "gemm/sa", rows, half // 128)
    w_scale = 1.0 + random_bits.uniform(seed, "gemm/sb", columns // 128, half // 128)
    moved = w_scale * nudged(seed, "gemm/move", columns // 128, half // 128)
    return GemmInputs(
        a=torch.cat([a, a], 1),
        a_scale=torch.cat([scale, scale * nudged(seed, "gemm/move_a", rows, half // 128)], 1),
        w=torch.cat([w, w ^ 0x80], 1),
        w_scale=torch.cat([w_scale, moved], 1),
    )


def biased_gemm(seed: int) -> GemmInputs:
    """Ordinary operands and a bias that is no BF16 number."""
    inputs = cancelling_gemm(seed)
    bias = random_bits.normal(seed, "gemm/bias", 1, inputs.w.shape[0])[0]
    return GemmInputs(
        a=inputs.a, a_scale=inputs.a_scale, w=inputs.w, w_scale=inputs.w_scale, bias=bias
    )


def every_gate(seed: int) -> Tensor:
    """BF16 [rows, 2 * 128], gate then up: pairs on which the forms of SiLU differ after rounding.

    All BF16 gates of 2^-8 .. 2^6 of both signs against all mantissas of up are tried, and those
    kept on which any form of SiLU gives another BF16 product; ordinary pairs fill the last row.
    """
    # Late: the decisions name this module, and SiLU's forms are decisions.
    from moe_parity.references.language.layer_decisions import Silu

    return _gates_that_tell(seed, tuple(Silu))


FIRST_FORMS = ("mul_recip", "div", "tl_sigmoid", "div_full", "div_approx", "fast")
"""The forms of SiLU that the first pool's gates tell apart; a form that is added changes none."""


def every_gate_of_pool_1(seed: int) -> Tensor:
    """:func:`every_gate` for the forms of SiLU that were known when the first pool was frozen."""
    from moe_parity.references.language.layer_decisions import Silu

    return _gates_that_tell(seed, tuple(form for form in Silu if form in FIRST_FORMS))


def _gates_that_tell(seed: int, forms: tuple[Any, ...]) -> Tensor:
    gate, up = _telling_pairs(forms)
    missing = -gate.numel() % 128
    gate = torch.cat([gate, round_bf16(random_bits.normal(seed, "gate", 1, missing + 512)[0])])
    up = torch.cat([up, round_bf16(random_bits.normal(seed, "up", 1, missing + 512)[0])])
    return torch.cat([gate.view(-1, 128), up.view(-1, 128)], 1)


@lru_cache(maxsize=2)
def _telling_pairs(forms: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    from moe_parity.references.swiglu import silu

    exponent = torch.arange(119, 134, dtype=torch.int32)
    word = ((exponent[:, None] << 23) + (torch.arange(128, dtype=torch.int32) << 16)).flatten()
    gate = from_bits(torch.cat([word, word | -0x80000000]))
    up = 1.0 + torch.arange(128) / 128.0
    products = [round_bf16(silu(gate, how)[:, None] * up) for how in forms]
    told = torch.zeros(gate.numel(), 128, dtype=torch.bool)
    for product in products[1:]:
        told |= bits_of(product) != bits_of(products[0])
    row, column = told.nonzero(as_tuple=True)
    return gate[row], up[column]


LIMIT = 7.0


def gates_at_the_limit(seed: int) -> Tensor:
    """BF16 [rows, 2 * 128]: gates and ups within two units of the limit 7, both signs."""
    gate = LIMIT + 4.0 * (random_bits.uniform(seed, "limit/gate", 64, 128) - 0.5)
    up = LIMIT + 4.0 * (random_bits.uniform(seed, "limit/up", 64, 128) - 0.5)
    sign = 1.0 - 2.0 * random_bits.integers(seed, "limit/sign", 64, 128, below=2).float()
    return round_bf16(torch.cat([gate, up * sign], 1))


ODD_LIMIT = 9.97
"""A limit that is no BF16 number."""


def gates_past_an_odd_limit(seed: int) -> Tensor:
    """BF16 [rows, 2 * 128]: gates and ups around 9.97, half of them past it, ups of -0 and NaN."""
    gate = ODD_LIMIT + 8.0 * (random_bits.uniform(seed, "odd/gate", 64, 128) - 0.5)
    up = ODD_LIMIT + 8.0 * (random_bits.uniform(seed, "odd/up", 64, 128) - 0.5)
    sign = 1.0 - 2.0 * random_bits.integers(seed, "odd/sign", 64, 128, below=2).float()
    zero = random_bits.integers(seed, "odd/zero", 64, 128, below=8) == 0
    up = torch.where(zero, torch.full_like(up, -0.0), up * sign)
    up[:, ::16] = float("nan")
    return round_bf16(torch.cat([gate, up], 1))


@dataclass(frozen=True, kw_only=True)
class CombineInputs:
    """A token's expert rows before their rounding to BF16, fp32 [M, k, H], and weights [M, k]."""

    rows: Tensor
    weights: Tensor


def cancelling_rows(seed: int) -> CombineInputs:
    """Pairs of rows that cancel, far apart in k, beside small terms; full fp32 mantissas."""
    tokens, k, columns = 64, 8, 256
    rows = random_bits.normal(seed, "rows", tokens * k, columns).view(tokens, k, columns)
    # The unit in the last place of the large terms is that of the result's BF16.
    rows[:, 0] = round_bf16(rows[:, 0] * 2.0**16)
    rows[:, k - 1] = -rows[:, 0]
    weights = 0.5 + 0.5 * random_bits.uniform(seed, "weights", tokens, k)
    weights[:, k - 1] = from_bits(bits_of(weights[:, 0].contiguous()) + 1)
    return CombineInputs(rows=rows, weights=weights)
