"""A call: what the harness hands to a kernel, and where its outputs are to be written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moe_parity.references.language import Case, ScaleFormat, ScaleLayout, Stage


class Allocator(Protocol):
    """Makes output tensors; the harness's one fills them and their surroundings with poison."""

    def __call__(
        self, name: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """Return a tensor of that shape, strides in elements, and dtype."""
        ...


@dataclass(frozen=True, kw_only=True)
class Call:
    """The input ``x`` [M, K] of a quantization stage and the outputs' allocator.

    For ``weight_quant`` x is one expert's weight [N, K].
    """

    case: Case
    stage: Stage
    x: Tensor
    new: Allocator

    @property
    def scale_shape(self) -> tuple[int, int]:
        """Rows and columns of the scales before packing."""
        rows, columns = self.x.shape
        if self.stage is Stage.WEIGHT_QUANT:
            return -(-rows // 128), -(-columns // 128)
        return rows, columns // self.case.group

    def new_codes(self) -> Tensor:
        """Return the uint8 output [M, K], row-major, for E4M3 codes."""
        rows, columns = self.x.shape
        return self.new("codes", (rows, columns), (columns, 1), torch.uint8)

    def new_scales(self) -> Tensor:
        """Return the scale output in the case's format and layout.

        fp32 [M, groups], or int32 [M, ceil(groups / 4)] for packed exponents, which always have
        the TMA layout.
        """
        rows, groups = self.scale_shape
        packed = self.case.scale is ScaleFormat.UE8M0_PACKED
        columns = -(-groups // 4) if packed else groups
        dtype = torch.int32 if packed else torch.float32
        layout = ScaleLayout.TMA if packed else self.case.layout
        return self.new("scales", (rows, columns), scale_strides(rows, columns, layout), dtype)


def scale_strides(rows: int, columns: int, layout: ScaleLayout) -> tuple[int, int]:
    """Return the strides, in elements, of [rows, columns] scales in a layout."""
    if layout is ScaleLayout.ROW:
        return columns, 1
    return 1, rows if layout is ScaleLayout.COLUMN else -(-rows // 4) * 4


def plain_allocator(device: str | torch.device) -> Allocator:
    """Return an allocator of uninitialised tensors, for users who call a kernel themselves."""

    def new(
        name: str,  # noqa: ARG001
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return new
