"""Arrays as large as the memory that they describe, of which only what is touched costs memory."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_LARGE = 1 << 20
"""Bytes from which an array is mapped: numpy asks for huge pages, a touch then costs 2 MiB."""

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Do not count what is never touched; Linux's value, before Python 3.13 names it."""

_SMALL_PAGES = getattr(mmap, "MADV_NOHUGEPAGE", None)
"""Where huge pages are given out unasked, a touch would cost 2 MiB here as well."""


def zeros(count: int, kind: np.dtype[Any]) -> Array:
    """Return an array of zeros, one page of memory for each page of it that is written to."""
    size = count * kind.itemsize
    if size < _LARGE:
        return np.zeros(count, kind)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    memory = mmap.mmap(-1, size, flags=flags)
    if _SMALL_PAGES is not None:
        memory.madvise(_SMALL_PAGES)
    return np.frombuffer(memory, dtype=kind)
