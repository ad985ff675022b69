"""Two quantizer outputs compared, codes and scales separately, and a difference in words."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import bits_of, e4m3_decode
from moe_parity.references.language import QuantOutput, Stage


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How ``got`` differs from ``expected``."""

    codes: int
    """Differing codes."""
    scales: int
    """Differing scales."""
    compared: int
    """Codes and scales compared."""
    max_code_step: int
    """Largest distance of two codes, in E4M3 values between them."""
    max_ulp: int
    """Largest distance of two scales, in fp32 values between them."""
    first: str
    """The first mismatch in words; empty where there is none."""

    @property
    def differing(self) -> int:
        """Codes and scales together."""
        return self.codes + self.scales

    @property
    def equal(self) -> bool:
        """Whether every bit is the same."""
        return self.differing == 0


def ordered(bits: Tensor, width: int) -> Tensor:
    """Map sign-magnitude bits to integers in the order of their values (both zeros are 0)."""
    wide = bits.long() & ((1 << width) - 1)
    magnitude = wide & ((1 << (width - 1)) - 1)
    return torch.where(wide >> (width - 1) == 1, -magnitude, magnitude)


def compare(got: QuantOutput, expected: QuantOutput, stage: Stage) -> Comparison:
    """Compare bit for bit; shapes must agree (ValueError, in a sentence, where they do not)."""
    for name in ("codes", "scales"):
        left, right = getattr(got, name).shape, getattr(expected, name).shape
        if left != right:
            raise ValueError(f"{stage}: {name} have shape {list(left)}, expected {list(right)}.")
    codes = got.codes != expected.codes
    left_bits, right_bits = bits_of(got.scales), bits_of(expected.scales)
    scales = left_bits != right_bits
    step = (ordered(got.codes, 8) - ordered(expected.codes, 8)).abs()
    ulp = (ordered(left_bits, 32) - ordered(right_bits, 32)).abs()
    return Comparison(
        codes=int(codes.sum()),
        scales=int(scales.sum()),
        compared=codes.numel() + scales.numel(),
        max_code_step=int(step.max()) if step.numel() else 0,
        max_ulp=int(ulp.max()) if ulp.numel() else 0,
        first=_first(got, expected, codes, scales, stage),
    )


def _first(
    got: QuantOutput, expected: QuantOutput, codes: Tensor, scales: Tensor, stage: Stage
) -> str:
    row_name = "token" if stage is Stage.ACT_QUANT else "row"
    if bool(scales.any()):
        row, column = (int(n) for n in scales.nonzero()[0])
        return (
            f"at {row_name} {row}, scale {column}: got {_f32(got.scales[row, column])}, "
            f"expected {_f32(expected.scales[row, column])}"
        )
    if bool(codes.any()):
        row, column = (int(n) for n in codes.nonzero()[0])
        return (
            f"at {row_name} {row}, column {column}: got code {_e4m3(got.codes[row, column])}, "
            f"expected {_e4m3(expected.codes[row, column])}"
        )
    return ""


def _f32(value: Tensor) -> str:
    word = int(bits_of(value.reshape(1))[0]) & 0xFFFFFFFF
    return f"0x{word:08x} ({float(value):.9g})"


def _e4m3(code: Tensor) -> str:
    return f"0x{int(code):02x} ({float(e4m3_decode(code.reshape(1))[0]):g})"
