"""Validators of values: what a call itself must not look at, since it would wait for the GPU.

Run them where weights are registered, or on a user's demand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import E4M3, bits_of
from moe_parity.references.errors import ParityError


def check_scales(scales: Tensor, *, power_of_two: bool = False, name: str = "scales") -> None:
    """Raise ParityError, naming the first offender, unless all fp32 scales are usable.

    A scale is positive and finite; with ``power_of_two`` it has no fraction bits either.
    """
    if scales.dtype is not torch.float32:
        raise ParityError(f"{name} must be float32, got {scales.dtype}.")
    usable = torch.isfinite(scales) & (scales > 0)
    _raise_at(scales, ~usable, name, "expected a positive finite number")
    if power_of_two:
        fraction = (bits_of(scales) & 0x007FFFFF) != 0
        _raise_at(scales, fraction, name, "expected a power of two")


def check_codes(codes: Tensor, *, name: str = "codes") -> None:
    """Raise ParityError where uint8 E4M3 codes hold a NaN."""
    if codes.dtype is not torch.uint8:
        raise ParityError(f"{name} must be uint8 E4M3 codes, got {codes.dtype}.")
    nan = E4M3.is_nan(codes)
    if bool(nan.any()):
        at = [int(n) for n in nan.nonzero()[0]]
        raise ParityError(f"{name}{at} is the NaN 0x{int(codes[tuple(at)]):02x}.")


def _raise_at(scales: Tensor, bad: Tensor, name: str, expected: str) -> None:
    if bool(bad.any()):
        at = [int(n) for n in bad.nonzero()[0]]
        value = scales[tuple(at)].reshape(1)
        word = int(bits_of(value)[0]) & 0xFFFFFFFF
        raise ParityError(f"{name}{at} is {float(value):g} (0x{word:08x}), {expected}.")
