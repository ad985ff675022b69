"""The gated activation between the two GEMMs: SwiGLU, alone or with quantization.

Each launches its kernel on the real or the virtual GPU.  Only metadata is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_parity.kernels.call import demand_contiguous
from moe_parity.kernels.ours import activation_kernels
from moe_parity.kernels.virtual_gpu import dispatch
from moe_parity.references.arithmetic.formats import ScaleFormat, ScaleLayout
from moe_parity.references.errors import ParityError


@dataclass(frozen=True, kw_only=True)
class Activation:
    """What is asked of SwiGLU: ``clamp`` is none, before or after SiLU."""

    clamp: str = "none"
    limit: float = 0.0
    limits: Tensor | None = None
    """fp32 [E]: a limit for each expert, in place of ``limit``."""
    alpha: float = 1.0
    beta: float = 0.0

    @property
    def constants(self) -> dict[str, Any]:
        """What is compiled in."""
        return {
            "CLAMP": self.clamp,
            "SCALED": self.alpha != 1.0,
            "SHIFTED": self.beta != 0.0,
            "LIMITS": self.limits is not None,
        }


def swiglu(
    rows: Tensor,
    ids: Tensor | None,
    first: int,
    experts: int,
    how: Activation,
    out: Tensor | None = None,
) -> Tensor:
    """Return bf16 [P, I] of bf16 rows [P, 2 * I], contiguous; foreign rows are not written.

    Without ``ids`` every row is live.
    """
    pairs, width = rows.shape[0], _width("swiglu", rows)
    ids = _ids("swiglu", rows, ids, first)
    if out is None:
        out = torch.empty((pairs, width), dtype=torch.bfloat16, device=rows.device)
    if pairs:
        tile = min(16, 1 << (pairs - 1).bit_length())
        dispatch(
            activation_kernels.swiglu_kernel, (-(-pairs // tile), -(-width // 128)),
            rows, out, ids, out if how.limits is None else how.limits,
            pairs, first, experts, how.limit, how.alpha, how.beta,
            WIDTH=width, ROWS=tile, num_warps=4, **how.constants,
        )  # fmt: skip
    return out


def swiglu_quant(
    rows: Tensor,
    ids: Tensor | None,
    first: int,
    experts: int,
    how: Activation,
    *,
    group: int = 128,
    scale: ScaleFormat = ScaleFormat.FP32,
    layout: ScaleLayout = ScaleLayout.ROW,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
    vector: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Return codes uint8 [P, I] and scales [P, I / group] of bf16 rows [P, 2 * I].

    Without ``ids`` every row is live; foreign rows are not written.  ``codes`` and ``scales`` are
    memory of the caller's.
    """
    if group != 128 or scale.is_packed or layout is not ScaleLayout.ROW or vector is False:
        raise ParityError("swiglu_quant: row-major fp32 scales of groups of 128 only, so far.")
    pairs, width = rows.shape[0], _width("swiglu_quant", rows)
    ids = _ids("swiglu_quant", rows, ids, first)
    if codes is None:
        codes = torch.empty((pairs, width), dtype=torch.uint8, device=rows.device)
    if scales is None:
        scales = torch.empty((pairs, width // 128), dtype=torch.float32, device=rows.device)
    if pairs:
        tile = min(16, 1 << (pairs - 1).bit_length())
        dispatch(
            activation_kernels.swiglu_quant_kernel, (-(-pairs // tile), width // 128),
            rows, codes, scales, ids, scales if how.limits is None else how.limits,
            pairs, first, experts, how.limit, how.alpha, how.beta,
            WIDTH=width, ROWS=tile, POWER_OF_TWO=scale.is_power_of_two, num_warps=4,
            **how.constants,
        )  # fmt: skip
    return codes, scales


def _ids(step: str, rows: Tensor, ids: Tensor | None, first: int) -> Tensor:
    if ids is None:
        return torch.full((rows.shape[0],), first, dtype=torch.int32, device=rows.device)
    return demand_contiguous(ids, f"{step}'s ids")


def _width(step: str, rows: Tensor) -> int:
    if not rows.is_contiguous():
        raise ParityError(f"{step}: rows must be contiguous, strides {rows.stride()}.")
    return rows.shape[1] // 2
