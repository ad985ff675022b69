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


def zeros(count: int, kind: np.dtype[Any]) -> Array:
    """Return an array of zeros, one page of memory for each page of it that is written to."""
    size = count * kind.itemsize
    if size < _LARGE:
        return np.zeros(count, kind)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=kind)
