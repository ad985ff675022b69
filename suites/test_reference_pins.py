"""The stages' references at the places that random inputs never reach, against exact fractions.

Each expectation is computed here from the option's own words (``by_definition``), on inputs where
every step but the roundings is exact.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import E4M3, bits_of, f32_to_bf16, to_f32
from moe_parity.references.language import Case
from moe_parity.references.recipes.vllm import VLLM_TRITON
from moe_parity.references.stages import FC2
from moe_parity.references.stages.gemm import reference as gemm
from moe_parity.references.stages.gemm.aims import codes as finite_codes
from moe_parity.references.stages.gemm.decisions import (
    Accumulate,
    BiasAt,
    DotUnit,
    GemmRecipe,
    Interval,
    ScaleOrder,
)
from moe_parity.references.stages.gemm.stage import GroupedRows
from moe_parity.references.stages.quant import decisions as quant
from moe_parity.references.stages.quant.decisions import QuantRecipe
from moe_parity.references.stages.quant.reference import quantize
from moe_parity.references.stages.routing import local_expert
from moe_parity.references.stages.swiglu import decisions as gated
from moe_parity.references.stages.swiglu.decisions import SwigluRecipe
from moe_parity.references.stages.swiglu.reference import swiglu
from moe_parity.references.stages.swiglu.silu import Silu, silu
from moe_parity.suites import by_definition as exact

TWO = Fraction(2)
TINY = TWO**-149


def tensor(numbers: list[Fraction]) -> Tensor:
    """Return numbers that fp32 holds as fp32."""
    return torch.tensor([exact.word(x) for x in numbers], dtype=torch.int32).view(torch.float32)


def numbers(x: Tensor) -> list[Fraction]:
    return [exact.value(word) for word in bits_of(x).flatten().tolist()]


# --- quantizers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("overflow", quant.Overflow)
def test_464_is_the_last_number_that_rounds_to_448(overflow: quant.Overflow):
    """480 would be the next: 464 is a tie and goes to the even code, all above it passes."""
    ulp = Fraction(1, 2**15)
    group = [Fraction(n) for n in (480, 448, 463, 464, 465, 472, 479)]
    group += [464 - ulp, 464 + ulp, 448 + ulp, 480 - ulp]
    group += [-x for x in group]
    recipe = QuantRecipe(power_of_two=quant.PowerOfTwo.TRUNCATE, overflow=overflow)
    codes, scale = quantize(tensor(group)[None], recipe, power_of_two=True)
    assert scale.tolist() == [1.0]
    saturates = overflow is quant.Overflow.SATURATE
    want = [exact.code_of(x, saturates=saturates) for x in group]
    assert codes[0].tolist() == want
    assert set(want) == ({0x7E, 0xFE} if saturates else {0x7E, 0xFE, 0x7F})


def least_amax() -> Fraction:
    """Return the smallest fp32 whose quotient 448 / amax stays below 2^128."""
    word = next(w for w in range(0x03DFFF00, 0x03E00100)
                if exact.nearest(448 / exact.value(w), 24, -149) < TWO**128)  # fmt: skip
    assert exact.nearest(448 / exact.value(word - 1), 24, -149) >= TWO**128
    return exact.value(word)


FLOORS = {
    "none": (None, Fraction(0)),
    "amax_overflow": ("amax", least_amax()),
    "amax_1e-10": ("amax", exact.fp32(Fraction(1, 10**10))),
    "amax_1e-4": ("amax", exact.fp32(Fraction(1, 10**4))),
    "scale_1e-10": ("scale", exact.fp32(Fraction(1, 10**10))),
    "scale_fused": ("scale", exact.fp32(Fraction(1, 448 * 512))),
    "scale_fused_or_1e-10": ("scale", exact.fp32(Fraction(1, 448 * 512))),
    "scale_min_normal": ("scale", TWO**-126),
}


@pytest.mark.parametrize("floor", quant.Floor)
@pytest.mark.parametrize("multiplies", [False, True])
def test_a_floor_and_one_unit_to_either_side(floor: quant.Floor, multiplies: bool):
    """Groups around the amax at which a floor begins, from one unit to a factor of 2^20 below.

    Once with quotients alone, once with 448 / amax as the multiplier, its reciprocal the scale.
    """
    kind, least = FLOORS[floor.value]
    edge = exact.fp32(least * (448 if kind == "scale" else 1)) or 448 * TWO**-126
    middle = exact.word(edge)
    tops = [exact.value(middle + step) for step in range(-3, 4)]
    tops += [exact.fp32(edge * TWO**k) for k in (-20, -3, -1, 1, 3)]
    if multiplies and kind != "amax":
        tops = [top for top in tops if top >= FLOORS["amax_overflow"][1]]  # 448 / amax is finite
    groups = [[top, -exact.fp32(top / 3), exact.fp32(top / 100), -TINY, TWO**-126] for top in tops]
    recipe = QuantRecipe(floor=floor)
    if multiplies:
        recipe = dataclasses.replace(
            recipe,
            scale_form=quant.ScaleForm.RECIP_OF_MULTIPLIER,
            apply=quant.Apply.MUL_MULTIPLIER,
        )
    found = quantize(torch.stack([tensor(g) for g in groups]), recipe, power_of_two=False)
    for group, codes, scale in zip(groups, found[0].tolist(), numbers(found[1]), strict=True):
        amax = max(abs(x) for x in group)
        amax = max(amax, least) if kind == "amax" else amax
        want = exact.fp32(1 / exact.fp32(448 / amax) if multiplies else amax / 448)
        want = max(want, least) if kind == "scale" else want
        assert scale == want
        scaled = [x * exact.fp32(448 / amax) if multiplies else x / want for x in group]
        assert codes == [
            exact.code_of(exact.fp32(y), negative=x < 0) for x, y in zip(group, scaled, strict=True)
        ]


@pytest.mark.parametrize(
    ("floor", "order", "least"),
    [
        (
            quant.Floor.SCALE_FUSED,
            quant.FloorOrder.BEFORE,
            TWO**-17,
        ),
        (quant.Floor.SCALE_FUSED, quant.FloorOrder.AFTER, exact.fp32(Fraction(1, 448 * 512))),
        (
            quant.Floor.SCALE_FUSED_OR_1E_10,
            quant.FloorOrder.BEFORE,
            TWO**-33,
        ),
        (
            quant.Floor.SCALE_FUSED_OR_1E_10,
            quant.FloorOrder.AFTER,
            exact.fp32(Fraction(1, 10**10)),
        ),
        (quant.Floor.SCALE_1E_10, quant.FloorOrder.BEFORE, TWO**-33),
    ],
)
def test_a_floor_before_and_after_the_power_of_two(
    floor: quant.Floor, order: quant.FloorOrder, least: Fraction
):
    """A group far below every floor, and one far above, whose scale is a power of two anyway.

    1 / (448 * 512) lies between 2^-18 and 2^-17, and 1e-10 between 2^-34 and 2^-33.
    """
    recipe = QuantRecipe(floor=floor, floor_order=order)
    groups = torch.stack([tensor([TWO**-100, TWO**-110]), tensor([Fraction(448 * 3), TWO**-3])])
    assert numbers(quantize(groups, recipe, power_of_two=True)[1]) == [least, Fraction(4)]


def test_what_fast_math_flushes():
    """Numbers below 2^-126 become zeros of their sign, 448 / amax past 2^126 gives a scale of 0.

    amax is a power of two, so that 448 / amax is exact and its reciprocal is 1 / 448 rounded once.
    """
    recipe = QuantRecipe(
        scale_form=quant.ScaleForm.RECIP_OF_MULTIPLIER_FAST, apply=quant.Apply.MUL_MULTIPLIER_FAST
    )
    third = exact.fp32(Fraction(1, 448))
    told = 0
    for k in (-125, -119, -118, -117, -100, 0, 125, 126, 127):
        top, tail = TWO**k, [TWO**-126, TWO**-127, -(TWO**-127), TWO**-126 - TINY, -TINY]
        group = [top, *(x for x in tail if abs(x) < top), exact.fp32(-top / 3)]
        codes, scale = quantize(tensor(group)[None], recipe, power_of_two=False)
        # div.approx is 0 where its divisor lies past 2^126, and Inf where the quotient does.
        multiplier = 448 / top if k <= 126 else Fraction(0)
        if k < -119:
            assert scale.tolist() == [0.0]  # 1 / Inf
            continue
        want = third * top if 448 / top <= TWO**126 else Fraction(0)
        assert scale.tolist() == ([math.inf] if not multiplier else [float(want)])
        kept = [x if abs(x) >= TWO**-126 else Fraction(0) for x in group]
        made = [exact.code_of(exact.fp32(y * multiplier), negative=x < 0)
                for x, y in zip(group, kept, strict=True)]  # fmt: skip
        assert codes[0].tolist() == made
        whole = [exact.code_of(exact.fp32(x * multiplier), negative=x < 0) for x in group]
        told += sum(a != b for a, b in zip(made, whole, strict=True))
    assert told >= 8, "no flush of these shows"


def test_a_subnormal_has_the_code_of_a_zero():
    """Why the flush of a product before the cast needs no step of its own."""
    words = torch.arange(0, 0x00800000, 4099, dtype=torch.int32)
    for sign in (0, -(1 << 31)):
        codes = E4M3.encode((words | sign).view(torch.float32))
        assert set(codes.tolist()) == {0x80 if sign else 0}


# --- SwiGLU -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", Silu)
def test_alpha_stands_in_the_sigmoid_alone(form: Silu):
    """A factor of 0 halves the gate, of 2 is SiLU of twice the gate, halved; large gates stay."""
    word = torch.arange(0x3580, 0x4300, dtype=torch.int32) << 16
    gate = torch.cat([word, word | -(1 << 31)]).view(torch.float32)
    assert torch.equal(silu(gate, form, 0.0), gate / 2)
    twice = silu(2 * gate, form)
    assert torch.equal(bits_of(2 * silu(gate, form, 2.0)), bits_of(twice))
    large = torch.arange(32.0, 80.0)
    assert torch.equal(silu(large, form, 1.702), large)
    if form in (Silu.MUL_RECIP, Silu.TL_SIGMOID, Silu.DIV_APPROX):
        # Of a gate of 1 these are the sigmoid itself, and alpha times a gate is rounded once.
        alpha = exact.fp32(Fraction(1.702))
        for g in numbers(gate[::97]):
            inner = float(exact.fp32(g * alpha))
            (sigmoid,) = numbers(silu(torch.ones(1), form, inner))
            assert numbers(silu(tensor([g]), form, 1.702)) == [exact.fp32(g * sigmoid)]


LIMIT = Fraction(333, 10)
"""No BF16 number; SiLU of it and of all above it is the identity, in every form."""


def activation(g: Fraction, u: Fraction | None, how: SwigluRecipe, beta: int) -> Fraction:
    """Return SwiGLU of a gate past 20 under LIMIT, ``u`` None for NaN, in the options' words."""
    top, limited = exact.fp32(LIMIT), False
    if how.clamp_order is not gated.ClampOrder.IGNORED:
        if u is None:
            u = top if how.clamp_nan is gated.ClampNan.HIGH else -top
        u, before = max(min(u, top), -top), how.clamp_order is gated.ClampOrder.BEFORE
        g = min(g, top)
        if before and how.clamp_rounding in (gated.ClampRounding.GATE, gated.ClampRounding.BOTH):
            g = exact.bf16(g)
        if how.clamp_rounding in (gated.ClampRounding.BOTH, gated.ClampRounding.PRODUCT):
            u = exact.bf16(u)
        limited = how.clamp_rounding is gated.ClampRounding.PRODUCT
    assert u is not None
    u = exact.fp32(u + beta)
    if how.shift is gated.Shift.ALWAYS_BF16:
        u = exact.bf16(u)
    if limited or how.product_rounding is gated.ProductRounding.TWICE:
        g = exact.bf16(g)
    product = exact.fp32(g * u)
    plain = how.product_rounding is gated.ProductRounding.NONE and not limited
    return product if plain else exact.bf16(product)


