"""How inputs lie in memory: layouts of scales, gaps between rows, pointers that are not aligned."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import ScaleLayout
from moe_parity.references.language.case import Hazard
from moe_parity.references.stages.sparse import apart

_GAP = 16
"""Bytes between the rows of a strided input."""

_LARGEST_CODE = 0x7E

_LINE = 64
"""Bytes that an offset is counted from: what the widest loads are aligned to."""

_POISON = 0x7F
"""The byte around an offset view: a NaN code, the largest exponent of BF16 and fp32, a large id."""

InputsT = TypeVar("InputsT")


def embed(x: Tensor, hazard: Hazard) -> Tensor:
    """Return ``x`` [..., columns], the first input, as the hazard wants it alone.

    That is itself, with gaps (``strided``), transposed, or with rows ``far`` apart.  The gaps hold
    the largest number: an amax may skip a NaN (``quant.nan_amax``), never that.
    """
    if hazard is Hazard.FAR:
        return apart(x)
    if hazard is Hazard.TRANSPOSED:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    return _with_gaps(x) if hazard is Hazard.STRIDED else x


def surround(inputs: InputsT, hazard: Hazard) -> InputsT:
    """Return a dataclass of inputs as the hazard wants all of its tensors, nested ones too."""
    made: InputsT = inputs
    if hazard is Hazard.GAPS:
        made = _each(inputs, lambda t: _with_gaps(t) if t.dim() > 1 else t)
    elif hazard.offset:
        made = _each(inputs, lambda t: _moved(t, max(hazard.offset, t.element_size())))
    return made


def lay(scales: Tensor, layout: ScaleLayout) -> Tensor:
    """Return scales [..., rows, columns] in a layout; its padding holds NaN and the largest number.

    A kernel that takes padding for scales shows, also where it drops NaN.
    """
    if layout is ScaleLayout.ROW:
        return scales
    rows, columns = scales.shape[-2:]
    tall = layout.strides(rows, columns)[1]
    shape = (*scales.shape[:-2], columns, tall)
    memory = torch.full(shape, float("nan"), dtype=scales.dtype, device=scales.device)
    memory[..., 1::2, :] = torch.finfo(scales.dtype).max
    memory[..., :rows] = scales.transpose(-1, -2)
    return memory[..., :rows].transpose(-1, -2)


def _each(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a dataclass of which every tensor is changed."""
    made: dict[str, Any] = {}
    for field in dataclasses.fields(inputs):
        value = getattr(inputs, field.name)
        if isinstance(value, Tensor):
            made[field.name] = change(value)
        elif dataclasses.is_dataclass(value):
            made[field.name] = _each(value, change)
    return dataclasses.replace(inputs, **made)


def _with_gaps(x: Tensor) -> Tensor:
    """Return a tensor with gaps behind its rows, or behind its columns if those are contiguous."""
    if x.stride(-1) != 1 and x.stride(-2) == 1:
        return _with_gaps(x.transpose(-1, -2)).transpose(-1, -2)
    gap = _GAP // x.element_size() if x.element_size() < 4 else 2 * _GAP // x.element_size()
    largest = torch.finfo(x.dtype).max if x.dtype.is_floating_point else _LARGEST_CODE
    shape = (*x.shape[:-1], x.shape[-1] + gap)
    wide = torch.full(shape, largest, dtype=x.dtype, device=x.device)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def _moved(x: Tensor, count: int) -> Tensor:
    """Return a tensor that starts ``count`` bytes past a multiple of 64, poison around it."""
    size = x.element_size()
    memory = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
    held = memory[x.storage_offset() * size :]
    # whole elements of any size, and poison behind the last one
    total = 2 * _LINE + -(-(count + held.numel()) // _LINE) * _LINE
    wide = torch.full((total,), _POISON, dtype=torch.uint8, device=x.device)
    start = -wide.data_ptr() % _LINE + _LINE + count
    wide[start : start + held.numel()] = held
    return wide.view(x.dtype).as_strided(x.shape, x.stride(), start // size)
