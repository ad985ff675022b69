"""Validators of values: what a call itself must not look at, since it would wait for the GPU.

Run them where weights are registered, or on a user's demand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import E4M3, bits_of
from moe_parity.references.errors import ParityError

SMALLEST = 0x00400000
"""The bits of 2^-127, exponent byte 0 of UE8M0: the one power of two among them that has fraction
bits, since it is subnormal in fp32."""


def check_scales(
    scales: Tensor,
    *,
    power_of_two: bool = False,
    name: str = "scales",
    because: str = "",
    first: int | None = None,
) -> None:
    """Raise ParityError, naming the first offender, unless all fp32 scales are usable.

    A scale is positive and finite; with ``power_of_two`` it is one that UE8M0 holds too, which
    ``because`` gives a reason for.  ``first`` is the global id of expert 0 of scales [E, N, K],
    whose offender is then named by its expert and its tile.
    """
    if scales.dtype is not torch.float32:
        raise ParityError(f"{name} must be float32, got {scales.dtype}.")
    usable = torch.isfinite(scales) & (scales > 0)
    _raise_at(scales, ~usable, name, "expected a positive finite number", first)
    if power_of_two:
        bits = bits_of(scales)
        fraction = ((bits & 0x007FFFFF) != 0) & (bits != SMALLEST)
        _raise_at(scales, fraction, name, "expected a power of two", first, because)


def check_codes(codes: Tensor, *, name: str = "codes") -> None:
    """Raise ParityError where uint8 E4M3 codes hold a NaN."""
    if codes.dtype is not torch.uint8:
        raise ParityError(f"{name} must be uint8 E4M3 codes, got {codes.dtype}.")
    nan = E4M3.is_nan(codes)
    if bool(nan.any()):
        at = [int(n) for n in nan.nonzero()[0]]
        raise ParityError(f"{name}{at} is the NaN 0x{int(codes[tuple(at)]):02x}.")


def _raise_at(
    scales: Tensor, bad: Tensor, name: str, expected: str, first: int | None, because: str = ""
) -> None:
    if bool(bad.any()):
        at = [int(n) for n in bad.nonzero()[0]]
        value = scales[tuple(at)].reshape(1)
        word = int(bits_of(value)[0]) & 0xFFFFFFFF
        where = "" if first is None else f" in tile {at[1:]} of expert {first + at[0]}"
        got = f"{name}{at} is {float(value):g} (0x{word:08x})"
        raise ParityError(f"{got}, {expected}{where}{because}.")
