"""Mistakes of the block quantizers, alone and behind SwiGLU: maxima, scales, codes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import bits_of, from_bits, round_bf16
from moe_parity.references.arithmetic.rounding import add_rn, f32
from moe_parity.references.language.mistake import Mistake
from moe_parity.references.stages.mistakes.anywhere import Change, Outputs, lost, round_f16
from moe_parity.references.stages.mistakes.groups import Groups
from moe_parity.references.stages.mistakes.quant_scales import of_powers, of_scales
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
    yield from _of_codes(groups)
    yield from lost(groups.right)


# --- maxima -------------------------------------------------------------------------------------


def _of_subsets(groups: Groups) -> Iterator[Mistake]:
    """Yield maxima of some elements of a group."""
    x, half = groups.values, groups.values.shape[1] // 2
    subsets = (
        ("the even elements of a group alone", x[:, ::2]),
        ("the odd elements of a group alone", x[:, 1::2]),
        ("the first half of a group alone", x[:, :half]),
        ("the second half of a group alone", x[:, half:]),
        ("the first quarter of a group alone", x[:, : half // 2]),
        ("the first element of a group alone", x[:, :1]),
        ("all but the last element of a group", x[:, :-1]),
        ("all but the first element of a group", x[:, 1:]),
    )

    def of(some: Tensor, _: Tensor) -> Tensor:
        return maxima(some, groups.recipe)

    for words, some in subsets:
        yield Mistake(
            name="amax_of_a_part", words=f"the maximum taken of {words}",
            outputs=groups.reduced(partial(of, some)),
        )  # fmt: skip


def _of_maxima(groups: Groups) -> Iterator[Mistake]:
    x = groups.values

    def signed(amax: Tensor) -> Tensor:
        return x.nan_to_num(0.0).amax(1).clamp(min=0)

    def on_grid(change: Change) -> Change:
        return lambda amax: groups.on_grid(amax, change)

    ways: list[tuple[str, str, bool, Change]] = [
        ("amax_without_abs", "the maximum taken without the magnitude, of signed values,",
         True, signed),
        ("amax_rounded", "the maximum rounded to BF16", True, round_bf16),
        ("amax_rounded", "the maximum rounded to FP16", True, round_f16),
        ("amax_of_the_row", "one maximum for a whole row of groups", True, on_grid(_whole_row)),
        ("amax_of_the_tensor", "one maximum for the whole tensor", False, on_grid(_whole)),
        ("amax_of_a_tile", "one maximum for 128 rows of groups", False, on_grid(_whole_tile)),
    ]  # fmt: skip
    ways += [
        ("amax_of_several_groups", f"one maximum for {words} groups of a row", True,
         on_grid(partial(_joined, count=count)))
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


def _whole_row(t: Tensor) -> Tensor:
    return t.nan_to_num(0.0).amax(1, keepdim=True).expand(t.shape)


def _whole(t: Tensor) -> Tensor:
    return t.nan_to_num(0.0).max().expand(t.shape)


def _whole_tile(t: Tensor) -> Tensor:
    tile = torch.nn.functional.pad(t.nan_to_num(0.0), (0, 0, 0, -t.shape[0] % 128))
    tall = tile.view(-1, 128, t.shape[1]).amax(1, keepdim=True).expand(-1, 128, -1)
    return tall.reshape(-1, t.shape[1])[: t.shape[0]]


def _joined(t: Tensor, count: int) -> Tensor:
    wide = t.nan_to_num(0.0).view(t.shape[0], -1, count).amax(2, keepdim=True)
    return wide.expand(-1, -1, count).reshape(t.shape)


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
        ("subnormals_flushed", "subnormal codes flushed to zero", lambda x: _flushed(encode(x))),
    )
    for name, words, cast in casts:
        yield Mistake(name=name, words=words, outputs=groups.cast(cast))
    narrow: tuple[tuple[str, Change], ...] = (("BF16", round_bf16), ("FP16", round_f16))
    for noun, way in narrow:
        yield Mistake(
            name="input_rounded", words=f"values rounded to {noun} before they are quantized",
            outputs=partial(_on_rounded, groups, way),
        )  # fmt: skip


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
