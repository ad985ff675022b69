"""Elementary functions as an H200 computes them: the special-function unit and what is built on it.

``MUFU.EX2`` and ``MUFU.RCP`` are table look-ups over all 2^23 mantissas, measured and stored in
``data/`` as differences from a base that plain float64 additions and products give everywhere.
The PTX functions around them follow the machine code that ptxas emits for sm_90 (range scaling by
powers of two), and ``expf``, ``exp`` and ``log2`` follow the PTX of nvcc 13.0 and of libdevice.
Every function takes and returns fp32 tensors of any shape; a NaN result is ``0x7fffffff``.
"""

from __future__ import annotations

import lzma
from decimal import Decimal, localcontext
from functools import lru_cache
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import F32_NAN_BITS, bits_of, canonical_nan, from_bits
from moe_parity.references.arithmetic.rounding import f32, fma_rm, fma_rn
from moe_parity.references.chips import REFERENCE

_MANTISSA = 0x007FFFFF
_MIN_NORMAL = 2.0**-126
_HUGE = 2.0**126
LOG2_E = 1.4426950216293335
"""log2(e) in fp32, bits 0x3fb8aa3b."""


@lru_cache(maxsize=8)
def _table(name: str, device: torch.device) -> Tensor:
    """Return the measured differences of ``name`` as int8 [2^23] on ``device``."""
    packed = (
        files("moe_parity.references.arithmetic").joinpath("data", f"mufu_{name}.xz").read_bytes()
    )
    raw = np.frombuffer(lzma.decompress(packed), dtype=np.int8)
    if raw.size != 1 << 23:
        raise RuntimeError(
            f"data/{REFERENCE.tables[name]} holds {raw.size} entries, expected {1 << 23}."
        )
    return torch.from_numpy(raw.copy()).to(device)


@lru_cache(maxsize=8)
def _exp2_constants(device: torch.device) -> tuple[Tensor, tuple[float, ...]]:
    """Return 2^(i/128) for i < 128 (float64) and ln(2)^n / n! for n <= 5."""
    with localcontext() as context:
        context.prec = 50
        steps = [float(Decimal(2) ** (Decimal(i) / 128)) for i in range(128)]
        ln2, factorial = Decimal(2).ln(), (1, 1, 2, 6, 24, 120)
        series = tuple(float(ln2**n / factorial[n]) for n in range(6))
    return torch.tensor(steps, dtype=torch.float64, device=device), series


def _exp2_bits(fraction: Tensor) -> Tensor:
    """Return the bits of MUFU.EX2 at ``1 + fraction * 2^-23``, halved: a value in [1, 2)."""
    steps, series = _exp2_constants(fraction.device)
    low = (fraction & 0xFFFF).double() * 2.0**-23
    power = torch.full_like(low, series[5])
    for coefficient in reversed(series[:5]):
        power = power * low + coefficient
    base = bits_of((steps[fraction >> 16] * power).float())
    return base + _table("ex2", fraction.device)[fraction].int()


def mufu_ex2(x: Tensor) -> Tensor:
    """Return MUFU.EX2 of fp32 ``x``, which is ``ex2.approx.ftz.f32``.

    The argument is cut to 23 fraction bits first: floor(x * 2^23) for x >= 0, and below zero the
    one's complement of the truncated magnitude, except that integers stay exact.  Results under
    2^-126 are 0.
    """
    scaled = x.abs().double().clamp(max=512.0) * 2.0**23
    magnitude = scaled.floor().long()
    k = torch.where(x < 0, -magnitude - 1, magnitude)
    exact = (magnitude & _MANTISSA) == 0
    k = torch.where((x < 0) & exact, -magnitude, k)
    fraction, power = k & _MANTISSA, k >> 23
    bits = _exp2_bits(fraction) + (power << 23).int()
    bits = torch.where(power < -126, torch.zeros_like(bits), bits)
    bits = torch.where(power >= 128, torch.full_like(bits, 0x7F800000), bits)
    return from_bits(torch.where(torch.isnan(x), torch.full_like(bits, F32_NAN_BITS), bits))


def mufu_rcp(x: Tensor) -> Tensor:
    """Return MUFU.RCP of fp32 ``x``, which is ``rcp.approx.ftz.f32``.

    Depends on the mantissa alone; a subnormal argument counts as 0 and gives Inf, a subnormal
    result is 0.
    """
    bits = bits_of(x)
    sign, exponent, fraction = bits & -0x80000000, (bits >> 23) & 0xFF, bits & _MANTISSA
    mantissa = from_bits(fraction | 0x3F800000)
    one = bits_of(torch.ones_like(mantissa) / mantissa)
    index = fraction.long()
    result = one + _table("rcp", x.device)[index].int() - ((exponent - 127) << 23)
    tiny = ((result >> 23) <= 0) | (exponent == 255)
    result = torch.where(tiny, torch.zeros_like(result), result)
    result = torch.where(exponent == 0, torch.full_like(result, 0x7F800000), result)
    is_nan = (exponent == 255) & (fraction != 0)
    return from_bits(torch.where(is_nan, torch.full_like(result, F32_NAN_BITS), result | sign))


def flush(x: Tensor) -> Tensor:
    """Return ``x`` with subnormals replaced by zeros of the same sign: ``.ftz``."""
    bits = bits_of(x)
    return from_bits(torch.where((bits & 0x7F800000) == 0, bits & -0x80000000, bits))


