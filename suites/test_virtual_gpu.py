"""The virtual GPU: every modelled operation against the references, on aimed values.

The kernels below are ordinary ones.  Where a CUDA device of compute capability 9.0 is present the
operations are also run on it, and every bit has to agree.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="needs Triton, which exists for Linux only")
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from moe_parity.kernels import virtual_gpu as vg
from moe_parity.kernels.virtual_gpu import lowering
from moe_parity.references.arithmetic import formats, rounding
from moe_parity.references.chips import special

F32, BF16, F16, E4M3 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn
NAMES = {F32: "f32", BF16: "bf16", F16: "fp16", E4M3: "e4m3"}


def name_of(dtype: torch.dtype) -> str:
    """Return a type as the ids of tests and cases spell it."""
    return NAMES.get(dtype, str(dtype).removeprefix("torch."))


# --- kernels -----------------------------------------------------------------------------------


@triton.jit
def unary(x_ptr, o_ptr, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    if OP == "neg":
        r = -x
    elif OP == "abs":
        r = tl.abs(x)
    elif OP == "exp":
        r = tl.exp(x)
    elif OP == "exp2":
        r = tl.exp2(x)
    elif OP == "log2":
        r = tl.log2(x)
    elif OP == "sigmoid":
        r = tl.sigmoid(x)
    elif OP == "expf":
        r = libdevice.exp(x)
    elif OP == "floor":
        r = tl.floor(x)
    elif OP == "ceil":
        r = tl.ceil(x)
    elif OP == "over_448":
        r = x / 448.0
    elif OP == "448_over":
        r = 448.0 / x
    elif OP == "clamp":
        r = tl.clamp(x, -448.0, 448.0)
    elif OP == "clamp_nan":
        r = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        r = x.to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + i, r.to(o_ptr.dtype.element_ty), mask=i < n)


@triton.jit
def binary(x_ptr, y_ptr, o_ptr, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    y = tl.load(y_ptr + i, mask=i < n)
    if OP == "add":
        r = x + y
    elif OP == "sub":
        r = x - y
    elif OP == "mul":
        r = x * y
    elif OP == "div":
        r = x / y
    elif OP == "div_rn":
        r = tl.math.div_rn(x, y)
    elif OP == "fma":
        r = tl.fma(x, y, y)
    elif OP == "max":
        r = tl.maximum(x, y)
    elif OP == "min":
        r = tl.minimum(x, y)
    elif OP == "max_nan":
        r = tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "min_nan":
        r = tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "clamp":
        r = tl.clamp(x, 1.0, y)
    elif OP == "compare":
        r = (x < y) * 1 + (x <= y) * 2 + (x > y) * 4 + (x >= y) * 8 + (x == y) * 16 + (x != y) * 32
    else:
        tl.static_assert(OP == "where")
        r = tl.where(x > y, x, y)
    tl.store(o_ptr + i, r, mask=i < n)


# --- inputs ------------------------------------------------------------------------------------


def aimed(dtype: torch.dtype = F32) -> Tensor:
    """Zeros, subnormals, ties, limits, infinities, NaNs, and random bits; a multiple of 64."""
    words = [0, 1, 2, 0x007FFFFF, 0x00800000, 0x00800001, 0x33800000, 0x3B000000, 0x3C7FFFFF]
    words += [0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x3F808000, 0x3F818000, 0x3F820000, 0x40400000]
    words += [0x42FE0000, 0x43D80000, 0x43E00000, 0x43E00001, 0x477FF000, 0x7E800000, 0x7E800001]
    words += [0x7F000000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7F800001, 0x41200000, 0x3EAAAAAB]
    words += [0x00400000, 0x38FFFFFF]
    special_words = torch.tensor(words, dtype=torch.int64)
    special_words = torch.cat([special_words, special_words | 0x80000000])
    generator = torch.Generator().manual_seed(7)
    spread = torch.randint(0, 1 << 32, (960,), generator=generator)
    near = (torch.randn(960, generator=generator) * 20).view(torch.int32).long() & 0xFFFFFFFF
    bits = torch.cat([special_words, spread, near])
    if dtype in (BF16, F16):
        return (bits >> 16).to(torch.int16).view(dtype)
    return bits.to(torch.int32).view(F32)


def pairs(dtype: torch.dtype = F32) -> tuple[Tensor, Tensor]:
    """Every aimed value against 64 others."""
    x = aimed(dtype)
    y = torch.cat([x[:64], x[-64:]])
    return x.repeat_interleave(len(y)), y.repeat(len(x))


def run1(op: str, x: Tensor, out: torch.dtype | None = None) -> Tensor:
    o = torch.zeros(x.shape, dtype=out or x.dtype, device=x.device)
    n = x.numel()
    vg.dispatch(unary, (triton.cdiv(n, 4096),), x, o, n, OP=op, BLOCK=4096)
    return o


def run2(op: str, x: Tensor, y: Tensor, out: torch.dtype | None = None) -> Tensor:
    o = torch.zeros(x.shape, dtype=out or x.dtype, device=x.device)
    n = x.numel()
    vg.dispatch(binary, (triton.cdiv(n, 4096),), x, y, o, n, OP=op, BLOCK=4096)
    return o


def words(x: Tensor) -> Tensor:
    """Bits as integers, every NaN the same: payloads are not part of any claim."""
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    bits = x.cpu().contiguous().view(size)
    if not x.dtype.is_floating_point or x.dtype is E4M3:
        return bits
    return torch.where(torch.isnan(x.cpu()), torch.full_like(bits, -1), bits)


def assert_same(got: Tensor, expected: Tensor, *inputs: Tensor) -> None:
    different = (words(got) != words(expected)).flatten().nonzero().flatten()
    if len(different):
        at = int(different[0])
        shown = ", ".join(str(float(x.flatten()[at])) for x in inputs)
        pytest.fail(
            f"{len(different)} of {got.numel()} differ, first at {at}: inputs {shown}, "
            f"got {got.flatten()[at]}, expected {expected.flatten()[at]}"
        )


# --- operations --------------------------------------------------------------------------------


def _one(x: Tensor) -> Tensor:
    return torch.ones_like(x)


def _constant(x: Tensor, value: float) -> Tensor:
    return torch.full_like(x, value)


def _over_448(x: Tensor) -> Tensor:
    if "approx" in lowering.instructions("fdiv_constant", ("fp32", "fp32"), "fp32"):
        return rounding.mul_rn(special.div_approx(_one(x), _constant(x, 448.0)), x)
    return special.div_full(x, _constant(x, 448.0))


UNARY = {
    "abs": torch.abs,
    "exp": special.triton_exp,
    "exp2": lambda x: special.ex2_approx(x, ftz=True),
    "log2": special.libdevice_log2,
    "expf": special.libdevice_exp,
    "sigmoid": lambda x: special.div_full(
        _one(x), rounding.add_rn(_one(x), special.triton_exp(-x))
    ),
    "floor": lambda x: torch.floor(special.flush(x)),
    "ceil": lambda x: torch.ceil(special.flush(x)),
    "over_448": _over_448,
    "448_over": lambda x: special.div_full(_constant(x, 448.0), x),
    # One instruction for both limits, and it takes the sign of a NaN.
    "clamp": lambda x: torch.copysign(x.abs().nan_to_num(448.0).clamp(max=448.0), x),
    "clamp_nan": lambda x: torch.clamp(x, -448.0, 448.0),
}

BINARY = {
    "add": rounding.add_rn,
    "sub": lambda x, y: rounding.add_rn(x, -y),
    "mul": rounding.mul_rn,
    "div": special.div_full,
    "div_rn": rounding.div_rn,
    "fma": lambda x, y: rounding.fma_rn(x, y, y),
}


@pytest.mark.parametrize("op", UNARY)
def test_a_function_of_one_value_is_its_reference(op: str) -> None:
    x = aimed()
    assert_same(run1(op, x), UNARY[op](x), x)


@pytest.mark.parametrize("op", BINARY)
def test_a_function_of_two_values_is_its_reference(op: str) -> None:
    x, y = pairs()
    assert_same(run2(op, x, y), BINARY[op](x, y), x, y)


def test_the_slash_is_div_full_and_not_a_correct_division() -> None:
    x, y = pairs()
    finite = torch.isfinite(x / y) & (y.abs() > 2.0**-100) & (y.abs() < 2.0**100)
    full, correct = run2("div", x, y)[finite], run2("div_rn", x, y)[finite]
    assert (full != correct).float().mean() > 0.1


def test_a_negation_is_what_the_compiler_makes_of_it() -> None:
    """Up to Triton 3.7 ``-x`` is ``0 - x``, whose zero is +0; from 3.8 on it flips the sign."""
    x = aimed()
    flips = "xor" in lowering.instructions("fneg", ("fp32",), "fp32")
    assert_same(run1("neg", x), -x if flips else rounding.add_rn(torch.zeros_like(x), -x), x)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=name_of)
@pytest.mark.parametrize("op", ["max", "min", "max_nan", "min_nan"])
def test_an_extremum_follows_the_rules_for_nan_and_zero(op: str, dtype: torch.dtype) -> None:
    x, y = pairs(dtype)
    wide_x, wide_y = formats.to_f32(x), formats.to_f32(y)
    pick = torch.maximum if op.startswith("max") else torch.minimum
    other_x = torch.where(wide_x.isnan(), wide_y, wide_x)
    expected = pick(other_x, torch.where(wide_y.isnan(), wide_x, wide_y))
    zeros = (wide_x == 0) & (wide_y == 0)
    negative = torch.signbit(wide_x), torch.signbit(wide_y)
    minus = negative[0] & negative[1] if op.startswith("max") else negative[0] | negative[1]
    expected = torch.where(zeros, torch.where(minus, -0.0, 0.0), expected)
    if op.endswith("nan"):
        expected = torch.where(wide_x.isnan() | wide_y.isnan(), torch.nan, expected)
    assert_same(run2(op, x, y), expected.to(dtype), x, y)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=name_of)
def test_comparisons_compare_values_and_not_bits(dtype: torch.dtype) -> None:
    x, y = pairs(dtype)
    expected = sum(
        f(x, y).int() << n
        for n, f in enumerate((torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne))
    )
    assert_same(run2("compare", x, y, torch.int32), expected, x, y)
    assert_same(run2("where", x, y), torch.where(x > y, x, y), x, y)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=name_of)
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div"])
def test_narrow_arithmetic_rounds_once(op: str, dtype: torch.dtype) -> None:
    x, y = pairs(dtype)
    wide_x, wide_y = formats.to_f32(x), formats.to_f32(y)
    if op == "div":
        exact = special.div_full(wide_x, wide_y).double()
    else:
        function = {"add": torch.add, "sub": torch.sub, "mul": torch.mul}[op]
        exact = function(wide_x.double(), wide_y.double())
    assert_same(run2(op, x, y), _rounded(exact, dtype), x, y)


def _rounded(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float64 to a narrow type once, to nearest even, by its spacing."""
    fraction, smallest, largest = (7, -126, 128) if dtype is BF16 else (10, -14, 16)
    finite = torch.where(torch.isfinite(exact), exact, torch.zeros_like(exact))
    exponent = (torch.frexp(finite)[1] - 1).clamp(min=smallest)
    spacing = torch.pow(2.0, (exponent - fraction).double())
    near = torch.round(finite / spacing) * spacing
    near = torch.where(
        near.abs() >= 2.0**largest, torch.copysign(torch.full_like(near, torch.inf), near), near
    )
    near = torch.where(near == 0, torch.copysign(near, finite), near)
    return torch.where(torch.isfinite(exact), near, exact).to(dtype)


