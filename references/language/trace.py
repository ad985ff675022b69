"""Traces: what a layer, or one stage of it, left behind."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class QuantOutput:
    """The result of a quantization stage in canonical form.

    ``codes`` are uint8 E4M3 [rows, columns]; ``scales`` fp32 [rows, groups] (activations) or
    [ceil(rows / 128), ceil(columns / 128)] (weights), whatever layout or packing the kernel used.
    """

    codes: Tensor
    scales: Tensor


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What every stage of one batch left behind, rows in (token, k) order, P = M * k of them.

    Rows of pairs that the rank does not own are zeros.
    """

    act: QuantOutput
    """[M, H] codes and [M, H / 128] scales."""
    fc1: Tensor
    """bf16 [P, 2 * I]."""
    mid: QuantOutput
    """[P, I] codes and [P, I / 128] scales."""
    fc2: Tensor
    """bf16 [P, H]."""
    out: Tensor
    """[M, H] in the output type."""
