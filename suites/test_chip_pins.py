"""The chip's models where only a whole GPU run would have seen a fault: every code, every end.

Expectations are exact fractions (``by_definition``), powers of two, or numbers read off an H200.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_parity.references.arithmetic import random_bits, rounding
from moe_parity.references.arithmetic.formats import bits_of, from_bits
from moe_parity.references.chips import special, tensor_core, tensor_core_numba, unit_named
from moe_parity.suites import by_definition as exact
from moe_parity.suites.interpreted import needs_interpreter

NAN = 0x7FFFFFFF
INF = 0x7F800000
UNITS = tuple(exact.UNITS)
EVERY = torch.arange(256).byte()


def hexed(words: list[int]) -> list[str]:
    return [f"{word & 0xFFFFFFFF:08x}" for word in words]


def tensor(words: list[int]) -> Tensor:
    """Return the fp32 tensor of 32-bit words, signed or not."""
    return from_bits(torch.tensor(words, dtype=torch.int64).int())


def numbers_of(x: Tensor) -> list[Fraction]:
    return [exact.value(word) for word in bits_of(x).tolist()]


def power(n: int) -> int:
    """Return the bits of 2^n in fp32, -149 <= n <= 127."""
    return exact.word(Fraction(2) ** n)


# --- dot products -------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def products() -> Tensor:
    """Return the bits of all lone products: exact, +0 for a zero of either sign, NaN of a NaN."""
    values = [exact.e4m3(code) for code in range(256)]
    words = [
        NAN if a is None or b is None else exact.word(a * b)
        for a, b in itertools.product(values, values)
    ]
    return torch.tensor(words).int().view(256, 256)


def compiled(a: Tensor, b: Tensor, c: Tensor | None, name: str) -> Tensor:
    return tensor_core.dot(a, b, c, unit=unit_named(name))


def plain(a: Tensor, b: Tensor, c: Tensor | None, name: str) -> Tensor:
    return tensor_core.dot_plain(a, b, c, unit=unit_named(name))


@pytest.mark.parametrize("form", [compiled, plain])
@pytest.mark.parametrize("unit", UNITS)
def test_every_pair_of_codes_alone(unit: str, form):
    """All 65,536 products at K = 1 fit both units: eight bits of significand."""
    got = bits_of(form(EVERY[:, None], EVERY[None], None, unit))
    # A NaN spoils the whole row and column of a matrix, and here these are all pairs with it.
    assert torch.equal(got, products())


@pytest.mark.parametrize("unit", UNITS)
def test_every_pair_of_codes_without_threads(unit: str, monkeypatch: pytest.MonkeyPatch):
    """The compiled form walks small products in one thread, another function."""
    monkeypatch.setattr(tensor_core_numba, "_parallel", None)
    for rows in EVERY.split(64):
        got = compiled(rows[:, None], EVERY[None, :200], None, unit)
        assert torch.equal(bits_of(got), products()[rows.long(), :200])


SIGNIFICANDS = (0, 1, 0x7FFFFF, 0x555555, 0x3FF, 0x400, 0x7FFC00)
"""Fractions of an accumulator: its ends, and the last bits that 13 fraction bits keep or drop."""
PAIRS = {
    "nothing": [],
    "zeros": [(0x00, 0x38), (0x38, 0x00), (0x80, 0x7E), (0x7E, 0x80), (0x00, 0x80)],
    "the least product": [(0x01, 0x81)],
    "the largest products": [(0x7E, 0x7E)] * 32,
    "products that cancel": [(0x7E, 0x7E), (0x7E, 0xFE), (0x38, 0x01)],
    "every exponent": [(k * 8 % 128 | 5, (k * 24 + 3) % 127 | 128 * (k % 2)) for k in range(31)],
}


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("name", PAIRS)
def test_an_accumulator_of_every_exponent(name: str, unit: str):
    """All 255 finite exponents, subnormals too, both signs, beside products from none to all."""
    pairs = PAIRS[name] + [(0, 0)] * (32 - len(PAIRS[name]))
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    words = [sign | field << 23 | SIGNIFICANDS[(field + n) % len(SIGNIFICANDS)]
             for field in range(255) for n, sign in enumerate((0, 1 << 31))]  # fmt: skip
    c = tensor(words)[None]
    columns = torch.tensor(b).byte()[:, None].expand(32, c.shape[1]).contiguous()
    rows = torch.tensor([a]).byte()
    want = [exact.word(exact.dot(a, b, exact.value(w), unit)) for w in bits_of(c)[0].tolist()]
    for form in (compiled, plain):
        assert hexed(bits_of(form(rows, columns, c, unit))[0].tolist()) == hexed(want)


@pytest.mark.parametrize("form", [compiled, plain])
@pytest.mark.parametrize("unit", UNITS)
def test_what_an_h200_gave_at_the_ends(unit: str, form):
    """A NaN is 0x7fffffff, from 0xff too; 0 + Inf is Inf; -0 * 0 + -0 is +0; no sum overflows."""
    rows = torch.tensor([[0x7E] * 32, [0x80] * 32, [0xFF] + [0] * 31]).byte()
    columns = torch.tensor([[0x7E] * 32, [0x00] * 32]).byte().t()
    c = torch.tensor([[3.4e38, 3.4e38], [float("inf"), -0.0], [1.0, float("-inf")]])
    got = hexed(bits_of(form(rows, columns, c, unit)).flatten().tolist())
    whole = "7f7fc800" if unit == "wgmma_fp8" else "7f7fc99e"
    assert got == [whole, whole, "7f800000", "00000000", "7fffffff", "7fffffff"]


@pytest.mark.parametrize("unit", UNITS)
@given(st.lists(st.tuples(st.integers(0, 255), st.integers(0, 255)), min_size=1, max_size=70),
       st.integers(-(2**31), 2**31 - 1))  # fmt: skip
def test_a_dot_product_of_any_codes_is_the_one_by_definition(unit: str, pairs, word: int):
    """Lengths up to three groups of 32; NaN codes and accumulators that are not finite aside."""
    pairs = [(x, y) for x, y in pairs if x & 0x7F != 0x7F and y & 0x7F != 0x7F]
    word = word if word & INF != INF else 0
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    want = exact.word(exact.dot(a, b, exact.value(word), unit))
    rows, columns = torch.tensor([a]).byte(), torch.tensor([b]).byte().t()
    for form in (compiled, plain):
        assert int(bits_of(form(rows, columns, tensor([word])[None], unit))) == want


INTERPRETED = """
import sys, torch
from moe_parity.references.chips import tensor_core, tensor_core_triton, unit_named
for name, (a, b, c, want) in torch.load(sys.argv[1]).items():
    made = tensor_core_triton.dot(*tensor_core._checked(a, b, c), unit_named(name.split("/")[0]))
    print(name, int((made.view(torch.int32) != want).sum()), made.numel())