def recipes() -> Iterator[SwigluRecipe]:
    """Yield every combination of options but for the form of SiLU, and every form once."""
    fields = {
        "product_rounding": gated.ProductRounding, "clamp_order": gated.ClampOrder,
        "clamp_rounding": gated.ClampRounding, "shift": gated.Shift, "clamp_nan": gated.ClampNan,
    }  # fmt: skip
    for options in itertools.product(*fields.values()):
        yield SwigluRecipe(**dict(zip(fields, options, strict=True)))
    yield from (SwigluRecipe(silu=form) for form in Silu)


def test_every_recipe_where_silu_is_the_gate():
    """Where and what the limit rounds, up too; beta; the roundings of the product."""
    gates = [Fraction(n) for n in (24, 33, 36, 64)] + [Fraction(133, 4)]
    ups = [Fraction(n) for n in (1, -3, 33, 40, -40)] + [Fraction(129, 256), Fraction(-133, 4)]
    pairs = list(itertools.product(gates, ups))
    rows = torch.stack([tensor([g for g, _ in pairs]), tensor([u for _, u in pairs])]).flatten()
    rows = torch.cat([rows.view(2, -1), torch.tensor([[64.0], [float("nan")]])], 1).flatten()
    for how in recipes():
        for beta in (0, 1):
            made = swiglu(f32_to_bf16(rows)[None], how, limit=float(LIMIT), beta=float(beta))[0]
            want = [activation(g, u, how, beta) for g, u in pairs]
            assert numbers(made[:-1]) == want, (how, beta)
            if how.clamp_order is gated.ClampOrder.IGNORED:
                assert bool(torch.isnan(made[-1]))
            else:
                assert numbers(made[-1:]) == [activation(Fraction(64), None, how, beta)]


