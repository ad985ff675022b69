"""Mistakes of the block quantizers, alone and behind SwiGLU: maxima, scales, codes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import (
    F32_NAN_BITS,
    bits_of,
    from_bits,
    round_bf16,
)
from moe_parity.references.arithmetic.rounding import add_rn, f32
from moe_parity.references.language.mistake import Mistake
from moe_parity.references.stages.mistakes.anywhere import Change, Outputs, lost, round_f16
from moe_parity.references.stages.mistakes.groups import Groups
from moe_parity.references.stages.mistakes.quant_scales import of_powers, of_scales
from moe_parity.references.stages.mistakes.quant_words import of_tiles, of_words
from moe_parity.references.stages.quant.decisions import NanAmax
from moe_parity.references.stages.quant.reference import maxima

FLOORS = (1e-12, 1e-8, 1e-6, 1e-5, 1e-3, 2.0**-126)
"""Floors that no project read has."""
ADDED = (1e-10, 1e-12, 1e-8, 1e-6, 1e-5)
"""What is added to a maximum in place of a floor."""


def mistakes(groups: Groups) -> Iterator[Mistake]:
    """Yield what a quantizer may do wrong, in its maxima, scales, codes and layout."""
    yield from _of_subsets(groups)
    yield from _of_maxima(groups)
    yield from of_scales(groups)
    yield from of_powers(groups)
    yield from of_words(groups)
    yield from of_tiles(groups)
    yield from _of_codes(groups)
    yield from lost(groups.right)


# --- maxima -------------------------------------------------------------------------------------


def _of_subsets(groups: Groups) -> Iterator[Mistake]:
    """Yield maxima of some elements of a group."""
    x, half = groups.values, groups.values.shape[1] // 2
    subsets = [
        ("the even elements of a group alone", x[:, ::2]),
        ("the odd elements of a group alone", x[:, 1::2]),
        ("the first half of a group alone", x[:, :half]),
        ("the second half of a group alone", x[:, half:]),
        ("the first quarter of a group alone", x[:, : half // 2]),
        ("the first element of a group alone", x[:, :1]),
        ("all but the last element of a group", x[:, :-1]),
        ("all but the first element of a group", x[:, 1:]),
    ]
    rows, whose = groups.rows, "a group" if groups.shape[0] == 1 else "each row of a tile"
    subsets += [(f"all but the last {n} elements of {whose}", rows[..., :-n]) for n in (8, 16)]
    subsets.append((f"every fourth element of {whose} alone", rows[..., ::4]))
    for n in (16, 32):
        subsets += [
            (f"the first {n} elements of {whose} alone", rows[..., :n]),
            (f"the last {n} elements of {whose} alone", rows[..., -n:]),
        ]
    if groups.shape[0] > 1:
        subsets += [
            ("the even rows of a tile alone", rows[:, ::2]),
            ("the odd rows of a tile alone", rows[:, 1::2]),
        ]

    def of(some: Tensor, _: Tensor) -> Tensor:
        return maxima(some.flatten(1), groups.recipe)

    for words, some in subsets:
        yield Mistake(
            name="amax_of_a_part", words=f"the maximum taken of {words}",
            outputs=groups.reduced(partial(of, some)),
        )  # fmt: skip


def _of_maxima(groups: Groups) -> Iterator[Mistake]:
    x = groups.values

    def signed(amax: Tensor) -> Tensor:
        return maxima(torch.where(x < 0, 0.0, x), groups.recipe)

    def on_grid(change: Change) -> Change:
        return lambda amax: groups.on_grid(amax, change)

    ways: list[tuple[str, str, bool, Change]] = [
        ("amax_without_abs", "the maximum taken without the magnitude, of signed values,",
         True, signed),
        ("amax_rounded", "the maximum rounded to BF16", True, round_bf16),
        ("amax_rounded", "the maximum rounded to FP16", True, round_f16),
        ("amax_of_the_row", "one maximum for a whole row of groups", True,
         on_grid(_whole_row(groups))),
        ("amax_of_the_tensor", "one maximum for the whole tensor", False,
         on_grid(_whole(groups))),
        ("amax_of_a_tile", "one maximum for 128 rows of groups", False,
         on_grid(_whole_tile(groups))),
    ]  # fmt: skip
    ways += [
        ("amax_of_several_groups", f"one maximum for {words} groups of a row", True,
         on_grid(_joined(groups, count)))
        for count, words in ((2, "two"), (4, "four"))
        if groups.grid[1] % count == 0
    ]  # fmt: skip
    for name, words, local, way in ways:
        yield Mistake(name=name, words=words, outputs=groups.reduced(way), local=local)
    yield from groups.neighbours("amax_of_neighbour", "the maximum of the {} taken", groups.reduced)
    for floor in FLOORS:
        yield Mistake(
            name="another_floor", words=f"a floor of {floor:g} under the maximum",
            outputs=groups.reduced(partial(torch.clamp, min=floor)),
        )  # fmt: skip
    for added in ADDED:
        yield Mistake(
            name="floor_added", words=f"{added:g} added to the maximum, not a floor under it,",
            outputs=groups.reduced(partial(add_rn, f32(added, x))),
        )  # fmt: skip


def _most(t: Tensor, dim: int, groups: Groups) -> Tensor:
    """Return the maximum along a dimension, kept, NaN as the recipe has it."""
    nan = torch.isnan(t)
    some = torch.where(nan, 0.0, t).amax(dim, keepdim=True)
    propagates = groups.recipe.nan_amax is NanAmax.PROPAGATE
    poisoned = nan.any(dim, keepdim=True) if propagates else nan.all(dim, keepdim=True)
    return from_bits(torch.where(poisoned, F32_NAN_BITS, bits_of(some)))


def _whole_row(groups: Groups) -> Change:
    return lambda t: _most(t, 1, groups).expand(t.shape)


def _whole(groups: Groups) -> Change:
    return lambda t: _most(t.reshape(1, -1), 1, groups).expand(t.shape)


def _whole_tile(groups: Groups) -> Change:
    def tall(t: Tensor) -> Tensor:
        parts = [_most(part, 0, groups).expand(part.shape) for part in torch.split(t, 128)]
        return torch.cat(parts)

    return tall


def _joined(groups: Groups, count: int) -> Change:
    def wide(t: Tensor) -> Tensor:
        joined = _most(t.view(t.shape[0], -1, count), 2, groups)
        return joined.expand(-1, -1, count).reshape(t.shape)

    return wide


# --- codes --------------------------------------------------------------------------------------


def _of_codes(groups: Groups) -> Iterator[Mistake]:
    encode = groups.form.encode

    def of(change: Change) -> Change:
        return lambda x: encode(change(x))

    casts: tuple[tuple[str, str, Change], ...] = (
        ("through_bf16", "quotients rounded to BF16 before their code", of(round_bf16)),
        ("through_fp16", "quotients rounded to FP16 before their code", of(round_f16)),
        ("truncated_codes", "codes cut, not rounded,", of(_cut_fraction)),
        ("ties_away", "ties of codes rounded away from zero", of(_away)),
        ("ties_up", "ties of codes rounded up", of(_up)),
        ("sign_lost", "codes without their sign", of(torch.abs)),
        ("sign_turned", "codes of the other sign", of(torch.neg)),
        ("zero_unsigned", "zeros without their sign", lambda x: _unsigned(encode(x))),
        ("fnuz_codes", "codes of the format with bias 8 (FNUZ)", of(lambda x: x + x)),
        ("integers", "codes of integers: quotients rounded to whole numbers", of(torch.round)),
        ("e5m2_codes", "codes of E5M2", _e5m2),
        ("subnormals_flushed", "subnormal codes flushed to zero", lambda x: _flushed(encode(x))),
    )
    for name, words, cast in casts:
        yield Mistake(name=name, words=words, outputs=groups.cast(cast))
    yield Mistake(
        name="nan_as_zero", words="NaN elements coded as zero",
        outputs=partial(_without_nan, groups),
    )  # fmt: skip
    narrow: tuple[tuple[str, Change], ...] = (("BF16", round_bf16), ("FP16", round_f16))
    for noun, way in narrow:
        yield Mistake(
            name="input_rounded", words=f"values rounded to {noun} before they are quantized",
            outputs=partial(_on_rounded, groups, way),
        )  # fmt: skip


def _e5m2(x: Tensor) -> Tensor:
    return x.to(torch.float8_e5m2).view(torch.uint8)


def _without_nan(groups: Groups) -> Outputs:
    scale = groups.scale(groups.amax())
    codes = groups.codes(groups.amax(), scale)
    return groups.give(torch.where(groups.form.is_nan(codes), 0, codes), scale)


def _on_rounded(groups: Groups, way: Change) -> Outputs:
    return dataclasses.replace(groups, values=way(groups.values)).right()


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


def _unsigned(codes: Tensor) -> Tensor:
    return torch.where(codes & 0x7F == 0, 0, codes)


def _flushed(codes: Tensor) -> Tensor:
    return torch.where(codes & 0x7F < 8, codes & 0x80, codes)
