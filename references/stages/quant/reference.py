"""Block quantization to E4M3, for any recipe, bit for bit.

``act_quant`` groups 1 x G along a row, ``weight_quant`` 128 x 128 blocks with ragged edges.  Both
interpret a :class:`QuantRecipe`; the formulas are the options' own words in
``decisions.py``.  Pure functions of torch tensors, the same on a CPU and a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_parity.references.arithmetic import rounding
from moe_parity.references.arithmetic.formats import (
    BLOCK,
    E4M3,
    F32_NAN_BITS,
    CodeFormat,
    ScaleFormat,
    from_bits,
    round_bf16,
    to_f32,
)
from moe_parity.references.arithmetic.rounding import div_rn, f32, mul_rn
from moe_parity.references.chips import special
from moe_parity.references.errors import ParityError
from moe_parity.references.stages.quant.decisions import (
    SUBNORMAL_AMAX,
    Apply,
    Floor,
    FloorOrder,
    NanAmax,
    NanElement,
    Overflow,
    PowerOfTwo,
    QuantRecipe,
    ScaleForm,
    SubnormalAmax,
    ZeroGroup,
)


@dataclass(frozen=True, kw_only=True)
class QuantOutput:
    """The result of a quantization in canonical form.

    ``codes`` are uint8 [rows, columns]; ``scales`` fp32 [rows, groups] (activations) or
    [ceil(rows / 128), ceil(columns / 128)] (weights), whatever layout or packing a kernel uses.
    """

    codes: Tensor
    scales: Tensor


AMAX_OVERFLOW = 1.3165537626040637e-36
"""Smallest fp32 whose quotient 448 / amax is finite, bits 0x03e00001."""

_AMAX_FLOORS = {
    Floor.AMAX_OVERFLOW: AMAX_OVERFLOW,
    Floor.AMAX_1E_10: 1e-10,
    Floor.AMAX_1E_4: 1e-4,
}
_SCALE_FLOORS = {
    Floor.SCALE_1E_10: 1e-10,
    Floor.SCALE_FUSED: 1.0 / (E4M3.largest * 512.0),
    Floor.SCALE_FUSED_OR_1E_10: 1.0 / (E4M3.largest * 512.0),
    Floor.SCALE_MIN_NORMAL: 2.0**-126,
}


def act_quant(
    x: Tensor,
    recipe: QuantRecipe,
    *,
    group: int = BLOCK,
    scale: ScaleFormat = ScaleFormat.FP32,
    form: CodeFormat = E4M3,
) -> QuantOutput:
    """Quantize ``x`` [M, K] (bf16, fp16 or fp32) in groups of 1 x ``group``.

    Returns codes [M, K] and fp32 scales [M, K / group].  Raises ParityError where K is not a
    multiple of the group.
    """
    rows, columns = x.shape
    if columns % group:
        raise ParityError(f"K = {columns} is not a multiple of the group, {group}.")
    codes, scales = quantize(
        to_f32(x).reshape(-1, group), recipe, power_of_two=scale.is_power_of_two, form=form
    )
    return QuantOutput(codes=codes.view(rows, columns), scales=scales.view(rows, columns // group))


def weight_quant(
    w: Tensor,
    recipe: QuantRecipe,
    *,
    block: int = BLOCK,
    scale: ScaleFormat = ScaleFormat.FP32,
    form: CodeFormat = E4M3,
) -> QuantOutput:
    """Quantize ``w`` [N, K] (bf16, fp16 or fp32) in ``block`` x ``block`` tiles.

    Edges may be ragged: the missing part of a tile counts as zeros.  Returns codes [N, K] and fp32
    scales [ceil(N / block), ceil(K / block)].
    """
    rows, columns = w.shape
    grid = -(-rows // block), -(-columns // block)
    tiles = tiles_of(to_f32(w), block)
    codes, scales = quantize(tiles, recipe, power_of_two=scale.is_power_of_two, form=form)
    return QuantOutput(codes=untiled(codes, rows, columns, block), scales=scales.view(grid))


def tiles_of(w: Tensor, block: int = BLOCK) -> Tensor:
    """Return the tiles of a weight [N, K], zeros past its edges, as [tiles, block * block].

    Of a weight with fewer rows than a tile they are [tiles, rows * block + 1]: one zero stands for
    all of what is missing.
    """
    rows, columns = w.shape
    down, across, high = -(-rows // block), -(-columns // block), min(max(rows, 1), block)
    padded = torch.nn.functional.pad(w, (0, across * block - columns, 0, down * high - rows))
    tiles = padded.view(down, high, across, block).transpose(1, 2).reshape(-1, high * block)
    return torch.nn.functional.pad(tiles, (0, int(high < block)))


def untiled(codes: Tensor, rows: int, columns: int, block: int = BLOCK) -> Tensor:
    """Return codes [rows, columns] of the codes of its tiles."""
    down, across, high = -(-rows // block), -(-columns // block), min(max(rows, 1), block)
    wide = codes[:, : high * block].reshape(down, across, high, block).transpose(1, 2)
    return wide.reshape(down * high, across * block)[:rows, :columns].contiguous()


def requantize_weight(
    codes: Tensor, scales: Tensor, recipe: QuantRecipe, *, block: int = BLOCK
) -> QuantOutput:
    """Requantize E4M3 weights [N, K] with fp32 scales to power-of-two scales.

    The weights are RN(decode(q) * s) in fp32, quantized anew (vLLM requant_weight_ue8m0_inplace).
    """
    rows, columns = codes.shape
    wide = scales.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
    return weight_quant(
        mul_rn(E4M3.decode(codes), wide), recipe, block=block, scale=ScaleFormat.UE8M0
    )


def quantize(
    groups: Tensor, recipe: QuantRecipe, *, power_of_two: bool, form: CodeFormat = E4M3
) -> tuple[Tensor, Tensor]:
    """Quantize fp32 ``groups`` [G, L]; return codes uint8 [G, L] and scales fp32 [G]."""
    amax = maxima(groups, recipe)
    scale = scale_of(amax, recipe, power_of_two=power_of_two, form=form)
    codes = codes_by(groups, amax, scale, recipe, power_of_two=power_of_two, form=form)
    return codes, scale


def maxima(groups: Tensor, recipe: QuantRecipe) -> Tensor:
    """Return the largest magnitude of each group, before any floor."""
    amax = _amax(groups, recipe.nan_amax)
    first = recipe.subnormal_amax is SubnormalAmax.FIRST_LANE
    if first and SUBNORMAL_AMAX.exists(recipe):
        lane = _amax(groups[:, [n for n in FIRST_LANE if n < groups.shape[1]]], recipe.nan_amax)
        amax = torch.where(special.flush(amax) == 0, lane, amax)
    return amax


def scale_of(
    amax: Tensor, recipe: QuantRecipe, *, power_of_two: bool, form: CodeFormat = E4M3
) -> Tensor:
    """Return the scales [G] that are stored for groups of those maxima."""
    floored = _at_least(amax, _AMAX_FLOORS.get(recipe.floor))
    scale = _scale(floored, recipe, power_of_two, form.largest)
    if recipe.zero_group is ZeroGroup.SCALE_ONE:
        scale = torch.where(amax == 0, f32(1.0, amax), scale)
    return scale


def codes_by(
    groups: Tensor,
    amax: Tensor,
    scale: Tensor,
    recipe: QuantRecipe,
    *,
    power_of_two: bool,
    form: CodeFormat = E4M3,
    cast: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the codes [G, L] of groups with those maxima and scales; ``cast`` is another cast."""
    floored = _at_least(amax, _AMAX_FLOORS.get(recipe.floor))
    how = recipe.apply
    scaled = _apply(groups, floored[:, None], scale[:, None], how, power_of_two, form.largest)
    if recipe.zero_group is ZeroGroup.SCALE_ONE:
        scaled = torch.where((amax == 0)[:, None], groups, scaled)
    code = (cast or form.encode)(scaled)
    if recipe.overflow is Overflow.NAN:
        code = torch.where(scaled.abs() > form.rounds_to_largest, form.nan, code)
    lowest = form.top | (form.magnitude + 1)
    ends = {NanElement.KEEP: form.nan, NanElement.LOW: lowest, NanElement.HIGH: form.top}
    code = torch.where(torch.isnan(scaled), ends[recipe.nan_element], code)
    return code.to(torch.uint8)


