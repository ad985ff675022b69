"""Mistakes of the block quantizers, alone and behind SwiGLU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import (
    CodeFormat,
    bits_of,
    f32_to_f16,
    from_bits,
    round_bf16,
    to_f32,
)
from moe_parity.references.arithmetic.rounding import add_rn, div_rn, f32, mul_rn
from moe_parity.references.language.mistake import Mistake
from moe_parity.references.stages.mistakes.anywhere import (
    Outputs,
    lost,
    reread,
    round_f16,
    stored_as,
)
from moe_parity.references.stages.quant.decisions import QuantRecipe
from moe_parity.references.stages.quant.reference import codes_by, maxima, scale_of

MAXIMA = (240.0, 256.0, 480.0, 57344.0, 127.0, 1.0)
"""What else is taken for E4M3's maximum: that of the IEEE-like and FNUZ formats first."""
FLOORS = (1e-12, 1e-8, 1e-6, 1e-5, 1e-3, 2.0**-126)
"""Floors that no project read has."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """What is quantized, as groups in a grid, and the way back to a stage's outputs."""

    values: Tensor
    """fp32 [G, L]."""
    grid: tuple[int, int]
    """Groups down and across; G is their product."""
    give: Callable[[Tensor, Tensor], Outputs]
    """(codes [G, L], scales [G]) -> outputs."""
    recipe: QuantRecipe
    power_of_two: bool
    form: CodeFormat

    def amax(self) -> Tensor:
        """Return the maxima [G]."""
        return maxima(self.values, self.recipe)

    def scale(self, amax: Tensor, *, power_of_two: bool | None = None) -> Tensor:
        """Return the scales [G] of some maxima."""
        power = self.power_of_two if power_of_two is None else power_of_two
        return scale_of(amax, self.recipe, power_of_two=power, form=self.form)

    def codes(
        self, amax: Tensor, scale: Tensor, cast: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return the codes by some maxima and scales."""
        return codes_by(
            self.values, amax, scale, self.recipe, power_of_two=self.power_of_two, form=self.form,
            cast=cast,
        )  # fmt: skip

    def by(self, amax: Tensor) -> Outputs:
        """Return the outputs with other maxima."""
        scale = self.scale(amax)
        return self.give(self.codes(amax, scale), scale)

    def right(self) -> Outputs:
        """Return the outputs without a mistake."""
        return self.by(self.amax())

    def on_grid(self, of_group: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a number of each group, changed as a matrix of the grid."""
        return change(of_group.view(self.grid)).reshape(-1)


def mistakes(groups: Groups) -> Iterator[Mistake]:
    """Yield what a quantizer may do wrong, in its maxima, scales, codes and layout."""
    yield from _of_maxima(groups)
    yield from _of_scales(groups)
    yield from _of_powers(groups)
    yield from _of_codes(groups)
    yield from lost(groups.right)


# --- maxima -------------------------------------------------------------------------------------


def _of_maxima(groups: Groups) -> Iterator[Mistake]:
    x, half = groups.values, groups.values.shape[1] // 2
    subsets = (
        ("even elements", x[:, ::2]), ("odd elements", x[:, 1::2]), ("first half", x[:, :half]),
        ("second half", x[:, half:]), ("first quarter", x[:, : half // 2]),
        ("first element", x[:, :1]), ("elements but the last", x[:, :-1]),
        ("elements but the first", x[:, 1:]),
    )  # fmt: skip
    for words, some in subsets:
        yield Mistake(
            name="amax_of_a_part", words=f"the maximum taken of the {words} of a group alone",
            outputs=lambda some=some: groups.by(maxima(some, groups.recipe)),  # type: ignore[misc]
        )  # fmt: skip
    yield Mistake(
        name="amax_without_abs", words="the maximum taken without the magnitude, of signed values,",
        outputs=lambda: groups.by(x.nan_to_num(0.0).amax(1).clamp(min=0)),
    )  # fmt: skip
    rounds = (("BF16", round_bf16), ("FP16", round_f16))
    for noun, way in rounds:
        yield Mistake(
            name="amax_rounded", words=f"the maximum rounded to {noun}",
            outputs=lambda way=way: groups.by(way(groups.amax())),  # type: ignore[misc]
        )  # fmt: skip
    yield Mistake(
        name="amax_of_the_row", words="one maximum for a whole row of groups",
        outputs=lambda: groups.by(groups.on_grid(groups.amax(), _whole_row)),
    )  # fmt: skip
    yield Mistake(
        name="amax_of_the_tensor", words="one maximum for the whole tensor", local=False,
        outputs=lambda: groups.by(groups.amax().nan_to_num(0.0).max().expand(x.shape[0])),
    )  # fmt: skip
    yield Mistake(
        name="amax_of_a_tile", words="one maximum for 128 rows of groups", local=False,
        outputs=lambda: groups.by(groups.on_grid(groups.amax(), _whole_tile)),
    )  # fmt: skip
    for pairs, words in ((2, "two"), (4, "four")):
        if groups.grid[1] % pairs == 0:
            yield Mistake(
                name="amax_of_several_groups", words=f"one maximum for {words} groups of a row",
                outputs=lambda n=pairs: groups.by(groups.on_grid(groups.amax(), lambda t: _joined(t, n))),  # type: ignore[misc]
            )  # fmt: skip
    yield from _neighbours(
        groups, "amax_of_neighbour", "the maximum of the {} taken",
        lambda other: groups.by(other(groups.amax())),
    )  # fmt: skip
    for floor in FLOORS:
        yield Mistake(
            name="another_floor", words=f"a floor of {floor:g} under the maximum",
            outputs=lambda low=floor: groups.by(groups.amax().clamp(min=low)),  # type: ignore[misc]
        )  # fmt: skip
    for added in (1e-10, 1e-12, 1e-8, 1e-6, 1e-5):
        yield Mistake(
            name="floor_added", words=f"{added:g} added to the maximum, not a floor under it,",
            outputs=lambda e=added: groups.by(add_rn(groups.amax(), f32(e, x))),  # type: ignore[misc]
        )  # fmt: skip


def _whole_row(t: Tensor) -> Tensor:
    return t.nan_to_num(0.0).amax(1, keepdim=True).expand(t.shape)


def _joined(t: Tensor, count: int) -> Tensor:
    wide = t.nan_to_num(0.0).view(t.shape[0], -1, count).amax(2, keepdim=True)
    return wide.expand(-1, -1, count).reshape(t.shape)


def _whole_tile(t: Tensor) -> Tensor:
    tile = torch.nn.functional.pad(t.nan_to_num(0.0), (0, 0, 0, -t.shape[0] % 128))
    tall = tile.view(-1, 128, t.shape[1]).amax(1, keepdim=True).expand(-1, 128, -1)
    return tall.reshape(-1, t.shape[1])[: t.shape[0]]


def _neighbours(
    groups: Groups, name: str, words: str, made: Callable[[Callable[[Tensor], Tensor]], Outputs]
) -> Iterator[Mistake]:
    """Yield a number of each group taken from a neighbour: next to it, in its row or below."""
    down, across = groups.grid
    for dim, noun, size in ((1, "group", across), (0, "row", down)):
        for step, side in ((1, "next"), (-1, "previous")):
            for clamp in (False, True) if size > 1 else ():

                def other(
                    t: Tensor, dim: int = dim, step: int = step, clamp: bool = clamp
                ) -> Tensor:
                    return groups.on_grid(t, lambda m: _shifted(m, dim, step, clamp))

                yield Mistake(
                    name=name, words=words.format(f"{side} {noun}"), local=dim == 1,
                    outputs=lambda other=other: made(other),  # type: ignore[misc]
                )  # fmt: skip


def _shifted(t: Tensor, dim: int, step: int, clamp: bool) -> Tensor:
    if not clamp:
        return t.roll(-step, dim)
    index = (torch.arange(t.shape[dim], device=t.device) + step).clamp(0, t.shape[dim] - 1)
    return t.index_select(dim, index)


# --- scales -------------------------------------------------------------------------------------


def _of_scales(groups: Groups) -> Iterator[Mistake]:
    for largest in MAXIMA:
        other = dataclasses.replace(groups, form=dataclasses.replace(groups.form, largest=largest))
        yield Mistake(
            name="another_maximum", words=f"a largest code of {largest:g} instead of 448",
            outputs=other.right,
        )  # fmt: skip
        yield Mistake(
            name="another_maximum",
            words=f"codes cut at {largest:g}, with a scale for it, instead of 448",
            outputs=lambda other=other, top=largest: _cut(other, top),  # type: ignore[misc]
        )  # fmt: skip

    def stored(change: Callable[[Tensor], Tensor]) -> Callable[[], Outputs]:
        def make() -> Outputs:
            amax = groups.amax()
            scale = groups.scale(amax)
            return groups.give(groups.codes(amax, scale), change(scale))

        return make

    def divided(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Outputs]:
        def make() -> Outputs:
            amax = groups.amax()
            scale = groups.scale(amax)
            by = change(amax, scale)
            return groups.give(_divided(groups, by), scale)

        return make

    one = f32(1.0, groups.values)
    yield Mistake(
        name="inverse_scale", words="the inverse of the scale stored",
        outputs=stored(lambda s: div_rn(one, s)),
    )  # fmt: skip
    yield Mistake(
        name="scale_rounded", words="the stored scale rounded to BF16, not that of the codes,",
        outputs=stored(round_bf16),
    )  # fmt: skip
    yield Mistake(
        name="scale_lost", words="codes of values that no scale has divided",
        outputs=divided(lambda a, s: torch.ones_like(s)),
    )  # fmt: skip
    yield Mistake(
        name="scale_not_stored", words="ones stored for scales",
        outputs=stored(torch.ones_like),
    )  # fmt: skip
    yield Mistake(
        name="amax_stored", words="the maximum stored for the scale",
        outputs=lambda: groups.give(groups.codes(groups.amax(), groups.scale(groups.amax())), groups.amax()),
    )  # fmt: skip
    yield Mistake(
        name="multiplied", words="values multiplied by the scale, not divided,",
        outputs=divided(lambda a, s: div_rn(one, s)),
    )  # fmt: skip
    for way, words in ((reread, "row-major"), (stored_as, "column-major")):
        yield Mistake(
            name="transposed_scales", words=f"transposed scales ({words} memory)", local=False,
            outputs=stored(lambda s, way=way: groups.on_grid(s, way)),  # type: ignore[misc]
        )  # fmt: skip
    yield from _neighbours(
        groups, "scale_of_neighbour", "the scale of the {} stored",
        lambda other: stored(other)(),
    )  # fmt: skip
    yield from _neighbours(
        groups, "codes_by_neighbour", "codes by the scale of the {}",
        lambda other: divided(lambda a, s: other(s))(),
    )  # fmt: skip


def _divided(groups: Groups, scale: Tensor) -> Tensor:
    """Return codes by a scale that no maximum belongs to: what divides does so by it."""
    amax = mul_rn(scale, f32(groups.form.largest, scale))
    plain = dataclasses.replace(groups, power_of_two=False)
    return plain.codes(amax, scale)


def _cut(groups: Groups, top: float) -> Outputs:
    amax = groups.amax()
    scale = groups.scale(amax)
    codes = groups.codes(amax, scale, lambda x: groups.form.encode(x.clamp(-top, top)))
    return groups.give(codes, scale)


# --- powers of two ------------------------------------------------------------------------------


def _of_powers(groups: Groups) -> Iterator[Mistake]:
    def plain() -> tuple[Tensor, Tensor]:
        amax = groups.amax()
        return amax, groups.scale(amax, power_of_two=False)

    def other(power: bool) -> Outputs:
        return dataclasses.replace(groups, power_of_two=power).right()

    if not groups.power_of_two:
        yield Mistake(
            name="power_unasked", words="powers of two where fp32 scales are asked for",
            outputs=lambda: other(True),
        )  # fmt: skip
        yield Mistake(
            name="payload",
            words="codes by the scale rounded to a power of two, stored unrounded,",
            outputs=lambda: groups.give(_divided(groups, groups.scale(groups.amax(), power_of_two=True)), plain()[1]),
        )  # fmt: skip
        return
    yield Mistake(
        name="power_lost", words="fp32 scales where powers of two are asked for",
        outputs=lambda: other(False),
    )  # fmt: skip
    yield Mistake(
        name="payload", words="codes by the scale before it became a power of two",
        outputs=lambda: groups.give(
            dataclasses.replace(groups, power_of_two=False).codes(*plain()),
            groups.scale(groups.amax()),
        ),
    )  # fmt: skip
    ways = (
        ("frexp_power", "the power of two by frexp, one too large for a power of two,", _frexp),
        ("nearest_power", "the nearest power of two, not the next above,", _nearest),
        ("power_below", "the power of two below, not the next above,", _below),
        ("power_above", "twice the power of two", lambda s: 2.0 * _ceil(s)),
        ("half_power", "half the power of two", lambda s: 0.5 * _ceil(s)),
        ("log2_rounded", "the power of two by a rounded log2", _log2),
    )
    for name, words, way in ways:
        yield Mistake(
            name=name, words=words, outputs=lambda way=way: _by_power(groups, way(plain()[1])),  # type: ignore[misc]
        )  # fmt: skip


def _by_power(groups: Groups, scale: Tensor) -> Outputs:
    return groups.give(groups.codes(groups.amax(), scale), scale)


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


# --- codes --------------------------------------------------------------------------------------


def _of_codes(groups: Groups) -> Iterator[Mistake]:
    encode = groups.form.encode
    casts: tuple[tuple[str, str, Callable[[Tensor], Tensor]], ...] = (
        ("through_bf16", "quotients rounded to BF16 before their code", lambda x: encode(round_bf16(x))),
        ("through_fp16", "quotients rounded to FP16 before their code", lambda x: encode(round_f16(x))),
        ("truncated_codes", "codes cut, not rounded,", lambda x: encode(_cut_fraction(x))),
        ("ties_away", "ties of codes rounded away from zero", lambda x: encode(_away(x))),
        ("ties_up", "ties of codes rounded up", lambda x: encode(_up(x))),
        ("sign_lost", "codes without their sign", lambda x: encode(x.abs())),
        ("sign_turned", "codes of the other sign", lambda x: encode(-x)),
        ("zero_unsigned", "zeros without their sign", lambda x: encode(torch.where(encode(x) & 0x7F == 0, 0.0, x))),
        ("fnuz_codes", "codes of the format with bias 8 (FNUZ)", lambda x: encode(x + x)),
        ("integers", "codes of integers: quotients rounded to whole numbers", lambda x: encode(x.round())),
        ("subnormals_flushed", "subnormal codes flushed to zero", lambda x: _flushed(encode(x))),
    )  # fmt: skip
    for name, words, cast in casts:
        yield Mistake(name=name, words=words, outputs=lambda cast=cast: _cast(groups, cast))  # type: ignore[misc]
    narrow = (("BF16", round_bf16), ("FP16", lambda x: to_f32(f32_to_f16(x))))
    for noun, way in narrow:
        yield Mistake(
            name="input_rounded", words=f"what is quantized rounded to {noun} first",
            outputs=lambda way=way: dataclasses.replace(groups, values=way(groups.values)).right(),  # type: ignore[misc]
        )  # fmt: skip


def _cast(groups: Groups, cast: Callable[[Tensor], Tensor]) -> Outputs:
    amax = groups.amax()
    scale = groups.scale(amax)
    return groups.give(groups.codes(amax, scale, cast), scale)


def _cut_fraction(x: Tensor) -> Tensor:
    """Round fp32 to E4M3's numbers toward zero."""
    normal = from_bits(bits_of(x) & -0x100000)
    small = torch.trunc(x * 512.0) / 512.0
    return torch.where(x.abs() < 2.0**-6, small, normal)


def _away(x: Tensor) -> Tensor:
    """Move a midpoint away from zero, so that rounding to even does."""
    return from_bits(torch.where(_is_tie(x), bits_of(x) + 1, bits_of(x)))


def _up(x: Tensor) -> Tensor:
    step = torch.where(x < 0, -1, 1)
    return from_bits(torch.where(_is_tie(x), bits_of(x) + step, bits_of(x)).int())


def _is_tie(x: Tensor) -> Tensor:
    normal = (bits_of(x) & 0xFFFFF) == 0x80000
    small = (x.abs() * 1024.0) % 2.0 == 1.0
    return torch.where(x.abs() < 2.0**-6, small, normal)


def _flushed(codes: Tensor) -> Tensor:
    return torch.where(codes & 0x7F < 8, codes & 0x80, codes)


__all__ = ["Groups", "mistakes"]
