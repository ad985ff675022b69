"""Inputs on which the decisions of SwiGLU show: BF16 rows, gate then up."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import BLOCK, bits_of, from_bits, round_bf16
from moe_parity.references.stages.swiglu.silu import Silu, silu_of_the_pools


def every_gate(seed: int) -> Tensor:
    """BF16 [rows, 2 * 128], gate then up: pairs on which the forms of SiLU differ after rounding.

    All BF16 gates of 2^-8 .. 2^6 of both signs against all mantissas of up are tried, and those
    kept on which any form of SiLU gives another BF16 product; ordinary pairs fill the last row.
    """
    return _gates_that_tell(seed, tuple(Silu))


FIRST_FORMS = ("mul_recip", "div", "tl_sigmoid", "div_full", "div_approx", "fast")
"""The forms of SiLU that the first pool's gates tell apart; a form that is added changes none."""


def every_gate_of_pool_1(seed: int) -> Tensor:
    """:func:`every_gate` for the forms of SiLU that were known when the first pool was frozen."""
    return _gates_that_tell(seed, tuple(form for form in Silu if form in FIRST_FORMS))


def _gates_that_tell(seed: int, forms: tuple[Silu, ...]) -> Tensor:
    gate, up = _telling_pairs(forms)
    missing = -gate.numel() % BLOCK
    gate = torch.cat([gate, round_bf16(random_bits.normal(seed, "gate", 1, missing + 512)[0])])
    up = torch.cat([up, round_bf16(random_bits.normal(seed, "up", 1, missing + 512)[0])])
    return torch.cat([gate.view(-1, BLOCK), up.view(-1, BLOCK)], 1)


@lru_cache(maxsize=2)
def _telling_pairs(forms: tuple[Silu, ...]) -> tuple[Tensor, Tensor]:
    exponent = torch.arange(119, 134, dtype=torch.int32)
    word = ((exponent[:, None] << 23) + (torch.arange(128, dtype=torch.int32) << 16)).flatten()
    gate = from_bits(torch.cat([word, word | -0x80000000]))
    up = 1.0 + torch.arange(128) / 128.0
    products = [round_bf16(silu_of_the_pools(gate, how)[:, None] * up) for how in forms]
    told = torch.zeros(gate.numel(), BLOCK, dtype=torch.bool)
    for product in products[1:]:
        told |= bits_of(product) != bits_of(products[0])
    row, column = told.nonzero(as_tuple=True)
    return gate[row], up[column]


LIMIT = 7.0


def gates_at_the_limit(seed: int, rows: int = 64) -> Tensor:
    """BF16 [rows, 2 * 128]: gates and ups within two units of the limit 7, both signs."""
    gate = LIMIT + 4.0 * (random_bits.uniform(seed, "limit/gate", rows, BLOCK) - 0.5)
    up = LIMIT + 4.0 * (random_bits.uniform(seed, "limit/up", rows, BLOCK) - 0.5)
    sign = 1.0 - 2.0 * random_bits.integers(seed, "limit/sign", rows, BLOCK, below=2).float()
    return round_bf16(torch.cat([gate, up * sign], 1))


ODD_LIMIT = 9.97
"""A limit that is no BF16 number."""


def gates_past_an_odd_limit(seed: int, rows: int = 64) -> Tensor:
    """BF16 [rows, 2 * 128]: gates and ups around 9.97, half of them past it, ups of -0 and NaN."""
    gate = ODD_LIMIT + 8.0 * (random_bits.uniform(seed, "odd/gate", rows, BLOCK) - 0.5)
    up = ODD_LIMIT + 8.0 * (random_bits.uniform(seed, "odd/up", rows, BLOCK) - 0.5)
    sign = 1.0 - 2.0 * random_bits.integers(seed, "odd/sign", rows, BLOCK, below=2).float()
    zero = random_bits.integers(seed, "odd/zero", rows, BLOCK, below=8) == 0
    up = torch.where(zero, torch.full_like(up, -0.0), up * sign)
    up[:, ::16] = float("nan")
    return round_bf16(torch.cat([gate, up], 1))


LOW_LIMIT = 1.0115
"""No BF16 number, and what it is rounded to shows in SiLU of it and in it plus one, in BF16 too."""


def gates_past(limit: float, seed: int, rows: int) -> Tensor:
    """BF16 [rows, 2 * 128]: gates up to four times a limit, ups of both signs up to twice it."""
    gate = 4.0 * limit * random_bits.uniform(seed, "past/gate", rows, BLOCK)
    up = 4.0 * limit * (random_bits.uniform(seed, "past/up", rows, BLOCK) - 0.5)
    return round_bf16(torch.cat([gate, up], 1))


def shifted_ups(seed: int, rows: int) -> Tensor:
    """BF16 [rows, 2 * 128]: ups that lose bits beside a beta of 1, every fourth one -0."""
    gate = 1.0 + 7.0 * random_bits.uniform(seed, "shift/gate", rows, BLOCK)
    up = 4.0 * random_bits.normal(seed, "shift/up", rows, BLOCK)
    up[:, ::4] = -0.0
    return round_bf16(torch.cat([gate, up], 1))