"""


def test_the_form_of_a_gpu_gives_the_same_bits(tmp_path: Path):
    """Its Triton kernel under Triton's own interpreter: no float cast or dot is in it.

    Every pair of codes; random codes over two groups of K beside accumulators of every exponent,
    infinities and NaN among them, and zeros alone beside them.
    """
    needs_interpreter()
    cases = {}
    a, b = (random_bits.integers(5, name, 8, 33, below=256).byte() for name in "ab")
    a, b = (torch.where(t & 0x7F == 0x7F, 0x7E, t) for t in (a, b))
    a[::2], b[5, 7] = 0x80, 0x7F
    b = b.repeat(8, 1).t().contiguous()
    fields = torch.arange(8 * 64).view(8, 64) % 256 << 23
    c = from_bits((random_bits.words(5, "c", 8, 64).int() & -0x7F800001) | fields.int())
    for unit in UNITS:
        cases[f"{unit}/every"] = (EVERY[:, None], EVERY[None], None, products())
        cases[f"{unit}/any"] = (a, b, c, bits_of(plain(a, b, c, unit)))
    torch.save(cases, tmp_path / "operands.pt")
    told = subprocess.run(
        [sys.executable, "-c", INTERPRETED, str(tmp_path / "operands.pt")], check=False,
        capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    lines = [line.split() for line in told.stdout.splitlines()]
    sizes = {"every": "65536", "any": "512"}
    assert lines == [[name, "0", sizes[name.split("/")[1]]] for name in cases]


# --- special functions --------------------------------------------------------------------------


def ex2_of(x: int) -> int:
    """Return what the unit gives for the fp32 bits ``x``, from its values on [1, 2) alone.

    T[k mod 2^23] * 2^(k div 2^23) with k = floor(x * 2^23), below zero the complement of the
    truncated magnitude; integers are exact.
    """
    number = exact.value(x)
    scaled = int(abs(number) * 2**23)
    k = scaled if number >= 0 else -scaled if scaled % 2**23 == 0 else ~scaled
    one_to_two = int(bits_of(special.mufu_ex2(tensor([0x3F800000 | k % 2**23]))))
    result = exact.value(one_to_two) / 2 * Fraction(2) ** (k // 2**23)
    if result >= Fraction(2) ** 128:
        return INF
    return exact.word(result) if result >= Fraction(2) ** -126 else 0


def beside(n: float, steps: int = 40) -> list[int]:
    """Return the bits of the fp32 numbers around one."""
    middle = exact.word(Fraction(n))
    return [middle + step for step in range(-steps, steps + 1)]


def test_ex2_at_both_ends_of_its_range():
    """From -126 and 128 the results are 0 and Inf; 2^-126 itself is kept, near 0 all are 1."""
    near = [w for n in (-126, -125, -127, -149, -150, 127, 128, -1, 1) for w in beside(n)]
    tiny = [0, 1, 0x7FFFFF, 0x800000, 0x33FFFFFF, 0x34000000, 0x34000001]
    words = near + tiny + [w | 1 << 31 for w in tiny]
    got = bits_of(special.ex2_approx(tensor(words), ftz=True)).tolist()
    assert hexed(got) == hexed([ex2_of(exact.signed((w & 0xFFFFFFFF).to_bytes(4, "little")))
                                for w in words])  # fmt: skip
    edges = [0xC2FC0000, 0xC2FC0001, 0x42FFFFFF, 0x43000000, 0x7F800000, 0xFF800000, 0xFFC00000]
    found = bits_of(special.ex2_approx(tensor(edges), ftz=True)).tolist()
    kept = {0: power(-126), 1: 0, 3: INF, 4: INF, 5: 0, 6: NAN}
    assert {n: found[n] for n in kept} == kept
    assert power(127) < found[2] < INF


def test_ex2_without_flushes_of_every_integer():
    """Powers of two down to the last subnormal; below -126 the value at half of it is squared."""
    every = range(-151, 128)
    got = bits_of(special.ex2_approx(tensor([exact.word(Fraction(n)) for n in every]), ftz=False))
    want = []
    for n in every:
        root = exact.value(ex2_of(exact.word(Fraction(n, 2))))
        want.append(exact.word(exact.fp32(root**2 if n < -126 else Fraction(2) ** n)))
    assert hexed(got.tolist()) == hexed(want)
    assert all(want[n - every.start] == exact.word(exact.fp32(Fraction(2) ** n))
               for n in every if n >= -126 or n % 2 == 0)  # fmt: skip


EXPONENTS = range(-149, 128)
ENDS = [n for n in EXPONENTS if n % 12 == 0 or n < -144 or -130 < n < -122 or n > 122]
SMALLEST = Fraction(2) ** -126


def flushed(n: int) -> Fraction:
    return Fraction(2) ** n if n >= -126 else Fraction(0)


def bounded(x: Fraction, *, ftz: bool, negative: bool = False) -> int:
    """Return the bits of a power of two, or of what it overflows or is flushed to."""
    sign = -(1 << 31) if negative else 0
    if x >= Fraction(2) ** 128:
        return sign + INF
    kept = Fraction(0) if ftz and x < SMALLEST else exact.fp32(x)
    return sign + exact.word(kept)


@pytest.mark.parametrize("ftz", [False, True])
@pytest.mark.parametrize("negative", [False, True])
def test_the_reciprocal_of_every_power_of_two(negative: bool, ftz: bool):
    """Subnormal arguments give Inf and subnormal results 0 under ftz, and only there."""
    sign = 1 << 31 if negative else 0
    got = bits_of(special.rcp_approx(tensor([power(n) | sign for n in EXPONENTS]), ftz=ftz))
    want = []
    for n in EXPONENTS:
        x = Fraction(2) ** 200 if ftz and n < -126 else Fraction(2) ** -n
        want.append(bounded(x, ftz=ftz, negative=negative))
    assert hexed(got.tolist()) == hexed(want)


@pytest.mark.parametrize("ftz", [False, True])
def test_the_reciprocal_of_numbers_past_2_to_126(ftz: bool):
    """Below 2^-126: 0 under ftz; else the value that the mantissa has elsewhere, rounded once."""
    words = [0x7E800000 + step for step in (0, 1, 0x400000, 0x7FFFFF, 0x800001, 0xC00000, 0xFFFFFF)]
    got = bits_of(special.rcp_approx(tensor(words), ftz=ftz)).tolist()
    ones = numbers_of(special.mufu_rcp(tensor([w & 0x7FFFFF | 0x3F800000 for w in words])))
    want = []
    for word, one in zip(words, ones, strict=True):
        result = one / Fraction(2) ** ((word >> 23) - 127)
        want.append(0 if ftz and result < SMALLEST else exact.word(exact.fp32(result)))
    assert hexed(got) == hexed(want)
    assert want[1] == (0 if ftz else want[1]) < want[0] == power(-126)


@pytest.mark.parametrize("ftz", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_quotients_of_powers_of_two(full: bool, ftz: bool):
    """Exact, where the PTX ISA bounds nothing: div.approx is 0 past 2^126, .ftz flushes all."""
    function = special.div_full if full else special.div_approx
    pairs = list(itertools.product(ENDS, ENDS))
    a, b = (tensor([power(n) for n in side]) for side in zip(*pairs, strict=True))
    got = bits_of(function(a, -b, ftz=ftz)).tolist()
    expected = {}
    for i, j in pairs:
        top, low = (flushed(i), flushed(j)) if ftz else (Fraction(2) ** i, Fraction(2) ** j)
        if not low:
            expected[i, j] = NAN if not top else INF - (1 << 31)
        elif not full and j > 126:
            expected[i, j] = -(1 << 31)
        else:
            expected[i, j] = bounded(top / low, ftz=ftz, negative=True)
    wrong = [(p, g) for p, g in zip(pairs, got, strict=True) if g != expected[p]]
    assert not wrong, (len(wrong), wrong[:5])


# --- fma toward minus infinity ------------------------------------------------------------------

SMALL = st.builds(
    lambda m, e: Fraction(m) * Fraction(2) ** e, st.integers(-(2**24) + 1, 2**24 - 1),
    st.integers(-60, 30),
)  # fmt: skip


def fp32_of(x: Fraction, negative: bool = False) -> Tensor:
    return tensor([exact.word(x, negative=negative)])


@given(SMALL, SMALL, SMALL)
def test_fma_rm_rounds_down(a: Fraction, b: Fraction, c: Fraction):
    """Against exact fractions; a sum that cancels is -0, as IEEE 754 says of this direction."""
    for third in (c, -exact.fp32(a * b)):
        total = a * b + third
        got = bits_of(rounding.fma_rm(fp32_of(a), fp32_of(b), fp32_of(third))).tolist()
        # A zero sum of +0 and +0 alone: neither a sum that cancels nor a product of -0.
        plus = not a * b and not third and a >= 0 and b >= 0
        want = exact.word(exact.downward(total, 24, -149), negative=not plus)
        assert hexed(got) == hexed([want])


def test_fma_rm_of_zeros():
    """IEEE 754, 6.3: an exact zero sum is -0 toward minus infinity, unless both addends are +0."""
    for a, b, c in itertools.product((0.0, -0.0, 1.0, -1.0), repeat=3):
        if a * b + c != 0:
            continue
        negative = [str(x).startswith("-") for x in (a, b, c)]
        both_plus = a * b == c == 0 and negative[0] == negative[1] and not negative[2]
        got = bits_of(rounding.fma_rm(*(torch.tensor([x]) for x in (a, b, c))))
        assert int(got) == (0 if both_plus else -(1 << 31)), (a, b, c)


def test_fma_rm_below_the_least_number_and_past_the_largest():
    """A result between 0 and a subnormal goes down to +0 or to -2^-149, never past the largest."""
    tiny, top = Fraction(2) ** -149, exact.value(0x7F7FFFFF)
    half = Fraction(1, 2)
    for a, b, c, want in (
        (tiny, half, Fraction(0), 0), (-tiny, half, Fraction(0), 1 - (1 << 31)),
        (top, Fraction(2), Fraction(0), 0x7F7FFFFF), (top, Fraction(1), tiny, 0x7F7FFFFF),
        (top, Fraction(1), -tiny, 0x7F7FFFFE), (-top, Fraction(1), tiny, 0x7F7FFFFF - (1 << 31)),
    ):  # fmt: skip
        got = bits_of(rounding.fma_rm(fp32_of(a), fp32_of(b), fp32_of(c)))
        assert hexed(got.tolist()) == hexed([want])
