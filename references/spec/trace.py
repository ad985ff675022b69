"""Traces: what a layer, or one stage of it, left behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from moe_parity.references.spec.stage import Stage


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
    """Stage -> its output, in canonical (token, k) rows; may be partial."""

    stages: Mapping[Stage, QuantOutput] = field(default_factory=dict)