# --- GEMM ---------------------------------------------------------------------------------------

M, N, K = 3, 130, 320
"""Two and a half blocks of K; the last two columns lie in another tile of the weight."""
COLUMNS = (0, 127, 128, 129)


@pytest.fixture(scope="module")
def operands() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, w = finite_codes(3, "a", M, K), finite_codes(3, "w", N, K)
    a_scale = 1.0 + random_bits.uniform(3, "sa", M, 3)
    w_scale = 1.0 + random_bits.uniform(3, "sw", 2, 3)
    return a, a_scale, w, w_scale


def product(a: list[int], b: list[int], unit: DotUnit) -> Fraction:
    if unit is not DotUnit.EXACT:
        return exact.dot(a, b, Fraction(0), unit.value)
    values = [(exact.e4m3(x) or 0) * (exact.e4m3(y) or 0) for x, y in zip(a, b, strict=True)]
    return exact.fp32(Fraction(sum(values)))


@pytest.mark.parametrize("interval", Interval)
@pytest.mark.parametrize("unit", DotUnit)
def test_every_chain_of_intervals(unit: DotUnit, interval: Interval, operands):
    """Of 128, 64 and 32 of K with the scale of their own block, in all orders, K ragged."""
    a, a_scale, w, w_scale = operands
    step = {"k128": 128, "k64": 64, "k32": 32}[interval.value]
    rn = exact.fp32
    parts = {}
    for m, n, start in itertools.product(range(M), COLUMNS, range(0, K, step)):
        left, right = (t[start : start + step].tolist() for t in (a[m], w[n]))
        parts[m, n, start] = product(left, right, unit)
    for order, add in itertools.product(ScaleOrder, Accumulate):
        recipe = GemmRecipe(unit=unit, interval=interval, scale_order=order, accumulate=add)
        got = gemm.gemm(a, a_scale, w, w_scale, recipe)
        for m, n in itertools.product(range(M), COLUMNS):
            acc = Fraction(0)
            for start in range(0, K, step):
                p = parts[m, n, start]
                s_a = Fraction(float(a_scale[m, start // 128]))
                s_b = Fraction(float(w_scale[n // 128, start // 128]))
                left, right = {
                    ScaleOrder.PRODUCT_FIRST: (p, rn(s_a * s_b)),
                    ScaleOrder.A_THEN_B: (rn(p * s_a), s_b),
                    ScaleOrder.B_THEN_A: (rn(p * s_b), s_a),
                }[order]
                once = add is Accumulate.FMA
                acc = rn(left * right + acc) if once else rn(rn(left * right) + acc)
            assert Fraction(float(got[m, n])) == acc, (recipe, m, n)


@pytest.mark.parametrize("at", BiasAt)
@pytest.mark.parametrize("epilogue", [False, True])
def test_a_bias_and_the_rounding(at: BiasAt, epilogue: bool):
    """Before it or after it, each pair its own expert's; a weight of the epilogue comes after it.

    One code and one scale make the accumulator any fp32 number.
    """
    expert = torch.tensor([1, 0, -1, 1])
    ids = expert.clamp(min=0)[:, None].int()
    sums = [Fraction(float(x)) for x in (random_bits.normal(1, "sum", 4, 1)[:, 0])]
    weights = random_bits.uniform(1, "weight", 4, 1)
    bias = random_bits.normal(1, "bias", 2, 128)
    inputs = GroupedRows(
        a=torch.full((4, 1), 0x38).byte(), a_scale=tensor(sums)[:, None], ids=ids,
        w=torch.full((2, 128, 1), 0x38).byte(), w_scale=torch.ones(2, 1, 1), expert=expert,
        weights=weights, bias=bias,
    )  # fmt: skip
    recipe = VLLM_TRITON.with_parts(gemm=GemmRecipe(bias_at=at))
    if not epilogue:
        recipe = dataclasses.replace(recipe, parts={"gemm": recipe.parts["gemm"]})
    got = to_f32(FC2.reference(Case(), inputs, recipe)["rows"])
    told = 0
    for p, n in itertools.product(range(4), range(128)):
        if expert[p] < 0:
            assert not bool(got[p].any())
            continue
        own = Fraction(float(bias[expert[p], n]))
        both = [exact.fp32(sums[p] + own), exact.fp32(exact.bf16(sums[p]) + own)]
        if epilogue:
            both = [exact.fp32(x * Fraction(float(weights[p, 0]))) for x in both]
        early, late = map(exact.bf16, both)
        told += early != late
        assert Fraction(float(got[p, n])) == (early if at is BiasAt.BEFORE_ROUNDING else late)
    assert told > 50, "before and after are the same on these"


def test_which_ids_a_rank_owns():
    """Its own experts alone: -1 and foreign ones on either side are nobody's."""
    ids = torch.tensor([[-1, 3, 4], [5, 6, 7], [-(2**31), 2**31 - 1, 0]], dtype=torch.int32)
    assert local_expert(ids, 4, 3).tolist() == [-1, -1, 0, 1, 2, -1, -1, -1, -1]
    assert local_expert(ids.long(), 0, 1).tolist() == [-1] * 8 + [0]
