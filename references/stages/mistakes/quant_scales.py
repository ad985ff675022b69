"""Mistakes of a quantizer's scales: what they are made for, where they stand, powers of two."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import bits_of, from_bits, round_bf16
from moe_parity.references.arithmetic.rounding import div_rn, f32
from moe_parity.references.language.mistake import Mistake
from moe_parity.references.stages.mistakes.anywhere import Change, Make, Outputs, reread, stored_as
from moe_parity.references.stages.mistakes.groups import Groups

MAXIMA = (240.0, 256.0, 480.0, 57344.0, 127.0, 1.0)
"""What else is taken for E4M3's maximum: that of the IEEE-like and FNUZ formats first."""


def of_scales(groups: Groups) -> Iterator[Mistake]:
    """Yield scales for another largest code, wrongly stored, wrongly divided by, or misplaced."""
    for largest in MAXIMA:
        other = dataclasses.replace(groups, form=dataclasses.replace(groups.form, largest=largest))
        yield Mistake(
            name="another_maximum", words=f"a largest code of {largest:g} instead of 448",
            outputs=other.right,
        )  # fmt: skip
        yield Mistake(
            name="another_maximum",
            words=f"codes cut at {largest:g}, with a scale for it, instead of 448",
            outputs=other.cast(partial(_cut, groups=other, top=largest)),
        )

    def inverse(scale: Tensor) -> Tensor:
        return div_rn(f32(1.0, groups.values), scale)

    def amax_stored() -> Outputs:
        amax = groups.amax()
        return groups.give(groups.codes(amax, groups.scale(amax)), amax)

    ways: tuple[tuple[str, str, Make], ...] = (
        ("inverse_scale", "the inverse of the scale stored", groups.stored(inverse)),
        ("scale_rounded", "the stored scale rounded to BF16, not that of the codes,",
         groups.stored(round_bf16)),
        ("scale_lost", "codes of values that no scale has divided",
         groups.divided(torch.ones_like)),
        ("scale_not_stored", "ones stored for scales", groups.stored(torch.ones_like)),
        ("amax_stored", "the maximum stored for the scale", amax_stored),
        ("multiplied", "values multiplied by the scale, not divided,", groups.divided(inverse)),
    )  # fmt: skip
    for name, words, make in ways:
        yield Mistake(name=name, words=words, outputs=make)
    for way, memory in ((reread, "row-major"), (stored_as, "column-major")):
        yield Mistake(
            name="transposed_scales", words=f"transposed scales ({memory} memory)", local=False,
            outputs=groups.stored(partial(groups.on_grid, change=way)),
        )  # fmt: skip
    yield from groups.neighbours("scale_of_neighbour", "the scale of the {} stored", groups.stored)
    yield from groups.neighbours(
        "codes_by_neighbour", "codes by the scale of the {}", groups.divided
    )

    yield from groups.rows_apart("scale_of_another_row", "the scale of {} stored", groups.stored)
    yield from groups.rows_apart("codes_by_another_row", "codes by the scale of {}", groups.divided)
    for factor, noun, size in ((2.0, "twice", "large"), (0.5, "half", "small")):
        power = f"scales stored with an exponent one too {size}"
        yield Mistake(
            name="scale_factor",
            words=power if groups.power_of_two else f"{noun} the scale stored",
            outputs=groups.stored(partial(torch.mul, f32(factor, groups.values))),
        )
        if not groups.power_of_two:
            changed = dataclasses.replace(groups.form, largest=groups.form.largest / factor)
            yield Mistake(
                name="scale_factor", words=f"{noun} the scale, in the codes too,",
                outputs=dataclasses.replace(groups, form=changed).right,
            )  # fmt: skip
    if not groups.power_of_two:
        yield Mistake(
            name="narrow_scale", words="scales computed in BF16",
            outputs=lambda: groups.by_scale(_narrow(groups)),
        )  # fmt: skip


def _narrow(groups: Groups) -> Tensor:
    """Return scales of which each step is rounded to BF16."""
    top = f32(groups.form.largest, groups.values)
    return round_bf16(div_rn(round_bf16(groups.floored()), top))


def _cut(x: Tensor, groups: Groups, top: float) -> Tensor:
    return groups.form.encode(x.clamp(-top, top))


# --- powers of two ------------------------------------------------------------------------------


def of_powers(groups: Groups) -> Iterator[Mistake]:
    """Yield powers of two that are unasked for or missing, or made in another way."""
    plain = dataclasses.replace(groups, power_of_two=False)
    power = dataclasses.replace(groups, power_of_two=True)

    def payload(codes: Tensor, scale: Groups) -> Outputs:
        return groups.give(codes, scale.scale(groups.amax()))

    if not groups.power_of_two:
        yield Mistake(
            name="power_unasked", words="powers of two where fp32 scales are asked for",
            outputs=power.right,
        )  # fmt: skip
        yield Mistake(
            name="payload",
            words="codes by the scale rounded to a power of two, stored unrounded,",
            outputs=lambda: payload(groups.codes_of(power.scale(groups.amax())), plain),
        )
        return
    yield Mistake(
        name="power_lost", words="fp32 scales where powers of two are asked for",
        outputs=plain.right,
    )  # fmt: skip
    yield Mistake(
        name="payload", words="codes by the scale before it became a power of two",
        outputs=lambda: payload(plain.codes(plain.amax(), plain.scale(plain.amax())), power),
    )  # fmt: skip

    def by(way: Change) -> Make:
        def make() -> Outputs:
            amax = groups.amax()
            scale = way(plain.scale(amax))
            return groups.give(groups.codes(amax, scale), scale)

        return make

    ways: tuple[tuple[str, str, Change], ...] = (
        ("frexp_power", "the power of two by frexp, one too large for a power of two,", _frexp),
        ("nearest_power", "the nearest power of two, not the next above,", _nearest),
        ("power_below", "the power of two below, not the next above,", _below),
        ("power_above", "twice the power of two", lambda scale: 2.0 * _ceil(scale)),
        ("half_power", "half the power of two", lambda scale: 0.5 * _ceil(scale)),
        ("log2_rounded", "the power of two by a rounded log2", _log2),
    )
    for name, words, way in ways:
        yield Mistake(name=name, words=words, outputs=by(way))
    for less in (7, 8):
        for exponent in (_exponent_less, _exponent_by_frexp):
            yield Mistake(
                name="exponent_less", words=f"the exponent of the maximum less {less}",
                outputs=by(partial(exponent, groups, less)),
            )  # fmt: skip


def _exponent_less(groups: Groups, less: int, scale: Tensor) -> Tensor:
    power = (bits_of(groups.floored()) & 0x7F800000) - (less << 23)
    return from_bits(torch.where(torch.isnan(scale), bits_of(scale), power.clamp(min=1 << 23)))


def _exponent_by_frexp(groups: Groups, less: int, scale: Tensor) -> Tensor:
    """Infinity and NaN have the exponent 0 there."""
    exponent = torch.frexp(groups.floored()).exponent - 1 - less
    return torch.exp2(exponent.double()).to(scale.dtype)


def _frexp(scale: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(scale), torch.frexp(scale).exponent)


def _below(scale: Tensor) -> Tensor:
    return from_bits(bits_of(scale) & 0x7F800000)


def _ceil(scale: Tensor) -> Tensor:
    below = _below(scale)
    return torch.where(below == scale, below, 2.0 * below)


def _nearest(scale: Tensor) -> Tensor:
    return torch.exp2(torch.log2(scale.double()).round()).float()


def _log2(scale: Tensor) -> Tensor:
    return torch.exp2(torch.ceil(torch.log2(scale.double()).float()).double()).float()
