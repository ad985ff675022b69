"""Memory so large that offsets into it pass 2^31 elements, of which only what is used costs any."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from moe_parity.references.errors import ParityError

PAST = 1 << 31
"""The first offset, in elements, that a signed integer of 32 bits does not hold."""

LARGE = 1 << 28
"""Elements from which a weight is mapped, not filled."""

_STEP = 4096
"""Elements that a distance between rows is a multiple of: whole pages, and aligned for TMA."""

_POISON = 0x7F
"""What lies where a wrapped offset ends: a NaN code, the largest exponent of BF16 and fp32."""

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Do not count what is never touched; Linux's value, before Python 3.13 names it."""

_SMALL_PAGES = getattr(mmap, "MADV_NOHUGEPAGE", None)
"""Where huge pages are given out unasked, a touched row would cost 2 MiB of each."""


def zeros(count: int, dtype: torch.dtype, device: str) -> Tensor:
    """Return zeros [count]; on a CPU only the pages that are written to cost memory.

    Raises ParityError where so much cannot be mapped.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(count, dtype=dtype, device=device)
    size = count * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    try:
        memory = mmap.mmap(-1, size, flags=flags)
    except OSError as error:
        raise ParityError(
            f"inputs past 2^31 elements need {size >> 30} GiB of addresses, of which few are used, "
            f"and got none: {error}; raise `ulimit -v`, or leave the word far out."
        ) from None
    if _SMALL_PAGES is not None:
        memory.madvise(_SMALL_PAGES)
    return torch.frombuffer(memory, dtype=dtype)


def room(
    shape: tuple[int, ...], fill: int, device: str, *, dtype: torch.dtype, far: bool
) -> Tensor:
    """Return a tensor of a fill whose blocks along its first dimension are contiguous.

    ``far`` lays them so far apart that the offset of the last one is past 2^31 elements.  From
    ``LARGE`` elements on nothing is filled: memory that nobody writes to is zeros, and free.
    """
    count = math.prod(shape)
    if far and count:
        made = _far(shape, dtype, device)
    elif count >= LARGE:
        made = zeros(PAST + count, dtype, device)[PAST:].view(shape)
    else:
        return torch.full(shape, fill, dtype=dtype, device=device)
    return made.fill_(fill) if count < LARGE else made


def apart(x: Tensor) -> Tensor:
    """Return a tensor whose rows lie so far apart that the last one's offset is past 2^31.

    A single row starts that far behind the start of its storage.  The gaps hold zeros, but where an
    offset of 32 bits ends that has wrapped: there is the largest number, or a NaN code.
    """
    return _far(tuple(x.shape), x.dtype, str(x.device)).copy_(x) if x.numel() else x


def _far(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    rows, inner = shape[0], math.prod(shape[1:])
    step = max(inner, -(-PAST // max(rows - 1, 1)))
    step = -(-step // _STEP) * _STEP
    # as much lies before the first row, so that a wrapped offset ends inside
    memory = zeros(PAST + (rows - 1) * step + inner, dtype, device)
    strides = [step, *(math.prod(shape[n + 1 :]) for n in range(1, len(shape)))]
    made = memory.as_strided(shape, strides, PAST)
    for row in range(-(-PAST // step), rows):
        wrapped = PAST + wrap(row * step)
        if 0 <= wrapped < PAST - inner:
            memory[wrapped : wrapped + inner].view(torch.uint8).fill_(_POISON)
    return made


def wrap(offset: int) -> int:
    """Return an offset as a signed integer of 32 bits holds it."""
    return (offset + PAST) % (2 * PAST) - PAST


def twin(x: Tensor) -> Tensor:
    """Return a copy in memory of its own, with the same strides and the same start.

    What lies between the rows is zeros.
    """
    count = x.untyped_storage().nbytes() // x.element_size()
    memory = zeros(count, x.dtype, str(x.device))
    return pour(memory.as_strided(x.shape, x.stride(), x.storage_offset()), x)


def pour(into: Tensor, x: Tensor) -> Tensor:
    """Copy a tensor over another one, which is returned; zeros over zeros are not written."""
    for to, block in zip(into, x, strict=True):
        if bool(block.count_nonzero()) or bool(to.count_nonzero()):
            to.copy_(block)
    return into
