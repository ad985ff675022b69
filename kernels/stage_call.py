"""What the harness hands to a kernel of one middle stage, and what it gets back.

Rows have a canonical order, pairs (token, k) or, after the permutation, experts ascending; a kernel
that pads or reorders says where the rows are and what may lie between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from moe_parity.kernels.call import Allocator
from moe_parity.references.language import Case, Stage


class Fate(IntEnum):
    """What a call does to a row of an output."""

    LIVE = 0
    """Written, and compared."""
    ZERO = 1
    """Written: +0."""
    JUNK = 2
    """Written or not, with anything; nobody may read it."""
    UNTOUCHED = 3
    """As it was before the call."""


@dataclass(frozen=True, kw_only=True)
class GroupedRows:
    """The operands of a grouped GEMM, stages ``fc1`` and ``fc2``."""

    a: Tensor
    """E4M3 codes [T, K], uint8; a row serves ``top_k`` pairs in ``fc1``, one in ``fc2``."""
    a_scale: Tensor
    """fp32 [T, ceil(K / 128)]."""
    w: Tensor
    """E4M3 codes [E, N, K], uint8."""
    w_scale: Tensor
    """fp32 [E, ceil(N / 128), ceil(K / 128)]."""
    ids: Tensor
    """Global expert ids int32 [M, k]."""
    expert: Tensor
    """The local expert of each pair, int64 [P]; -1 where the rank does not own it."""
    weights: Tensor
    """Routing weights fp32 [M, k]; an ``fc2`` kernel may apply them in its epilogue."""
    first: int = 0
    """The global id of expert 0."""

    @property
    def top_k(self) -> int:
        """How many pairs a row of ``a`` serves."""
        return self.expert.numel() // max(self.a.shape[0], 1)

    @property
    def source(self) -> Tensor:
        """The row of ``a`` that each pair reads, int64 [P]."""
        pairs = torch.arange(self.expert.numel(), device=self.expert.device)
        return pairs // max(self.top_k, 1)


@dataclass(frozen=True, kw_only=True)
class GateUpRows:
    """The input of ``swiglu`` and ``swiglu_quant``: rows sorted by expert."""

    rows: Tensor
    """bf16 [P, 2 * I], the gate first."""
    counts: Tensor
    """Rows of each expert, int32 [E]; they add up to P."""
    limit: float | None
    alpha: float
    beta: float


@dataclass(frozen=True, kw_only=True)
class ExpertRows:
    """The input of ``combine``."""

    rows: Tensor
    """bf16 [M, k, H]; rows that are not owned hold NaN."""
    weights: Tensor
    """fp32 [M, k]."""
    ids: Tensor
    """Global expert ids int32 [M, k]."""
    expert_map: Tensor | None
    """int32 [E]: the local expert of a global one, or -1; None where the rank owns all."""


@dataclass(frozen=True, kw_only=True)
class RoutedRows:
    """The input of ``align`` and ``permute``."""

    codes: Tensor
    """E4M3 codes [M, H], uint8."""
    scales: Tensor
    """fp32 [M, H / 128]."""
    ids: Tensor
    """Global expert ids int32 [M, k]."""
    expert_map: Tensor | None
    experts: int
    """Local experts."""


StageInputs = GroupedRows | GateUpRows | ExpertRows | RoutedRows


@dataclass(frozen=True, kw_only=True)
class StageCall:
    """One call of a middle stage."""

    case: Case
    stage: Stage
    inputs: StageInputs
    new: Allocator
    """Where outputs come from: memory filled with poison."""


@dataclass(frozen=True, kw_only=True)
class Produced:
    """What a kernel made: canonical tensors, and the fate of every row of its own outputs."""

    outputs: Mapping[str, Tensor]
    fates: Mapping[str, Tensor] = field(default_factory=dict)
    """Output name -> int8 fates, one per row (all dimensions but the last), or one
    per element where the shapes are the same; left out: all live."""
