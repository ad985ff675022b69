"""Groups in which a decision of SwiGLU reaches the codes or the scale: parts of the second pool.

A product that moves by one BF16 step seldom has another E4M3 code.  Here it has: the largest
element of a group is a product that no decision touches (a gate of 32), and it is chosen so that
the midpoint of two codes lies between the products that two recipes give.  What only fp32 shows,
where the product is not rounded, is the largest element itself, so that the scale shows it.

Nothing is drawn: the groups are those of all BF16 gates between 2^-16 and 2^7 of both signs, times
all mantissas of up, that tell one of the pairs.  Functions return fp32 [groups, 256] of BF16
numbers, gate then up; those that name products return fp32 [groups, 128].
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import (
    BLOCK,
    E4M3,
    bits_of,
    from_bits,
    round_bf16,
)
from moe_parity.references.arithmetic.rounding import f32, mul_rn
from moe_parity.references.stages.quant.decisions import Apply, QuantRecipe, ScaleForm
from moe_parity.references.stages.quant.reference import quantize
from moe_parity.references.stages.swiglu.silu import Silu, silu_of_the_pools

BIG_GATE = 32.0
"""SiLU of 32 is 32 exactly, in every form: up = y / 32 makes the product y."""

GROUPS = 9
"""Groups of 127 elements that tell, for each pair of recipes."""
SCALES = 1100
"""Groups whose scale tells, for each pair of forms where the product is not rounded."""
_KEPT = 256
"""Products of a pair that are tried at most, evenly spread."""
_BINADES = 8
"""Binades below amax in which a product is placed; up carries the power of two, exactly."""


@lru_cache(maxsize=1)
def _grid() -> tuple[Tensor, Tensor, dict[Silu, Tensor]]:
    """Return gates [G], mantissas of up [128], and SiLU of the gates in every form."""
    exponent = torch.arange(111, 134, dtype=torch.int32)
    word = ((exponent[:, None] << 23) + (torch.arange(128, dtype=torch.int32) << 16)).flatten()
    gate = from_bits(torch.cat([word, word | -0x80000000]))
    return (
        gate,
        1.0 + torch.arange(128) / 128.0,
        {form: silu_of_the_pools(gate, form) for form in Silu},
    )


def _product(form: Silu, rounding: str) -> Tensor:
    """Return fp32 products [G, 128] of every gate and mantissa."""
    _, up, values = _grid()
    value = values[form]
    if rounding == "twice":
        value = round_bf16(value)
    product = mul_rn(value[:, None], up)
    return product if rounding == "none" else round_bf16(product)


def _pairs() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the products of two recipes that differ in a form of SiLU, or in what is rounded."""
    for rounding in ("once", "twice"):
        products = [_product(form, rounding) for form in Silu]
        yield from itertools.combinations(products, 2)
    products = [_product(Silu.MUL_RECIP, rounding) for rounding in ("once", "none", "twice")]
    yield from itertools.combinations(products, 2)


@lru_cache(maxsize=1)
def code_groups() -> Tensor:
    """Return groups whose codes tell pairs of recipes; pairs that nothing tells have none."""
    made = [groups for left, right in _pairs() for groups in _straddled(left, right)]
    return torch.stack(made)


