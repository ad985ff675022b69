"""What a layer is called with, and what it leaves behind."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import E4M3, CodeFormat, ScaleFormat
from moe_parity.references.stages.routing import local_expert


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of one rank: E4M3 codes (uint8) and fp32 scales of 128 x 128 tiles."""

    w13: Tensor
    """[E, 2 * I, H], the gate's rows first."""
    w13_scale: Tensor
    """[E, ceil(2 * I / 128), H / 128]."""
    w2: Tensor
    """[E, H, I]."""
    w2_scale: Tensor
    """[E, ceil(H / 128), I / 128]."""
    first: int = 0
    """The global id of expert 0 of this rank."""
    bias13: Tensor | None = None
    """fp32 [E, 2 * I]."""
    bias2: Tensor | None = None
    """fp32 [E, H]."""

    @property
    def count(self) -> int:
        """Experts on this rank."""
        return self.w13.shape[0]


@dataclass(frozen=True, kw_only=True)
class Routed:
    """A batch: activations, expert ids, routing weights."""

    x: Tensor
    """[M, H], bf16."""
    ids: Tensor
    """Global expert ids [M, k], int32 or int64; ids that this rank does not own are dropped."""
    weights: Tensor | None
    """fp32 [M, k]; None means ones."""


@dataclass(frozen=True, kw_only=True)
class Arrived(Routed):
    """A batch that was quantized before it was dispatched: ``x`` holds codes, uint8."""

    x_scale: Tensor
    """fp32 [M, H / 128]."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What else the caller asks for."""

    scale: ScaleFormat = ScaleFormat.FP32
    """The format of the first quantization's scales."""
    mid: ScaleFormat = ScaleFormat.FP32
    """That of the second one."""
    form: CodeFormat = E4M3
    """The format of all codes."""
    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0
    dtype: torch.dtype = torch.bfloat16
    """The type of the output."""


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """One batch for one rank's experts."""

    batch: Routed
    experts: Experts
    asked: Asked

    @property
    def expert(self) -> Tensor:
        """The local expert of each pair, int64 [P]; -1 where the rank does not own it."""
        return local_expert(self.batch.ids, self.experts.first, self.experts.count)

    @property
    def x_scale(self) -> Tensor | None:
        """The scales of activations that arrive quantized, else None."""
        return self.batch.x_scale if isinstance(self.batch, Arrived) else None


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What every stage of one batch left behind, rows in (token, k) order, P = M * k of them.

    Rows of pairs that the rank does not own may hold anything.
    """

    act_codes: Tensor
    """uint8 [M, H]."""
    act_scales: Tensor
    """fp32 [M, H / 128]."""
    fc1: Tensor
    """bf16 [P, 2 * I]."""
    mid_codes: Tensor
    """uint8 [P, I]."""
    mid_scales: Tensor
    """fp32 [P, I / 128]."""
    fc2: Tensor
    """bf16 [P, H]."""
    out: Tensor
    """[M, H] in the output type."""
