"""Mistakes of any stage: rows and columns that are left out, moved, or rounded in another way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import EllipsisType

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import (
    BLOCK,
    bits_of,
    f32_to_bf16,
    f32_to_f16,
    from_bits,
    to_f32,
)
from moe_parity.references.language.mistake import Mistake

Outputs = Mapping[str, Tensor]
Make = Callable[[], Outputs]
Change = Callable[[Tensor], Tensor]
Index = Tensor | slice | tuple[Tensor | slice | EllipsisType, ...]


def changed(make: Make, change: Change, *names: str) -> Make:
    """Return outputs of which those named, or all, are changed."""
    return lambda: {n: change(t) if not names or n in names else t for n, t in make().items()}


def without(tensor: Tensor, index: Index) -> Tensor:
    """Return a copy with zeros at an index."""
    made = tensor.clone()
    made[index] = 0
    return made


def lost(make: Make) -> Iterator[Mistake]:
    """Yield the first and last rows and columns left at zero, and rows one off."""
    for side, cut in (("last", slice(-1, None)), ("first", slice(0, 1))):
        yield Mistake(
            name=f"{side}_row_lost", words=f"the {side} row left at zero", local=False,
            outputs=changed(make, partial(without, index=cut)),
        )  # fmt: skip
        yield Mistake(
            name=f"{side}_column_lost", words=f"the {side} column left at zero",
            outputs=changed(make, partial(_without_columns, cut=cut)),
        )  # fmt: skip
    yield Mistake(
        name="last_block_lost", words="the last block of 128 columns left at zero",
        outputs=changed(make, partial(_without_last, count=BLOCK)),
    )  # fmt: skip
    for count in (16, 32, 64):
        yield Mistake(
            name="last_columns_lost", words=f"the last {count} columns left at zero",
            outputs=changed(make, partial(_without_last, count=count)),
        )  # fmt: skip
    for step, side in ((1, "before"), (-1, "after")):
        yield Mistake(
            name="row_of_neighbour", words=f"the row {side} in a row's place", local=False,
            outputs=changed(make, partial(torch.roll, shifts=step, dims=0)),
        )  # fmt: skip


def _without_columns(tensor: Tensor, cut: slice) -> Tensor:
    return without(tensor, (..., cut)) if tensor.dim() > 1 else tensor


def _without_last(tensor: Tensor, count: int) -> Tensor:
    wide = tensor.shape[-1] > count
    return _without_columns(tensor, slice(-count, None) if wide else slice(0, 0))


def rounded(exact: Callable[[], Tensor], give: Callable[[Tensor], Outputs]) -> Iterator[Mistake]:
    """Yield other ways of rounding fp32 results to BF16."""

    def by(way: Change) -> Make:
        return lambda: give(way(exact()))

    ways: tuple[tuple[str, str, Change], ...] = (
        ("truncated", "results cut to BF16, not rounded,", truncate_bf16),
        ("ties_away", "ties rounded away from zero, not to even,", ties_away_bf16),
        ("through_fp16", "results rounded to FP16 before BF16", through_f16),
    )
    for name, words, way in ways:
        yield Mistake(name=name, words=words, outputs=by(way))


def truncate_bf16(x: Tensor) -> Tensor:
    """Return BF16 of fp32 rounded toward zero."""
    return f32_to_bf16(from_bits(bits_of(x) & -0x10000))


def ties_away_bf16(x: Tensor) -> Tensor:
    """Return BF16 of fp32 rounded to nearest, ties away from zero."""
    return f32_to_bf16(from_bits((bits_of(x) + 0x8000) & -0x10000))


def through_f16(x: Tensor) -> Tensor:
    """Return BF16 of fp32 by way of FP16."""
    return f32_to_bf16(to_f32(f32_to_f16(x)))


def round_f16(x: Tensor) -> Tensor:
    """Return fp32 rounded to FP16."""
    return to_f32(f32_to_f16(x))


def shifts(tensor: Tensor, dim: int) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield (next or previous, a tensor whose entries are those neighbours, within their row).

    A kernel that is one off meets the end of a row in one of three ways: it goes round, it stays,
    or it reads what follows in memory, which is another row's.
    """
    size = tensor.shape[dim]
    if size < 2:
        return
    index = torch.arange(size, device=tensor.device)
    inner = tensor.stride(dim) if tensor.is_contiguous() else math.prod(tensor.shape[dim + 1 :])
    for step, side in ((1, "next"), (-1, "previous")):
        yield side, tensor.roll(-step, dim), dim > 0
        yield side, tensor.index_select(dim, (index + step).clamp(0, size - 1)), dim > 0
        yield side, tensor.flatten().roll(-step * inner).view(tensor.shape), False


def reread(tensor: Tensor) -> Tensor:
    """Return the last two dimensions of a tensor as memory of the transposed layout holds them."""
    return tensor.transpose(-1, -2).reshape(tensor.shape)


def stored_as(tensor: Tensor) -> Tensor:
    """Return the other way round: column-major memory read as if it were row-major."""
    rows, columns = tensor.shape[-2:]
    flat = tensor.reshape(*tensor.shape[:-2], columns, rows)
    return flat.transpose(-1, -2).contiguous()


def contiguous_reading(x: Tensor) -> Tensor | None:
    """Return a tensor read as if it were contiguous; None where it is, or its memory ends before.

    Rows are read with their length as the stride then.
    """
    if x.is_contiguous() or x.dim() < 2:
        return None
    count = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    if count < x.numel():
        return None
    strides = [math.prod(x.shape[n + 1 :]) for n in range(x.dim())]
    return x.as_strided(x.shape, strides, x.storage_offset()).clone()