FIRST_LANE = (0, 1, 64, 65)
"""The elements that the first lane of a warp reads, of a group of 128."""


def _amax(groups: Tensor, nan_amax: NanAmax) -> Tensor:
    size = groups.abs()
    nan = torch.isnan(size)
    amax = torch.where(nan, torch.zeros_like(size), size).amax(1)
    if nan_amax is NanAmax.IGNORE:
        return amax
    poisoned = nan.any(1) if nan_amax is NanAmax.PROPAGATE else nan.all(1)
    return from_bits(torch.where(poisoned, F32_NAN_BITS, amax.view(torch.int32)))


def _at_least(x: Tensor, floor: float | None) -> Tensor:
    """Return max(x, floor), NaN kept."""
    if floor is None:
        return x
    bound = f32(floor, x)
    return torch.where(x < bound, bound, x)


def _scale(amax: Tensor, recipe: QuantRecipe, power_of_two: bool, largest: float) -> Tensor:
    """Return the stored scale of groups whose floored maximum is ``amax`` [G]."""
    top, one, form = f32(largest, amax), f32(1.0, amax), recipe.scale_form
    if form is ScaleForm.MUL_RECIP_448:
        scale = mul_rn(amax, div_rn(one, top))
    elif form is ScaleForm.MUL_RECIP_448_BF16:
        # The product of two BF16 numbers is exact in fp32.
        scale = round_bf16(mul_rn(amax, round_bf16(div_rn(one, top))))
    elif power_of_two or form is ScaleForm.DIV_448:
        # Before a ceiling the two roundings of 1 / (448 / amax) would be one too many.
        scale = div_rn(amax, top)
    elif form is ScaleForm.RECIP_OF_MULTIPLIER:
        scale = div_rn(one, div_rn(top, amax))
    else:
        multiplier = special.div_approx(top, amax, ftz=True)
        scale = special.div_approx(one, multiplier, ftz=True)
    floor = _SCALE_FLOORS.get(recipe.floor)
    if not power_of_two:
        return _at_least(scale, floor)
    if recipe.floor is Floor.SCALE_FUSED_OR_1E_10:
        floor = _SCALE_FLOORS[Floor.SCALE_1E_10]
    if recipe.floor_order is FloorOrder.AFTER:
        return _at_least(_power_of_two(scale, recipe.power_of_two), floor)
    return _power_of_two(_at_least(scale, floor), recipe.power_of_two)


