"""Mistakes of any stage about where its inputs lie: other strides, another start, padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import bits_of, from_bits
from moe_parity.references.language.mistake import Mistake
from moe_parity.references.stages.mistakes.anywhere import Outputs, contiguous_reading
from moe_parity.references.stages.mistakes.strides import NAMES, SCALES, readings
from moe_parity.references.stages.routing import local_expert
from moe_parity.references.stages.sparse import wrap

Some = Callable[[Any, Tensor], Any]
"""(inputs, some units int64 [U]) -> the inputs of those units alone."""
STRIDED = ("a_scale", "w", "w_scale", "codes", "scales", "rows", "x")
"""The fields that may be read at any stride; a GEMM's own rows have more ways to be (``pitch``)."""


def misread(
    inputs: Any,
    give: Callable[[Any], Outputs],
    nouns: Mapping[str, str],
    *,
    known: Collection[str] = (),
    some: Some | None = None,
    widths: Mapping[str, int] | None = None,
) -> Iterator[Mistake]:
    """Yield what comes of inputs that are read where they do not lie.

    ``nouns`` says what each field is called, ``give`` makes the outputs of other inputs, ``known``
    are fields that the stage's own mistakes read as if they were contiguous.  ``some`` gives the
    inputs of a few units, whoever's memory those read; ``widths`` are of other tensors, by what
    they are called.
    """
    for field, noun in nouns.items():
        tensor = getattr(inputs, field)
        if tensor is None or not tensor.numel():
            continue
        for name, words, other in _readings(field, noun, tensor, flat=field not in known):
            yield Mistake(
                name=name, words=words, local=False,
                outputs=partial(_given, inputs, field, other, give),
            )  # fmt: skip
        yield from misread_offsets(inputs, give, field, noun, tensor)
    for field in (name for name in STRIDED if name in nouns):
        for words, figures, read in readings(
            field, nouns[field], getattr(inputs, field), widths or {}
        ):
            made = partial(_with, inputs, field, read)
            yield Mistake(
                name=NAMES.get(field, "row_stride"), words=words, figures=figures, local=False,
                late=True, outputs=partial(_all, made, give),
                few=None if some is None else partial(_few, made, give, some),
            )  # fmt: skip


def _with(inputs: Any, field: str, read: Callable[[], Tensor]) -> Any:
    return dataclasses.replace(inputs, **{field: read()})


def _all(made: Callable[[], Any], give: Callable[[Any], Outputs]) -> Outputs:
    return give(made())


def _few(
    made: Callable[[], Any], give: Callable[[Any], Outputs], some: Some, chosen: Tensor
) -> Outputs:
    return give(some(made(), chosen))


def _given(inputs: Any, field: str, other: Tensor, give: Callable[[Any], Outputs]) -> Outputs:
    changes: dict[str, Any] = {field: other}
    if field == "ids":
        experts = inputs.w.shape[0] if hasattr(inputs, "w") else inputs.experts
        changes["expert"] = local_expert(other, inputs.first, experts)
    return give(dataclasses.replace(inputs, **changes))


