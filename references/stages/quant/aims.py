"""Inputs on which one decision of block quantization shows; random data hides most roundings.

Each function takes a seed and returns fp32 [groups, 128].  Most values are BF16 numbers, so that
rounding to a kernel's input type keeps the aim; what only fp32 can reach is said where it is made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import (
    BLOCK,
    E4M3,
    bits_of,
    e4m3_decode,
    from_bits,
    round_bf16,
)

GROUP = BLOCK


def _spread(seed: int, name: str, amax: Tensor) -> Tensor:
    """Fill groups below their amax [groups]: random signs, 16 binades, zeros, amax itself once."""
    groups = amax.shape[0]
    sign = random_bits.integers(seed, f"{name}/sign", groups, GROUP, below=2).float() * 2 - 1
    size = 0.5 + 0.5 * random_bits.uniform(seed, f"{name}/size", groups, GROUP)
    drop = random_bits.integers(seed, f"{name}/drop", groups, GROUP, below=16)
    x = amax[:, None] * (sign * size) * torch.pow(2.0, -drop.float())
    x = round_bf16(torch.where(drop == 15, torch.zeros_like(x), x))
    place = random_bits.integers(seed, f"{name}/place", groups, 1, below=GROUP)
    return x.clamp(-amax[:, None], amax[:, None]).scatter(1, place, amax[:, None])


def tiny_groups(seed: int) -> Tensor:
    """Walk amax through every exponent from 2^-149 to 2^-3, eight mantissas each."""
    exponent = torch.arange(-149, -2).repeat_interleave(8)
    step = random_bits.integers(seed, "tiny", exponent.numel(), 1, below=128)[:, 0]
    mantissa = 1.0 + step / 128.0
    amax = (mantissa.double() * torch.pow(2.0, exponent.double())).float()
    return _spread(seed, "tiny", torch.where(amax < 2.0**-120, amax, round_bf16(amax)))


def zero_groups(seed: int) -> Tensor:
    """1024 groups of zeros of both signs."""
    sign = random_bits.integers(seed, "zero", 1024, GROUP, below=2).int()
    return from_bits(sign << 31)


def all_amax_mantissas(seed: int) -> Tensor:
    """Every BF16 mantissa of amax in 32 binades, and 2048 fp32 mantissas."""
    mantissa = (1.0 + torch.arange(128) / 128.0).repeat(32)
    binade = torch.arange(-16, 16).repeat_interleave(128)
    short = mantissa * torch.pow(2.0, binade.float())
    full = 1.0 + random_bits.uniform(seed, "amax", 2048, 1)[:, 0]
    return _spread(seed, "amax", torch.cat([short, full]))


def ties(seed: int) -> Tensor:
    """Elements next to the midpoints of E4M3, where the form of a division decides the code.

    All 128 BF16 mantissas of amax against every BF16 number below it in 13 binades, and 512 fp32
    amax with fp32 elements at a midpoint and one unit in the last place to either side.
    """
    return torch.cat([_bf16_pairs(), _fp32_midpoints(seed)])


def _bf16_pairs() -> Tensor:
    amax = 1.0 + torch.arange(128) / 128.0
    mantissa = (1.0 + torch.arange(128) / 128.0).repeat(13)
    x = mantissa * torch.pow(2.0, -torch.arange(13.0)).repeat_interleave(128)
    x = torch.nn.functional.pad(x, (0, -x.numel() % (GROUP - 1)))
    rows = x.view(-1, GROUP - 1).repeat(128, 1)
    tops = amax.repeat_interleave(x.numel() // (GROUP - 1))[:, None]
    return torch.cat([tops, torch.where(rows > tops, rows * 0.5, rows)], 1)


def _fp32_midpoints(seed: int) -> Tensor:
    groups = 512
    amax = 1.0 + random_bits.uniform(seed, "ties/amax", groups, 1)
    codes = e4m3_decode(torch.arange(127, dtype=torch.uint8))
    midpoint = (codes[1:] + codes[:-1]).double() / 2
    nearest = (midpoint[None] * amax.double() / E4M3.largest).float()
    step = random_bits.integers(seed, "ties/step", groups, 126, below=3).int() - 1
    return torch.cat([amax, from_bits(bits_of(nearest) + step), -amax], 1)


def power_of_two_edges(seed: int) -> Tensor:
    """fp32 amax of 448 * 2^k, two values below and six above: not reachable from BF16 input.

    A second set spreads amax over all exponents, so that rounding up and truncating differ; in a
    third amax is Inf beside elements near the largest, where a clamped exponent shows.
    """
    k = torch.arange(-110, 110)
    edge = bits_of(E4M3.largest * torch.pow(2.0, k.float()))
    near = from_bits((edge[:, None] + torch.arange(-2, 7, dtype=torch.int32)).flatten())
    wide = torch.pow(2.0, torch.arange(-100, 100).float()).repeat(3)
    wide = wide * round_bf16(1.0 + random_bits.uniform(seed, "pow2", wide.numel(), 1)[:, 0])
    infinite = _spread(seed, "pow2/inf", torch.full((128,), 2.0**127))
    infinite[:, 0] = float("inf")
    return torch.cat([_spread(seed, "pow2", torch.cat([near, wide])), infinite])


def infinite_elements(seed: int) -> Tensor:
    """128 groups with about 16 infinities each among elements near the largest."""
    x = _spread(seed, "inf", torch.full((128,), 2.0**127))
    where = random_bits.integers(seed, "inf/where", 128, GROUP, below=8) == 0
    return torch.where(where, x.sign().where(x != 0, torch.ones_like(x)) * torch.inf, x)


def past_the_end(seed: int) -> Tensor:
    """Elements that pass 448: infinities under a clamped scale, tiny groups under 448 / amax.

    And groups of one value, every BF16 mantissa in 60 binades: a scale half of what it should be.
    """
    mantissa = (1.0 + torch.arange(128) / 128.0).repeat(60)
    value = mantissa * torch.pow(2.0, torch.arange(-30, 30).repeat_interleave(128).float())
    whole = value[:, None].expand(-1, GROUP)
    return torch.cat([infinite_elements(seed), tiny_groups(seed), whole])


def nan_elements(seed: int) -> Tensor:
    """512 groups with NaN among ordinary elements, 1100 groups of nothing but NaN."""
    x = _spread(seed, "nan", torch.pow(2.0, (torch.arange(512) % 40 - 20).float()))
    where = random_bits.integers(seed, "nan/where", 512, GROUP, below=8) == 0
    return torch.cat([x.masked_fill(where, float("nan")), torch.full((1100, GROUP), float("nan"))])


_FIRST = (
    tiny_groups,
    zero_groups,
    all_amax_mantissas,
    ties,
    power_of_two_edges,
    nan_elements,
    infinite_elements,
)
POOLS = {1: _FIRST, 2: (*_FIRST, past_the_end)}
"""What ``Values.AIMED`` is made of, by the version that ``Case.pool`` names.

A version is frozen: witnesses hold hashes of its inputs and ids name its cases.  A new aim goes
into a new version.
"""
