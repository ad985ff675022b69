"""E4M3, UE8M0, BF16 and FP16 by their bits.

No cast here goes through a library: torch's own E4M3 cast saturates in one release and gives NaN
in another, and its NaN code depends on the source dtype.  What the functions do instead was
measured on an H200 (``cvt.rn.satfinite.e4m3x2.f32``, ``cvt.rn.bf16.f32``).

Two rules hold everywhere:

* a NaN loses its sign and payload: fp32 NaN is ``0x7fffffff``, BF16 ``0x7fff``, E4M3 ``0x7f``;
* the sign of zero is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import torch
from torch import Tensor

BLOCK = 128
"""Columns of K that share a scale, and rows of a weight's tile."""

E4M3_NAN = 0x7F
F32_NAN_BITS = 0x7FFFFFFF
_SIGN = -0x80000000
_ABS = 0x7FFFFFFF
_INF = 0x7F800000


def bits_of(x: Tensor) -> Tensor:
    """Return the bits of an fp32 tensor as int32, any shape, without a copy where possible."""
    if x.dtype is not torch.float32:
        raise TypeError(f"bits_of takes torch.float32, got {x.dtype}; convert it exactly first.")
    return x.contiguous().view(torch.int32)


def from_bits(bits: Tensor) -> Tensor:
    """Return the fp32 tensor whose bits are the int32 tensor ``bits``."""
    if bits.dtype is not torch.int32:
        raise TypeError(f"from_bits takes torch.int32, got {bits.dtype}.")
    return bits.contiguous().view(torch.float32)


def canonical_nan(x: Tensor) -> Tensor:
    """Return fp32 ``x`` with every NaN replaced by ``0x7fffffff``, the one the GPU writes."""
    return from_bits(bits_of(x).masked_fill(torch.isnan(x), F32_NAN_BITS))


def with_canonical_nan(x: Tensor) -> Tensor:
    """Return :func:`canonical_nan` of fp32 ``x``, which was just computed, in its own memory."""
    return from_bits(bits_of(x).masked_fill_(torch.isnan(x), F32_NAN_BITS))


def to_f32(x: Tensor) -> Tensor:
    """Widen BF16, FP16 or fp32 to fp32; exact, NaN made canonical."""
    if x.dtype is torch.bfloat16:
        wide = x.contiguous().view(torch.int16).to(torch.int32) << 16
        return with_canonical_nan(from_bits(wide))
    if x.dtype is torch.float16:
        return with_canonical_nan(x.to(torch.float32))
    if x.dtype is torch.float32:
        return canonical_nan(x)
    raise TypeError(f"to_f32 takes bfloat16, float16 or float32, got {x.dtype}.")


def f32_to_bf16(x: Tensor) -> Tensor:
    """Round fp32 to BF16, to nearest even; overflow gives Inf, NaN gives ``0x7fff``."""
    if not x.numel():
        return torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    rounded = (_rounded_to_16(x) >> 16).to(torch.int16)
    return rounded.masked_fill_(torch.isnan(x), 0x7FFF).view(torch.bfloat16)


def _rounded_to_16(x: Tensor) -> Tensor:
    """Return int32 words whose upper half is the nearest BF16, ties to even; NaN is no number.

    Of no elements torch makes the strides up: callers see to those.
    """
    bits = bits_of(x)
    # The sum wraps for NaN alone; a negative word counts up in magnitude as an unsigned one does.
    return ((bits >> 16) & 1).add_(bits).add_(0x7FFF)


def bf16_to_f32(x: Tensor) -> Tensor:
    """Widen BF16 to fp32; exact."""
    return to_f32(x)


def f32_to_f16(x: Tensor) -> Tensor:
    """Round fp32 to FP16, to nearest even, subnormals kept; NaN gives ``0x7fff``.

    IEEE binary16 conversion is an instruction on both sides, so torch's cast is exact; only the
    NaN is ours.
    """
    half = x.to(torch.float16).view(torch.int16)
    is_nan = torch.isnan(x)
    return torch.where(is_nan, torch.full_like(half, 0x7FFF), half).view(torch.float16)


