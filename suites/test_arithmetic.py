"""The arithmetic models on a CPU, each against an independent form: fractions, tables, plain loops.

What they model is a GPU: ``test_silicon.py`` compares them there, the witnesses replay that here.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_parity.harness.silicon.models import MODELS, DotCase, arguments, operands, result_bits
from moe_parity.references.arithmetic import formats, rounding
from moe_parity.references.arithmetic.formats import bits_of, from_bits
from moe_parity.references.chips import special, tensor_core
from moe_parity.references.chips.hopper import MMA_F16, WGMMA_FP8

words = st.integers(-(2**31), 2**31 - 1)
floats = words.map(lambda w: from_bits(torch.tensor([w], dtype=torch.int32)))


def nearest_code(value: float) -> int:
    """E4M3 by definition: the nearest finite value, ties to the even code, ends saturate."""
    magnitudes = [Fraction(float(v)) for v in formats.e4m3_decode(torch.arange(127).byte())]
    size = abs(Fraction(value))
    code = min(range(127), key=lambda c: (abs(magnitudes[c] - size), c & 1))
    return code | (128 if torch.signbit(torch.tensor(value)) else 0)


@given(floats)
def test_e4m3_is_the_nearest_value(x: torch.Tensor):
    if torch.isfinite(x).all():
        assert int(formats.e4m3_encode(x)) == nearest_code(float(x))


def test_e4m3_at_every_midpoint():
    """Ties go to even, and one unit in the last place beside a tie does not."""
    value = formats.e4m3_decode(torch.arange(127).byte()).double()
    middle = ((value[1:] + value[:-1]) / 2).float()
    low = torch.arange(126)
    assert torch.equal(formats.e4m3_encode(middle).long(), low + (low & 1))
    assert torch.equal(formats.e4m3_encode(from_bits(bits_of(middle) + 1)).long(), low + 1)
    assert torch.equal(formats.e4m3_encode(from_bits(bits_of(middle) - 1)).long(), low)


def test_every_code_survives():
    code = torch.arange(256).byte()
    back = formats.e4m3_encode(formats.e4m3_decode(code))
    assert torch.equal(back, torch.where((code & 127) == 127, 127, code))
    exponent = torch.arange(255).byte()
    assert torch.equal(formats.ue8m0_encode(formats.ue8m0_decode(exponent)), exponent)
    assert torch.isnan(formats.ue8m0_decode(torch.tensor([255]).byte())).all()
    assert torch.equal(formats.unpack_ue8m0(formats.pack_ue8m0(exponent), 255), exponent)


def test_e4m3_ends():
    inf = float("inf")
    ends = torch.tensor([448.0, 464.0, 465.0, 1e30, inf, -inf, float("nan"), -0.0])
    codes = [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x80]
    assert formats.e4m3_encode(ends).tolist() == codes


@pytest.mark.parametrize("bad", [0.0, -1.0, 3.0, float("inf"), float("nan")])
def test_ue8m0_refuses_what_is_no_power_of_two(bad: float):
    with pytest.raises(ValueError, match=r"positive powers of two only; element 1 is"):
        formats.ue8m0_encode(torch.tensor([1.0, bad]))


def test_every_bf16_survives_and_ties_go_to_even():
    code = torch.arange(-(2**15), 2**15).short()
    wide = formats.bf16_to_f32(code.view(torch.bfloat16))
    kept = formats.f32_to_bf16(wide).view(torch.int16)
    nan = torch.isnan(wide)
    assert torch.equal(kept[~nan], code[~nan])
    assert set(kept[nan].tolist()) == {0x7FFF}
    finite = code[(code >= 0) & (code < 0x7F7F)].int()
    tie = from_bits((finite << 16) + 0x8000)
    rounded = formats.f32_to_bf16(tie).view(torch.int16).int()
    assert torch.equal(rounded, finite + (finite & 1))


@given(floats, floats, floats)
def test_fma_rounds_once(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor):
    """Against exact fractions, rounded by definition."""
    if not all(bool(torch.isfinite(t).all()) for t in (a, b, c)):
        return
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    got = rounding.fma_rn(a, b, c)
    if bool(torch.isfinite(got).all()):
        assert_nearest(float(got), exact, int(bits_of(got)))


def test_fma_is_no_double_rounding():
    """Sums a hair beside a midpoint of fp32, where rounding to float64 first loses the hair.

    a * b is a midpoint between two fp32 numbers, c the hair, far below float64's last place.
    """
    k = torch.arange(1, 2049).float()
    a, b = 1.0 + k * 2.0**-12, 1.0 + 2.0**-12 * (2 * (k % 7) + 1)
    hair = torch.full_like(k, 2.0**-70)
    told = 0
    for c in (hair, -hair, hair * 0.0):
        got = rounding.fma_rn(a, b, c)
        told += int((got != (a.double() * b.double() + c.double()).float()).sum())
        for left, right, third, value in zip(*(t.tolist() for t in (a, b, c, got)), strict=True):
            exact = Fraction(left) * Fraction(right) + Fraction(third)
            assert_nearest(value, exact, int(bits_of(torch.tensor([value]))))
    assert told > 100, "these triples would not tell a double rounding"


@given(floats, floats)
def test_division_rounds_once(a: torch.Tensor, b: torch.Tensor):
    if bool(torch.isfinite(a / b).all()) and bool(torch.isfinite(b).all()) and float(b):
        got = rounding.div_rn(a, b)
        assert_nearest(float(got), Fraction(float(a)) / Fraction(float(b)), int(bits_of(got)))


def assert_nearest(got: float, exact: Fraction, word: int) -> None:
    """``got`` is the fp32 number nearest to ``exact``, the even one of two; signs left alone."""
    got, exact, word = abs(got), abs(exact), word & 0x7FFFFFFF
    distance = abs(Fraction(got) - exact)
    for step in (-1, 1):
        beside = from_bits(torch.tensor([word + step], dtype=torch.int32))
        if bool(torch.isfinite(beside).all()):
            other = abs(Fraction(float(beside)) - exact)
            assert distance < other or (distance == other and word & 1 == 0)


def test_power_of_two_ceiling_at_every_edge():
    exponent = torch.arange(1, 254, dtype=torch.int32)
    power, above = exponent << 23, (exponent << 23) + 1
    assert torch.equal(bits_of(rounding.ceil_pow2(from_bits(power))), power)
    assert torch.equal(bits_of(rounding.ceil_pow2(from_bits(above))), (exponent + 1) << 23)
    ends = torch.tensor([0.0, 2.0**-149, 3.4e38, float("inf"), float("nan")])
    clamped = [2.0**-126, 2.0**-126, 2.0**127, 2.0**127, 2.0**127]
    assert rounding.ceil_pow2_clamped(ends).tolist() == clamped


@pytest.mark.parametrize("name", ["ex2_approx_ftz", "ex2_approx", "rcp_approx_ftz", "rcp_approx", "triton_exp", "libdevice_exp", "cuda_expf", "log2"])  # fmt: skip  # noqa: E501
def test_special_functions_are_near_the_exact_ones(name: str):
    """Within 2 ulp of float64 where the result is normal: a wrong table or constant is far off."""
    model = MODELS[name]
    (x,) = arguments(model, 1 << 16, seed=3)
    exact = {"e": torch.exp2, "r": torch.reciprocal, "t": torch.exp, "c": torch.exp}.get(name[0])
    exact = torch.log2 if name == "log2" else torch.exp if name == "libdevice_exp" else exact
    assert exact is not None
    if exact is torch.exp:
        x = x.clamp(-80, 80)
    want = exact(x.double())
    got = from_bits(result_bits(model.model(x)))
    normal = torch.isfinite(got) & (got.abs() > 2.0**-126) & torch.isfinite(want) & (x.abs() < 100)
    slack = 2.0**-14 if name == "triton_exp" else 2.0**-21
    error = ((got.double() - want) / want).abs()[normal & (want != 0)]
    assert int(normal.sum()) > 1000
    assert float(error.max()) < slack


@pytest.mark.parametrize("name", ["div_full", "div_full_ftz", "div_approx", "div_approx_ftz"])
def test_fast_divisions_are_near_and_not_exact(name: str):
    """Within 2 ulp of the quotient, and often not the rounded one."""
    a, b = arguments(MODELS[name], 1 << 16, seed=5)
    moderate = (a.abs() > 1e-6) & (a.abs() < 1e6) & (b.abs() > 1e-6) & (b.abs() < 1e6)
    got = from_bits(result_bits(MODELS[name].model(a, b)))[moderate]
    want = rounding.div_rn(a, b)[moderate]
    ulp = (bits_of(got).long() - bits_of(want).long()).abs()
    assert int(ulp.max()) <= 2
    assert int((ulp > 0).sum()) > moderate.sum() // 8


def test_flush_keeps_signs():
    x = torch.tensor([2.0**-127, -(2.0**-127), 2.0**-126, -0.0])
    assert bits_of(special.flush(x)).tolist() == bits_of(torch.tensor([0.0, -0.0, 2.0**-126, -0.0])).tolist()  # fmt: skip  # noqa: E501


@st.composite
def dot_cases(draw: st.DrawFn) -> DotCase:
    """Draw operands of either unit."""
    return DotCase(
        unit=draw(st.sampled_from(["wgmma_fp8", "mma_f16"])),
        m=draw(st.integers(1, 20)),
        n=draw(st.integers(1, 40)),
        k=draw(st.sampled_from([1, 31, 32, 33, 64, 128])),
        spread=draw(st.integers(1, 16)),
        accumulator=draw(st.sampled_from(["none", "normal", "wide", "special"])),
        nan=draw(st.booleans()),
    )


@given(dot_cases(), st.integers(0, 2**32))
def test_compiled_tensor_core_is_the_plain_one(case: DotCase, seed: int):
    a, b, c = operands(case, seed)
    unit = WGMMA_FP8 if case.unit == "wgmma_fp8" else MMA_F16
    plain = tensor_core.dot_plain(a, b, c, unit=unit)
    assert torch.equal(bits_of(tensor_core.dot(a, b, c, unit=unit)), bits_of(plain))


def test_tensor_core_by_hand():
    """One product of 1 keeps 13 bits below it; a product of 2^-14 is lost, one of 2^-13 stays."""
    one, small = 0x38, 0x02  # 1.0 and 2^-8
    a = torch.tensor([[one, small] + [0] * 30], dtype=torch.uint8)
    for code in (0x18, 0x20, 0x10):
        b = torch.tensor([[one], [code]] + [[0]] * 30, dtype=torch.uint8)
        exact = 1.0 + float(formats.e4m3_decode(torch.tensor([code]).byte())[0]) * 2.0**-8
        got = float(tensor_core.dot(a, b, unit=WGMMA_FP8))
        wide = float(tensor_core.dot(a, b, unit=MMA_F16))
        assert wide == exact
        assert got == int(exact * 2**13) / 2**13


@pytest.mark.parametrize("bad", ["dtype", "rank", "inner", "accumulator"])
def test_dot_refuses_bad_operands(bad: str):
    a, b, c = torch.zeros(2, 32).byte(), torch.zeros(32, 3).byte(), torch.zeros(2, 3)
    broken = {
        "dtype": (a.float(), b, c),
        "rank": (a[0], b, c),
        "inner": (a, b[:31], c),
        "accumulator": (a, b, c[:1]),
    }[bad]
    with pytest.raises(ValueError, match=r"must be|takes"):
        tensor_core.dot(*broken, unit=WGMMA_FP8)