CASTS = [
    (F32, BF16, formats.f32_to_bf16),
    (F32, F16, formats.f32_to_f16),
    (F32, E4M3, lambda x: formats.e4m3_encode(x).view(E4M3)),
    (BF16, E4M3, lambda x: formats.e4m3_encode(formats.to_f32(x)).view(E4M3)),
    (F16, E4M3, lambda x: formats.e4m3_encode(formats.to_f32(x)).view(E4M3)),
    (BF16, F32, formats.to_f32),
    (F16, F32, formats.to_f32),
    (F32, torch.int32, lambda x: torch.nan_to_num(x.double()).clamp(-(2**31), 2**31 - 1).int()),
]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    CASTS,
    ids=[f"{name_of(s)}-to-{name_of(t)}" for s, t, _ in CASTS],
)
def test_a_cast_is_its_reference(source: torch.dtype, target: torch.dtype, expected: Any) -> None:
    x = aimed(source)
    assert_same(run1("cast", x, target), expected(x), x)


@pytest.mark.parametrize("target", [F32, BF16, F16], ids=name_of)
def test_every_e4m3_code_decodes(target: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert_same(run1("cast", codes.view(E4M3), target), formats.e4m3_decode(codes).to(target))


@pytest.mark.parametrize("source", [torch.int32, torch.int64, torch.uint8, torch.int8], ids=name_of)
def test_an_integer_becomes_the_nearest_float(source: torch.dtype) -> None:
    x = aimed().view(torch.int32).long() * 8_388_609 if source is torch.int64 else aimed()
    x = x.view(torch.int32).to(source) if source is not torch.int64 else x
    assert_same(run1("cast", x, F32), x.to(F32))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_operation_has_the_bits_of_the_gpu() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the models are those of compute capability 9.0")
    wrong = []
    x, y = pairs()
    for op in (*UNARY, "neg"):
        wrong += [] if _agrees(lambda v, op=op: run1(op, v), aimed()) else [op]
    for op in (*BINARY, "max", "min", "max_nan", "min_nan", "clamp"):
        wrong += [] if _agrees(lambda v, w, op=op: run2(op, v, w), x, y) else [op]
    for dtype in (BF16, F16):
        for op in ("add", "sub", "mul", "div", "max", "min", "max_nan", "min_nan", "where"):
            same = _agrees(lambda v, w, op=op: run2(op, v, w), *pairs(dtype))
            wrong += [] if same else [f"{op} {dtype}"]
    for source, target, _ in CASTS:
        same = _agrees(lambda v, target=target: run1("cast", v, target), aimed(source))
        wrong += [] if same else [f"cast {source} {target}"]
    for target in (F32, BF16, F16):
        codes = torch.arange(256, dtype=torch.uint8).view(E4M3)
        same = _agrees(lambda v, target=target: run1("cast", v, target), codes)
        wrong += [] if same else [f"cast e4m3 {target}"]
    assert wrong == []


def _agrees(function: Any, *inputs: Tensor) -> bool:
    here, there = function(*inputs), function(*(x.cuda() for x in inputs))
    return bool((words(here) == words(there)).all())