def _power_of_two(scale: Tensor, how: PowerOfTwo) -> Tensor:
    if how is PowerOfTwo.BIT_CEIL:
        return rounding.ceil_pow2(scale)
    if how is PowerOfTwo.BIT_CEIL_CLAMPED:
        return rounding.ceil_pow2_clamped(scale)
    if how is PowerOfTwo.LOG2:
        return special.ex2_approx(torch.ceil(special.libdevice_log2(scale)), ftz=True)
    if how is PowerOfTwo.LOG2_BF16:
        # Of a BF16 number the unit's log2 and the exact one round to the same BF16 number.
        logarithm = round_bf16(torch.log2(scale.double()).float())
        return special.ex2_approx(torch.ceil(logarithm), ftz=True)
    return from_bits(scale.view(torch.int32) & 0x7F800000)


def _apply(
    x: Tensor, amax: Tensor, scale: Tensor, how: Apply, power_of_two: bool, largest: float
) -> Tensor:
    """Return ``x`` [G, L] brought to the range of the codes, before the cast."""
    top, one = f32(largest, x), f32(1.0, x)
    if how is Apply.DIVIDE:
        return div_rn(x, scale)
    if how is Apply.DIVIDE_FULL:
        return special.div_full(x, scale)
    if how is Apply.MUL_RECIP_BF16:
        return round_bf16(mul_rn(x, round_bf16(div_rn(one, scale))))
    if how is Apply.MUL_RECIP or power_of_two:
        # A multiplier of 448 / amax has no meaning beside a power of two: 1 / s, which is exact.
        return mul_rn(x, div_rn(one, scale))
    if how is Apply.MUL_MULTIPLIER:
        return mul_rn(x, div_rn(top, amax))
    # The .ftz of the product does not show: a subnormal has the code of a zero of its sign.
    return mul_rn(special.flush(x), special.div_approx(top, amax, ftz=True))