def ex2_approx(x: Tensor, *, ftz: bool) -> Tensor:
    """Return ``ex2.approx.f32`` (or ``.ftz``).

    Without ftz, an argument below -126 is halved and the result squared, which reaches the
    subnormals.
    """
    if ftz:
        return mufu_ex2(x)
    low = x < -126.0
    root = mufu_ex2(torch.where(low, x * 0.5, x))
    return canonical_nan(torch.where(low, root * root, root))


def rcp_approx(x: Tensor, *, ftz: bool) -> Tensor:
    """Return ``rcp.approx.f32`` (or ``.ftz``); without ftz subnormals are scaled in and out."""
    if ftz:
        return mufu_rcp(x)
    scale = _range_scale(x, both=True)
    return canonical_nan(scale * mufu_rcp(x * scale))


def _range_scale(b: Tensor, *, both: bool) -> Tensor:
    """Return the power of two that brings a divisor into the unit's range."""
    scale = torch.where(b.abs() < _MIN_NORMAL, f32(2.0**24, b), f32(1.0, b))
    return torch.where(b.abs() > _HUGE, f32(0.25, b), scale) if both else scale


def div_full(a: Tensor, b: Tensor, *, ftz: bool = False) -> Tensor:
    """Return ``div.full.f32`` (or ``.ftz``): at most 2 ulp from a / b; Triton's ``/``.

    a and b are scaled by the same power of two when b is huge or subnormal, then a * MUFU.RCP(b).
    """
    if ftz:
        a, b = flush(a), flush(b)
        scale = torch.where(b.abs() > _HUGE, f32(0.25, b), f32(1.0, b))
        return canonical_nan(flush(mufu_rcp(flush(b * scale)) * flush(a * scale)))
    scale = _range_scale(b, both=True)
    return canonical_nan(mufu_rcp(b * scale) * (a * scale))


def div_approx(a: Tensor, b: Tensor, *, ftz: bool = False) -> Tensor:
    """Return ``div.approx.f32`` (or ``.ftz``): ``__fdividef`` and ``/`` under -use_fast_math.

    A divisor past 2^126 gives 0, since its reciprocal is flushed.
    """
    if ftz:
        return canonical_nan(flush(mufu_rcp(b) * flush(a)))
    scale = _range_scale(b, both=False)
    return canonical_nan(mufu_rcp(b * scale) * (a * scale))


def cuda_expf(x: Tensor) -> Tensor:
    """Return CUDA's accurate ``expf`` (nvcc 13.0, no fast-math)."""
    return _exp(x, ftz=False)


def libdevice_exp(x: Tensor) -> Tensor:
    """Return ``libdevice.exp`` of fp32 as Triton links it: the same chain with ftz."""
    return _exp(x, ftz=True)


def _exp(x: Tensor, *, ftz: bool) -> Tensor:
    def const(bits: int) -> Tensor:
        return from_bits(torch.tensor(bits, dtype=torch.int32, device=x.device))

    def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return flush(fma_rn(flush(a), b, c)) if ftz else fma_rn(a, b, c)

    turns = fma(x, const(0x3BBB989D), const(0x3F000000))
    turns = torch.where(torch.isnan(turns), torch.zeros_like(turns), turns.clamp(0.0, 1.0))
    magic = fma_rm(turns, const(0x437C0000), const(0x4B400001))
    rest = fma(x, const(0x3FB8AA3B), -(magic - 12583039.0))
    rest = fma(x, const(0x32A57060), rest)
    power = from_bits(bits_of(magic) << 23)
    return canonical_nan(mufu_ex2(rest) * power)


def triton_exp(x: Tensor) -> Tensor:
    """Return Triton's ``tl.exp``: ``ex2.approx`` without ftz of RN(x * log2 e)."""
    return ex2_approx(canonical_nan(x * f32(LOG2_E, x)), ftz=False)


_LOG2_SERIES = (
    0x3DC6B27F,
    -0x41D380D0,
    0x3E2FCF2A,
    -0x41C8B1BD,
    0x3E520BF4,
    -0x4189C375,
    0x3E93BF99,
    -0x414755B7,
    0x3EF6384A,
    -0x40C755C5,
)


def libdevice_log2(x: Tensor) -> Tensor:
    """Return ``log2f`` of CUDA and libdevice, Triton's ``tl.log2``: a polynomial, no table.

    Valid for x >= 2^-126 or 0, Inf, NaN and negative arguments alike; the ftz of libdevice shows
    in none of its intermediate values there, and a subnormal argument is scaled by 2^23 first.
    """

    def const(bits: int) -> Tensor:
        return from_bits(torch.tensor(bits, dtype=torch.int32, device=x.device))

    small = x < _MIN_NORMAL
    scaled = torch.where(small, x * 8388608.0, x)
    offset = torch.where(small, f32(-23.0, x), f32(0.0, x))
    bits = bits_of(scaled)
    exponent = (bits - 1060439283) & -8388608
    whole = fma_rn(exponent.float(), const(0x34000000), offset)
    t = from_bits(bits - exponent) - 1.0
    series = const(_LOG2_SERIES[0])
    for word in _LOG2_SERIES[1:]:
        series = fma_rn(series, t, const(word))
    tail = t * (t * series)
    value = whole + fma_rn(t, const(0x3FB8AA3B), tail)
    infinity = f32(float("inf"), x)
    unusual = (bits < 0) | (bits >= 0x7F800000)
    value = torch.where(unusual, fma_rn(scaled, infinity, infinity), value)
    return canonical_nan(torch.where(scaled == 0, -infinity, value))