def _straddled(left: Tensor, right: Tensor) -> Iterator[Tensor]:
    gate, up, _ = _grid()
    row, column = (bits_of(left) != bits_of(right)).nonzero(as_tuple=True)
    step = -(-row.numel() // _KEPT) or 1
    row, column = row[::step], column[::step]
    if not row.numel():
        return
    one, two = left[row, column].double(), right[row, column].double()
    # The power of two that brings the larger product to [1, 2), then one to eight binades below.
    shift = 1 - torch.frexp(torch.maximum(one.abs(), two.abs()))[1]
    shift = shift[:, None] - torch.arange(1, _BINADES + 1)
    amax = 1.0 + torch.arange(128) / 128.0
    told = _codes(one, shift, amax) != _codes(two, shift, amax)
    # Both codes must stand a little beside the midpoint, whatever the scale's own roundings are.
    for nudge in (1 - 2.0**-14, 1 + 2.0**-14):
        told &= _codes(one, shift, amax * nudge) != _codes(two, shift, amax * nudge)
    count = told.flatten(0, 1).sum(0)
    best = count.argsort(descending=True, stable=True)[:GROUPS]
    best = best[count[best] > 0]
    if not best.numel():
        return
    for number, index in enumerate(best[torch.arange(GROUPS) % best.numel()].tolist()):
        which, binade = told[:, :, index].nonzero(as_tuple=True)
        turn = (number + torch.arange(BLOCK - 1)) % which.numel()
        which, binade = which[turn], binade[turn]
        sign = 1.0 - 2.0 * (torch.arange(BLOCK - 1) % 2)
        ups = sign * up[column[which]] * torch.exp2(shift[which, binade].double()).float()
        first = torch.stack([f32(BIG_GATE, amax), amax[index] / BIG_GATE])[:, None]
        yield torch.cat([first, torch.stack([gate[row[which]], ups])], 1).flatten()


def _codes(product: Tensor, shift: Tensor, amax: Tensor) -> Tensor:
    """Return the codes [C, binades, 128] of products [C] under every amax, but for last bits."""
    scaled = product[:, None] * torch.exp2(shift.double())
    return E4M3.encode((scaled[:, :, None] * E4M3.largest / amax.double()).float())


@lru_cache(maxsize=1)
def scale_groups() -> Tensor:
    """Return groups whose largest product tells forms of SiLU in fp32, and with it their scale."""
    gate, up, _ = _grid()
    few = up[::8]
    products = {form: _product(form, "none")[:, ::8].abs() for form in Silu}
    size = products[Silu.MUL_RECIP].flatten()
    # Every product in [1, 2): up carries the power of two, and no floor of a scale is near.
    shift = torch.exp2(1.0 - torch.frexp(size)[1].double()).float()
    scales = {form: p.flatten() * shift / f32(E4M3.largest, p) for form, p in products.items()}
    live = (size > 2.0**-100) & (scales[Silu.FAST] > 0)
    told = torch.stack(
        [(scales[a] != scales[b]) & live for a, b in itertools.combinations(Silu, 2)]
    )
    order = told.sum(0).argsort(descending=True, stable=True)
    chosen = torch.zeros_like(told[0])
    for pair in told:
        lacking = SCALES - int((pair & chosen).sum())
        if lacking > 0:
            chosen[order[(pair & ~chosen)[order]][:lacking]] = True
    index = chosen.nonzero()[:, 0]
    gates, ups = gate[index // few.numel()], few[index % few.numel()] * shift[index]
    fill = (torch.arange(1.0, BLOCK) / (2 * BLOCK * BIG_GATE)).expand(index.numel(), BLOCK - 1)
    return torch.cat([gates[:, None], torch.full_like(fill, BIG_GATE), ups[:, None], fill], 1)


@lru_cache(maxsize=1)
def quotient_groups() -> Tensor:
    """Return products [groups, 128] whose codes tell how an element is divided by its scale.

    Of all BF16 mantissas of amax against all BF16 numbers in the 20 binades below it, those that
    tell two ways beside one form of the scale.
    """
    amax = 1.0 + torch.arange(128) / 128.0
    below = (amax * torch.exp2(-torch.arange(20.0))[:, None]).flatten()
    x = torch.where(below > amax[:, None], below / 2, below)
    groups = torch.cat([amax[:, None], x], 1)
    made = []
    for form in (ScaleForm.DIV_448, ScaleForm.MUL_RECIP_448, ScaleForm.RECIP_OF_MULTIPLIER):
        ways = [
            quantize(groups, QuantRecipe(scale_form=form, apply=how), power_of_two=False)[0]
            for how in Apply
        ]
        for left, right in itertools.combinations(ways, 2):
            told = left != right
            count = told.sum(1)
            best = count.argsort(descending=True, stable=True)[:16]
            best = best[count[best] > 0]
            for number in range(16 if best.numel() else 0):
                row = groups[best[number % best.numel()]]
                some = row[told[best[number % best.numel()]]]
                turn = (number + torch.arange(BLOCK - 1)) % some.numel()
                sign = 1.0 - 2.0 * (torch.arange(BLOCK - 1) % 2)
                made.append(torch.cat([row[:1], sign * some[turn]]))
    return torch.stack(made)


def power_groups() -> Tensor:
    """Return groups whose amax, in fp32, lies two units above 448 * 2^k, for k from -30 to 30.

    SiLU of 2^-23 is a little more than its half.  A power of two by way of a logarithm is one too
    low there for most k, and all codes of the group are others.
    """
    k = torch.arange(-30.0, 31.0)[:, None]
    fill = torch.exp2(k) * 3 * torch.arange(1.0, BLOCK) / BIG_GATE
    first = torch.full_like(k, 2.0**-23)
    ups = torch.exp2(k + 32.0) * 1.75
    return torch.cat([first, torch.full_like(fill, BIG_GATE), ups, fill], 1)


def least_products() -> Tensor:
    """Return products [groups, 128] of nothing but one, every positive BF16 number below 2^-117."""
    word = torch.arange(1, (127 - 117) << 7, dtype=torch.int32) << 16
    return from_bits(word)[:, None].expand(-1, BLOCK).contiguous()


def flushed_groups() -> Tensor:
    """Return groups of gates whose SiLU is a subnormal, times ups that make a number of it.

    A form that flushes gives 0.  All such BF16 gates of both signs, 16 mantissas of up.
    """
    word = torch.arange(1, 256, dtype=torch.int32) << 16
    gate = from_bits(torch.cat([word, word | -0x80000000]))
    gate = gate[torch.arange(16 * BLOCK) % gate.numel()].view(16, BLOCK)
    up = 2.0**125 * (1.0 + torch.arange(16) / 16.0)
    return torch.cat([gate, up[:, None].expand(16, BLOCK)], 1)
