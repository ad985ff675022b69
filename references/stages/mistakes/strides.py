"""Mistakes of any stage about strides: rows, columns and experts read at another one than theirs.

What is read so lies inside the storage of its tensor, where no check of addresses sees it; a row
that would lie past its end is zeros, as it is to a mask or to a descriptor of as many rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_parity.references.stages.sparse import LARGE

BOX = 16
"""Elements that a row is too short or too long by: what descriptors and wide loads count in."""
GROUP = 128
FOURS = 4
"""What packed and TMA-aligned scales round a dimension up to."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A dimension of a tensor whose stride a kernel may have wrong."""

    noun: str
    """What a step along it goes to: row, column, expert, token."""
    dims: tuple[int, ...]
    """The dimension; where two are one in memory (the rows of all experts), both, inner last."""
    near: tuple[int, ...] = (BOX, GROUP)
    """How many elements a stride may be too small or too large by."""
    rounded: bool = False
    """Whether it may be rounded up to a multiple of 4."""
    zero: bool = True
    """Whether a stride of 0 is no mistake of another name, such as one row for all."""


def other_strides(axis: Axis, stride: int, widths: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield (words, stride) of what a kernel may take for a stride, each once.

    ``widths`` are those of other tensors, by what they are called.
    """
    noun, seen, article = axis.noun, {stride}, "an" if axis.noun == "expert" else "a"
    tried = [(f"half their {noun} stride", stride // 2), (f"twice their {noun} stride", 2 * stride)]
    if axis.zero:
        tried.append((f"{article} {noun} stride of 0", 0))
    tried += [(f"{article} {noun} stride of {name}", width) for name, width in widths.items()]
    if axis.rounded:
        up = -(-stride // FOURS) * FOURS
        tried.append((f"{article} {noun} stride that is rounded up to a multiple of {FOURS}", up))
    for near in axis.near:
        tried.append((f"{article} {noun} stride that is {near} too small", stride - near))
        tried.append((f"{article} {noun} stride that is {near} too large", stride + near))
    for words, other in tried:
        if other >= 0 and other not in seen:
            seen.add(other)
            yield words, other


def reading(
    tensor: Tensor, strides: tuple[int, ...], *, zeros: bool
) -> Callable[[], Tensor] | None:
    """Return what reads a tensor at other strides; None where that leaves its storage.

    ``zeros``: entries of the first dimension that would lie past the end are zeros; there have to
    be two that do not.
    """
    start, (first, *shape) = tensor.storage_offset(), tensor.shape
    count = tensor.untyped_storage().nbytes() // tensor.element_size() - start
    last = sum((n - 1) * step for n, step in zip(shape, strides[1:], strict=True))
    if last >= count:
        return None
    fit = first if not strides[0] else min(first, (count - 1 - last) // strides[0] + 1)
    if fit < first and (not zeros or fit < 2 or tensor.numel() >= LARGE):
        return None

    def read() -> Tensor:
        made = tensor.as_strided((fit, *shape), strides, start)
        return made if fit == first else torch.cat([made, made.new_zeros(first - fit, *shape)])

    return read


SCALES = ("a_scale", "w_scale", "scales")
"""The fields that hold scales."""
NAMES = {**dict.fromkeys(SCALES, "scale_stride"), "w": "weight_stride"}
"""Field -> the name of its mistakes; those of any other are ``row_stride``."""


def axes_of(field: str, tensor: Tensor) -> tuple[Axis, ...]:
    """Return the dimensions of a field of a stage's inputs whose stride may be wrong."""
    down, across = tensor.dim() - 2, tensor.dim() - 1
    if field in SCALES:
        by_row = tensor.stride(-1) == 1
        own = Axis(
            noun="row" if by_row else "column", dims=(down if by_row else across,), near=(1,),
            rounded=True, zero=by_row and field == "a_scale",
        )  # fmt: skip
        expert = Axis(noun="expert", dims=(0,), near=(), zero=False)
        return (own,) if tensor.dim() == 2 else (own, expert)
    if tensor.stride(-1) != 1:
        return ()
    if tensor.dim() == 2:
        return (Axis(noun="row", dims=(0,), zero=field != "codes"),)
    if field == "rows":
        return (Axis(noun="token", dims=(0,)), Axis(noun="pair", dims=(1,), zero=False))
    # a descriptor has the rows of all experts as one matrix
    return (
        Axis(noun="row", dims=(0, 1)), Axis(noun="row", dims=(1,)),
        Axis(noun="expert", dims=(0,), near=()),
    )  # fmt: skip


def readings(
    field: str, noun: str, tensor: Tensor, widths: Mapping[str, int]
) -> Iterator[tuple[str, str, Callable[[], Tensor]]]:
    """Yield (words, figures, what reads) of a field of a stage's inputs at other strides."""
    scales = field in SCALES
    for axis in axes_of(field, tensor):
        inner = axis.dims[-1]
        if any(tensor.shape[dim] < 2 for dim in axis.dims):
            continue
        right, dense = tensor.stride(inner), math.prod(tensor.shape[inner + 1 :])
        for words, stride in other_strides(axis, right, {} if scales else widths):
            strides = list(tensor.stride())
            strides[inner] = stride
            for dim in reversed(axis.dims[:-1]):
                strides[dim] = stride * tensor.shape[inner]
            read = reading(tensor, tuple(strides), zeros=axis.dims[0] == 0 and not scales)
            # where rows are apart, their length for their stride has words of its own
            if read is not None and (stride != dense or tensor.is_contiguous()):
                whose = ", as one matrix of all experts," if len(axis.dims) > 1 else ""
                yield f"{noun}{whose} read at {words}", f"{stride} instead of {right}", read
