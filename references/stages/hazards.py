"""What surrounds an input: views with gaps, rows that are not contiguous."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_parity.references.language.case import Hazard

_GAP = 16
"""Bytes between the rows of a strided input."""

_LARGEST_CODE = 0x7E


def embed(x: Tensor, hazard: Hazard) -> Tensor:
    """Return ``x`` [..., columns] as the hazard wants it: itself, with gaps, or transposed.

    The gaps hold the largest number: an amax may skip a NaN (``quant.nan_amax``), never that.
    """
    if hazard is Hazard.TRANSPOSED:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if hazard is Hazard.NONE:
        return x
    gap = _GAP // x.element_size() if x.element_size() < 4 else 2 * _GAP // x.element_size()
    largest = torch.finfo(x.dtype).max if x.dtype.is_floating_point else _LARGEST_CODE
    shape = (*x.shape[:-1], x.shape[-1] + gap)
    wide = torch.full(shape, largest, dtype=x.dtype, device=x.device)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]