def _readings(
    field: str, noun: str, tensor: Tensor, *, flat: bool
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (name, words, what is read) of other strides, other pitches and another start."""
    name = "scale_layout_ignored" if field in SCALES else "row_stride"
    contiguous = contiguous_reading(tensor)
    if flat and contiguous is not None:
        yield name, f"{noun} read as if they were contiguous", contiguous
    if tensor.dim() > 1 and tensor.stride(-1) > 1:
        strides = (*tensor.stride()[:-1], 1)
        near = tensor.as_strided(tensor.shape, strides, tensor.storage_offset()).clone()
        yield name, f"{noun} read with 1 for their last stride", near
    dense = _without_padding(tensor)
    if dense is not None:
        yield "scale_padding_read", f"the padding of the columns taken for {noun}", dense
    if tensor.storage_offset():
        start = tensor.as_strided(tensor.shape, tensor.stride(), 0).clone()
        yield "offset_ignored", f"{noun} read from the start of their storage", start
    past = tensor.data_ptr() % 16 // tensor.element_size()
    if 0 < past <= tensor.storage_offset():
        place = tensor.storage_offset() - past
        below = tensor.as_strided(tensor.shape, tensor.stride(), place).clone()
        yield "offset_ignored", f"{noun} read from the multiple of 16 bytes below", below


def misread_offsets(
    inputs: Any,
    give: Callable[[Any], Outputs],
    field: str,
    noun: str,
    tensor: Tensor,
    rows: Sequence[int] | None = None,
) -> Iterator[Mistake]:
    """Yield what comes of rows that are read where an offset of 32 bits ends, inside the storage.

    ``rows`` are those of ``tensor`` that the field of the inputs holds, all of them by default.
    """
    rows = range(tensor.shape[0]) if rows is None else rows
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    for words, unit in (("elements", 1), ("bytes", tensor.element_size())):
        places = [wrap(row * tensor.stride(0) * unit) // unit for row in rows]
        moved = [n for n, row in enumerate(rows) if places[n] != row * tensor.stride(0)]
        steps = zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
        extent = sum((n - 1) * step for n, step in steps)
        starts = [tensor.storage_offset() + places[n] for n in moved]
        inside = all(start >= 0 and start + extent < count for start in starts)
        if not moved or not inside or (words == "bytes" and unit == 1):
            continue
        read = getattr(inputs, field).clone()
        for n, start in zip(moved, starts, strict=True):
            read[n] = tensor.as_strided(tensor.shape[1:], tensor.stride()[1:], start)
        yield Mistake(
            name="offset_wraps", words=f"{noun} read at offsets in {words} of 32 bits, which wrap,",
            local=False, outputs=partial(_given, inputs, field, read, give),
        )  # fmt: skip


def _without_padding(tensor: Tensor) -> Tensor | None:
    """Return padded columns read as if they had no padding; None where there is none."""
    if tensor.dim() != 2 or tensor.stride(0) != 1 or tensor.stride(1) <= tensor.shape[0]:
        return None
    place = tensor.storage_offset()
    return tensor.as_strided(tensor.shape, (1, tensor.shape[0]), place).clone()


def extremes(noun: str, scale: Tensor, *, nan: bool = True) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (name, words, scales) of subnormal, huge, zero and NaN scales taken for others.

    ``nan``: a NaN among them is read; nobody reads those of experts without a row.
    """
    bits = bits_of(scale)
    small = (bits & 0x7F800000) == 0
    if bool((small & (scale != 0)).any()):
        yield (
            "subnormal_scale_flushed", f"subnormal scales of the {noun} flushed to zero",
            torch.where(small, scale * 0.0, scale),
        )  # fmt: skip
        yield (
            "scale_exponent_clamped", f"the exponent bytes of the {noun}' scales at least 1",
            torch.where(small, from_bits(bits | 0x00800000), scale),
        )  # fmt: skip
        if bool((bits == 0x00400000).any()):
            lowest = torch.where(bits == 0x00400000, 2.0**-126, scale)
            yield "scale_exponent_clamped", f"2^-126 for the {noun}' scales of 2^-127", lowest
    huge = scale >= 2.0**127
    if bool(huge.any()):
        yield (
            "scale_exponent_clamped", f"the exponent bytes of the {noun}' scales at most 253",
            torch.where(huge, 2.0**126, scale),
        )  # fmt: skip
    zero = scale == 0
    if bool(zero.any()):
        yield (
            "zero_scale_lost", f"one for zero among the scales of the {noun}",
            torch.where(zero, 1.0, scale),
        )  # fmt: skip
    lost = torch.isnan(scale)
    if nan and bool(lost.any()):
        taken = (("2^127", 2.0**127), ("infinity", float("inf")), ("zero", 0.0), ("one", 1.0))
        for words, value in taken:
            yield (
                "nan_scale_lost", f"{words} for NaN among the scales of the {noun}",
                torch.where(lost, value, scale),
            )  # fmt: skip
