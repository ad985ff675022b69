"""The language on the virtual GPU: dots, device functions, reductions, syntax, integers."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs Triton, which exists for Linux only")
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moe_parity.kernels import virtual_gpu as vg
from moe_parity.references.chips import Unit, tensor_core
from moe_parity.references.chips.hopper import MMA_F16, WGMMA_FP8

E4M3 = torch.float8_e4m3fn


@triton.jit
def dots(a_ptr, b_ptr, o_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, AS: tl.constexpr):
    """out[M, N] = a[M, K] @ b[N, K].T in blocks of 32, the accumulator in the unit."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, 32)
    acc = tl.zeros((M, N), tl.float32)
    for start in range(0, K, 32):
        a = tl.load(a_ptr + m[:, None] * K + start + k[None, :])
        b = tl.load(b_ptr + n[None, :] * K + start + k[:, None])
        if AS == "codes":
            acc = tl.dot(a.to(tl.float8e4nv, bitcast=True), b.to(tl.float8e4nv, bitcast=True), acc)
        else:
            acc = tl.dot(a, b, acc)
    tl.store(o_ptr + m[:, None] * N + n[None, :], acc)


@triton.jit
def _twice(x):
    return tl.fma(x, 2.0, 0.0)


@triton.jit
def _row_max(x, axis: tl.constexpr):
    return _twice(tl.max(x, axis=axis))


@triton.jit
def nested(x_ptr, o_ptr, R: tl.constexpr, C: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :])
    tl.store(o_ptr + tl.arange(0, R), _row_max(x.abs(), 1))