def round_bf16(x: Tensor) -> Tensor:
    """Round fp32 to BF16 and widen it again: the rounding alone."""
    if not x.numel():
        return torch.empty_like(x)
    return from_bits((_rounded_to_16(x) & -0x10000).masked_fill_(torch.isnan(x), F32_NAN_BITS))


def e4m3_encode(x: Tensor) -> Tensor:
    """Round fp32 to E4M3 codes (uint8), to nearest even.

    Everything past 448, infinities included, saturates to +-448; NaN gives ``0x7f``.
    Source: ``cvt.rn.satfinite.e4m3x2.f32``, PTX ISA 8.x, compared on an H200.
    """
    bits = bits_of(x)
    mag = bits & _ABS
    # Normal range: keep 3 of 23 fraction bits; the carry of the rounding moves the exponent.
    normal = ((mag >> 20) & 1).add_(mag).add_(0x7FFFF).bitwise_right_shift_(20).sub_((127 - 7) << 3)
    # Below 2^-6 the spacing is 2^-9. Adding 2^14 puts that spacing at fp32's last place, so the
    # addition itself rounds to nearest even and leaves the code in the low bits.
    magic = 16384.0
    least = 0x3C800000
    subnormal = bits_of(from_bits(mag.clamp(max=least)).add_(magic)).sub_(0x46800000)
    code = torch.where(mag < least, subnormal, normal).clamp_(max=0x7E)
    code |= (bits >> 24) & 0x80
    return code.masked_fill_(torch.isnan(x), E4M3_NAN).to(torch.uint8)


def e4m3_decode(code: Tensor) -> Tensor:
    """Decode E4M3 codes (uint8, any shape) to fp32; ``0x7f`` and ``0xff`` give NaN."""
    if code.dtype is not torch.uint8:
        raise TypeError(f"e4m3_decode takes uint8 codes, got {code.dtype}; view FP8 as uint8.")
    return _e4m3_table(code.device)[code.long()]


@lru_cache(maxsize=8)
def _e4m3_table(device: torch.device) -> Tensor:
    code = torch.arange(256, device=device, dtype=torch.int32)
    exponent, fraction = (code >> 3) & 15, code & 7
    normal = (8 + fraction).float() * torch.pow(2.0, (exponent - 10).double()).float()
    value = torch.where(exponent == 0, fraction.float() * 2.0**-9, normal)
    value = torch.where(code >= 128, -value, value)
    nan = from_bits(torch.full_like(code, F32_NAN_BITS))
    return torch.where((code & 0x7F) == E4M3_NAN, nan, value)


def ue8m0_encode(scale: Tensor) -> Tensor:
    """Return the exponent byte (uint8) of fp32 powers of two.

    Raises ValueError, with the first offender, where ``scale`` is not a positive power of two
    (2^-127, whose byte is 0, is subnormal in fp32 and accepted).
    """
    bits = bits_of(scale)
    exact = ((bits & 0x807FFFFF) == 0) & (bits > 0) & (bits < _INF)
    ok = exact | (bits == 0x00400000)
    if not bool(ok.all()):
        at = int((~ok).flatten().nonzero()[0, 0])
        value, word = float(scale.flatten()[at]), int(bits.flatten()[at]) & 0xFFFFFFFF
        raise ValueError(
            f"UE8M0 holds positive powers of two only; element {at} is {value!r} (0x{word:08x})."
        )
    return (bits >> 23).to(torch.uint8)


def ue8m0_decode(code: Tensor) -> Tensor:
    """Decode exponent bytes (uint8) to fp32: 2^(code - 127), and NaN for 255."""
    wide = code.to(torch.int32)
    bits = torch.where(wide == 0, torch.full_like(wide, 0x00400000), wide << 23)
    return from_bits(torch.where(wide == 255, torch.full_like(wide, F32_NAN_BITS), bits))


def pack_ue8m0(codes: Tensor) -> Tensor:
    """Pack exponent bytes ``[..., G]`` into int32 words ``[..., ceil(G / 4)]``.

    Byte j of a word (little endian) is group 4 * word + j; missing groups are 0.
    """
    short = -codes.shape[-1] % 4
    padded = torch.nn.functional.pad(codes, (0, short))
    return row_major(padded).view(torch.int32)


