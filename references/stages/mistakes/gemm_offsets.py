"""Mistakes of grouped GEMMs whose weights are so large that an expert's offset needs 64 bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from moe_parity.references.language.mistake import Mistake
from moe_parity.references.stages.gemm.reference import hit
from moe_parity.references.stages.mistakes.anywhere import Outputs
from moe_parity.references.stages.mistakes.geometry import misread_offsets
from moe_parity.references.stages.sparse import LARGE

if TYPE_CHECKING:
    from moe_parity.references.stages.gemm.stage import GroupedRows


def wrapped(inputs: GroupedRows, give: Callable[[GroupedRows], Outputs]) -> Iterator[Mistake]:
    """Yield the weights of experts that are read where an offset of 32 bits ends."""
    few, experts = _compact(inputs), hit(inputs.expert)
    yield from misread_offsets(few, give, "w", "the weights' codes", inputs.w, experts)


def small(inputs: GroupedRows) -> GroupedRows:
    """Return operands of which large weights are those of the experts that are hit.

    A mistake may copy them then; which experts are neighbours is lost.
    """
    return inputs if inputs.w.numel() < LARGE else _compact(inputs)


def _compact(inputs: GroupedRows) -> GroupedRows:
    device = inputs.expert.device
    experts = torch.tensor(hit(inputs.expert), dtype=torch.int64, device=device)
    place = torch.searchsorted(experts, inputs.expert)
    return dataclasses.replace(
        inputs, w=inputs.w[experts], w_scale=inputs.w_scale[experts],
        expert=torch.where(inputs.expert >= 0, place, -1),
        bias=None if inputs.bias is None else inputs.bias[experts],
    )  # fmt: skip