@triton.jit
def reductions(x_ptr, o_ptr, OP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    if OP == "sum":
        tl.store(o_ptr, tl.sum(x, axis=0))
    elif OP == "min":
        tl.store(o_ptr, tl.min(x, axis=0))
    elif OP == "max":
        tl.store(o_ptr, x.max(axis=0))
    elif OP == "argmax":
        tl.store(o_ptr, tl.argmax(x, axis=0))
    elif OP == "xor":
        tl.store(o_ptr, tl.xor_sum(x, axis=0))
    else:
        tl.store(o_ptr + i, tl.cumsum(x, axis=0))


@triton.jit
def syntax(x_ptr, o_ptr, limit, BLOCK: tl.constexpr):
    """Python syntax that means something of its own in a kernel."""
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    kept = ((x > 0) and (x < 4)) or not (x < 9)
    total = 0
    for step in range(limit):
        if step == 1 or limit > 100:
            total += step
        elif 1 < step < 3:
            total -= step
    tl.device_assert(total < 5, "the total is small")
    tl.store(o_ptr + i, tl.where(kept, x, total))


@triton.jit
def overflow(o_ptr, big):
    tl.store(o_ptr, big * 2)


@triton.jit
def block_condition(x_ptr):
    if tl.load(x_ptr + tl.arange(0, 4)) > 0:
        tl.store(x_ptr, 1.0)


@triton.jit
def integers(x_ptr, y_ptr, flag_ptr, o_ptr, N: tl.constexpr):
    """Store one row of results per operation."""
    i = tl.arange(0, N)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    flag = tl.load(flag_ptr + i)
    row = o_ptr + i.to(tl.int64)
    tl.store(row, tl.where(flag, x, y))
    tl.store(row + N, x // y)
    tl.store(row + 2 * N, x % y)
    tl.store(row + 3 * N, (x >> 3) ^ (y << 2))
    tl.store(row + 4 * N, tl.load(tl.where(flag, x_ptr + i, y_ptr + (N - 1 - i))))
    left, right = tl.split(tl.join(x, y))
    tl.store(row + 5 * N, tl.minimum(left, right) + tl.cdiv(tl.max(y, axis=0), 3))
    tl.store(row + 6 * N, tl.histogram((x & 3).to(tl.int32), N))
    count = x * 0
    n = 0
    while n < 3:
        for step in tl.static_range(2):
            count += step + n
        n += 1
    tl.store(row + 7 * N, count + tl.trans(tl.reshape(y, (4, N // 4))).reshape((N,)))


@triton.jit
def dependent(o_ptr):
    gdc_wait()
    tl.store(o_ptr, 1.0)
    gdc_launch_dependents()


# --- dots ----------------------------------------------------------------------------------------


def _codes(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)
    return torch.where((codes & 0x7F) == 0x7F, 0, codes).to(torch.uint8)


@pytest.mark.parametrize(
    ("rows", "columns", "warps", "unit"),
    [
        (64, 16, 4, WGMMA_FP8),
        (64, 32, 4, WGMMA_FP8),
        (16, 64, 4, MMA_F16),
        (64, 16, 2, MMA_F16),
    ],
    ids=["m64-n16-w4", "m64-n32-w4", "m16-n64-w4", "m64-n16-w2"],
)
def test_a_dot_runs_on_the_unit_that_its_ptx_names(
    rows: int, columns: int, warps: int, unit: Unit
) -> None:
    a, b = _codes(rows, 96, 1), _codes(columns, 96, 2)
    o = torch.zeros(rows, columns)
    report = vg.launch(dots, (1,), a, b, o, rows, columns, 96, AS="codes", num_warps=warps)
    assert report.dot_unit == unit
    expected = tensor_core.dot(a, b.T.contiguous(), unit=unit)
    assert torch.equal(o.view(torch.int32), expected.view(torch.int32))
    other = next(u for u in (WGMMA_FP8, MMA_F16) if u != unit)
    assert not torch.equal(o, tensor_core.dot(a, b.T.contiguous(), unit=other))


def test_an_fp8_tensor_is_the_same_as_its_codes() -> None:
    a, b = _codes(64, 32, 1), _codes(16, 32, 2)
    plain, typed = torch.zeros(64, 16), torch.zeros(64, 16)
    vg.launch(dots, (1,), a, b, plain, 64, 16, 32, AS="codes")
    vg.launch(dots, (1,), a.view(E4M3), b.view(E4M3), typed, 64, 16, 32, AS="values")
    assert torch.equal(plain, typed)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "fp16"]
)
def test_a_dot_of_another_type_is_refused(dtype: torch.dtype) -> None:
    a, b, o = torch.ones(64, 32, dtype=dtype), torch.ones(16, 32, dtype=dtype), torch.zeros(64, 16)
    with pytest.raises(vg.UnmodelledOperation, match=r"tl\.dot of (fp32|bf16|fp16)"):
        vg.launch(dots, (1,), a, b, o, 64, 16, 32, AS="values")


# --- device functions and reductions -------------------------------------------------------------


def test_device_functions_call_one_another() -> None:
    x, o = torch.randn(4, 8), torch.zeros(4)
    report = vg.launch(nested, (1,), x, o, 4, 8)
    assert torch.equal(o, 2 * x.abs().amax(1))
    assert report.bytes_loaded == 4 * 8 * 4
    assert report.bytes_stored == 4 * 4


def test_reductions_whose_order_cannot_show() -> None:
    floats = torch.tensor([-0.0, torch.nan, 0.0, -0.0] * 16)
    got = torch.ones(2)
    vg.launch(reductions, (1,), floats, got, "max", 64)
    vg.launch(reductions, (1,), floats, got[1:], "min", 64)
    assert got.view(torch.int32).tolist() == [0, -(2**31)]
    ints = torch.arange(-20, 44, dtype=torch.int32)
    one, row = torch.zeros(1, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    for op, expected in (
        ("sum", ints.sum()),
        ("max", 43),
        ("argmax", 63),
        ("min", -20),
        ("xor", 0),
    ):
        vg.launch(reductions, (1,), ints, one, op, 64)
        assert op == "xor" or one.item() == expected
    assert one.item() == _xor(ints.tolist())
    vg.launch(reductions, (1,), ints, row, "cumsum", 64)
    assert torch.equal(row, ints.cumsum(0).int())


def _xor(values: list[int]) -> int:
    total = 0
    for value in values:
        total ^= value
    return total


# --- syntax and integers -------------------------------------------------------------------------


def test_python_syntax_means_what_the_compiler_makes_of_it() -> None:
    x = torch.tensor([-1.0, 1.0, 3.0, 5.0, 9.0, 0.0, 2.0, 4.0])
    o = torch.zeros(8)
    vg.launch(syntax, (1,), x, o, 3, BLOCK=8)
    assert o.tolist() == [-1.0, 1.0, 3.0, -1.0, 9.0, -1.0, 2.0, -1.0]
    with pytest.raises(AssertionError, match="a device_assert failed: the total is small"):
        vg.launch(syntax, (1,), x, o, 200, BLOCK=8)
    with pytest.raises(TypeError, match=r"a condition has shape \[4\]"):
        vg.launch(block_condition, (1,), x)


def test_integers_shapes_and_loops() -> None:
    x = torch.arange(-16, 16, dtype=torch.int32) * 5
    y = torch.tensor([3, -7, 1, 100] * 8, dtype=torch.int32)
    flag = torch.arange(32) % 3 == 0
    o = torch.zeros(8, 32, dtype=torch.int32)
    vg.launch(integers, (1,), x, y, flag, o, 32)
    quotient = torch.div(x, y, rounding_mode="trunc")
    expected = [
        torch.where(flag, x, y),
        quotient,
        x - quotient * y,
        (x >> 3) ^ (y << 2),
        torch.where(flag, x, y.flip(0)),
        torch.minimum(x, y) + 34,
        torch.bincount(x & 3, minlength=32),
        y.reshape(4, 8).T.reshape(32) + 9,
    ]
    assert torch.equal(o, torch.stack([row.int() for row in expected]))


def test_integers_wrap_as_on_the_gpu() -> None:
    o = torch.zeros(1, dtype=torch.int32)
    vg.launch(overflow, (1,), o, 2**31 - 1)
    assert o.item() == -2


def test_grid_dependency_control_does_nothing() -> None:
    o = torch.zeros(1)
    vg.launch(dependent, (1,), o)
    assert o.item() == 1


@triton.jit
def _mixed_kernel(x_ptr, out_ptr, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    x = tl.load(x_ptr + at)
    wide = x.to(tl.int64) + at
    narrow = (x[:, None] < at[None, :]) & (at[None, :] < 6)
    tl.store(out_ptr + at, (wide * 2 + tl.sum(narrow.to(tl.int32), 1)).to(tl.float32) * 0.25)


def test_operands_of_two_types_or_shapes_are_still_made_one() -> None:
    x = torch.tensor([3, -1, 7, 2, 0, 5, 4, 1], dtype=torch.int32)
    out = torch.empty(8)
    vg.dispatch(_mixed_kernel, (1,), x, out, WIDTH=8)
    at = torch.arange(8)
    less = ((x[:, None] < at[None]) & (at[None] < 6)).sum(1)
    assert torch.equal(out, ((x.long() + at) * 2 + less).float() * 0.25)