def unpack_ue8m0(words: Tensor, groups: int) -> Tensor:
    """Unpack int32 words ``[..., W]`` to the first ``groups`` exponent bytes, uint8."""
    return row_major(words).view(torch.uint8)[..., :groups]


def row_major(x: Tensor) -> Tensor:
    """Return a row-major copy; ``contiguous`` keeps odd strides where a dimension has size 1."""
    return x.clone(memory_format=torch.contiguous_format)


# --- the formats as values ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CodeFormat:
    """A format of quantized elements."""

    name: str
    bits: int
    """Width of a code."""
    largest: float
    """The largest finite value; there is no infinity."""
    rounds_to_largest: float
    """The largest magnitude that rounds to it: the midpoint to the value that would come next."""
    top: int
    """The code of the largest value."""
    nan: int
    """The NaN code, sign cleared."""
    magnitude: int
    """Mask of a code without its sign."""
    dtype: torch.dtype
    """What torch calls it; codes travel as uint8."""
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]

    def is_nan(self, codes: Tensor) -> Tensor:
        """Return a mask of the NaN codes."""
        return (codes & self.magnitude) == self.nan

    def dequantized(self, codes: Tensor, scales: Tensor, down: int, across: int) -> Tensor:
        """Return codes [R, C] times the scales of their ``down`` x ``across`` blocks, float64."""
        wide = scales.double().repeat_interleave(down, 0)[: codes.shape[0]]
        wide = wide.repeat_interleave(across, 1)[:, : codes.shape[1]]
        return self.decode(codes).double() * wide


E4M3 = CodeFormat(
    name="e4m3", bits=8, largest=448.0, rounds_to_largest=464.0, top=0x7E, nan=E4M3_NAN,
    magnitude=0x7F,
    dtype=torch.float8_e4m3fn, encode=e4m3_encode, decode=e4m3_decode,
)  # fmt: skip


class ScaleLayout(StrEnum):
    """How the scales of [M, groups] lie in memory."""

    ROW = "row"
    """Strides (groups, 1)."""
    COLUMN = "col"
    """Strides (1, M)."""
    TMA = "tma"
    """Strides (1, M rounded up to 4), as TMA wants rows of 16 bytes."""

    def strides(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the strides, in elements, of scales [rows, columns]."""
        if self is ScaleLayout.ROW:
            return columns, 1
        return 1, rows if self is ScaleLayout.COLUMN else -(-rows // 4) * 4


class ScaleFormat(StrEnum):
    """How scales are held."""

    FP32 = "fp32"
    UE8M0 = "ue8m0"
    """Powers of two, held in fp32."""
    UE8M0_PACKED = "ue8m0packed"
    """Four exponent bytes in an int32."""

    @property
    def is_power_of_two(self) -> bool:
        """Whether the values are powers of two."""
        return self is not ScaleFormat.FP32

    @property
    def is_packed(self) -> bool:
        """Whether several scales share a word; the layout is that of TMA then."""
        return self is ScaleFormat.UE8M0_PACKED

    def stored(
        self, rows: int, groups: int, layout: ScaleLayout
    ) -> tuple[tuple[int, int], tuple[int, int], torch.dtype]:
        """Return shape, strides and dtype of the tensor that holds scales [rows, groups]."""
        if self.is_packed:
            words = -(-groups // 4)
            return (rows, words), ScaleLayout.TMA.strides(rows, words), torch.int32
        return (rows, groups), layout.strides(rows, groups), torch.float32

    def seen(self, scales: Tensor) -> Tensor:
        """Return fp32 scales as a reader of this format sees them.

        A byte has no infinity: 255, its exponent field, is the NaN of UE8M0.
        """
        if not self.is_packed:
            return scales
        return ue8m0_decode(((bits_of(scales) >> 23) & 0xFF).to(torch.uint8))


WHOLE_SCALES = frozenset({ScaleFormat.FP32, ScaleFormat.UE8M0})
"""The formats with a scale in each word."""


def without_missing_groups(words: Tensor, groups: int) -> Tensor:
    """Return packed words [rows, W] whose bytes of groups that do not exist are 0."""
    kept = unpack_ue8m0(words, 4 * words.shape[-1]).clone()
    kept[..., groups:] = 0
    return kept.view(torch.int32)
