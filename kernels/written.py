"""Which memory nobody has written yet: what a kernel allocates, until something is stored there.

A value read from such memory is whatever was there before, so that a test that happens to find
zeros passes.  Inside ``watching`` the harness says what is fresh (``unwritten``) and what was
written from outside (``mark``); launches on the virtual GPU mark what they store, and a load of a
byte that is still fresh raises ``UnwrittenRead``.  Outside of it all of this costs nothing.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from moe_parity.kernels.shadow import zeros

Array = np.ndarray[Any, Any]

_START = attrgetter("start")

_weak_reference: Any = StorageWeakRef
"""Torch has no types for it."""

_ALIGNED = 16
"""Flags begin at an address that is aligned for every element."""


@dataclass(eq=False)
class _Block:
    """The memory of one storage: bytes ``[start, stop)``."""

    start: int
    stop: int
    written: Array
    """For each byte from ``origin`` on, 1 where it is written, else 0."""
    storage: Any
    """A weak reference: memory that was freed, and handed out again, is another block or none."""
    fill: int | None

    @property
    def origin(self) -> int:
        return self.start - self.start % _ALIGNED

    def elements(self, addresses: Array, size: int) -> tuple[Array, Array]:
        """Return the flags as elements of ``size`` bytes, and where in them the addresses lie."""
        at = (addresses.ravel() - np.uint64(self.origin)).view(np.int64)
        if not self.start <= int(addresses.min()) <= int(addresses.max()) < self.stop:
            at = at[(at >= self.start - self.origin) & (at < self.stop - self.origin)]
        return self.written.view(f"u{size}"), at >> size.bit_length() - 1

    def unlike_fill(self, at: Array, size: int) -> Array:
        """Return which of some elements hold another byte than that of the fill."""
        start, stop = self.origin // size * size, self.stop // size * size
        raw = (ctypes.c_char * (stop - start)).from_address(start)
        fill = int.from_bytes(bytes([self.fill or 0]) * size, "little")
        unlike: Array = np.frombuffer(memoryview(raw), dtype=f"u{size}")[at] != fill
        return unlike


@dataclass(eq=False)
class Watch:
    """The blocks of one ``watching``, by their start; no two overlap."""

    blocks: list[_Block] = field(default_factory=list)

    def add(self, tensor: Tensor, fill: int | None) -> None:
        """Take the storage of a tensor as a new block, in place of what lay there before."""
        storage = tensor.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
        if not size:
            return
        for old in self.touched(start, start + size):
            self.blocks.remove(old)
        flags = zeros(size + start % _ALIGNED + -(start + size) % _ALIGNED, np.dtype(np.uint8))
        block = _Block(start, start + size, flags, _weak_reference(storage), fill)
        insort(self.blocks, block, key=_START)

    def touched(self, start: int, stop: int) -> list[_Block]:
        """Return the blocks that share a byte with ``[start, stop)``."""
        first = max(bisect_right(self.blocks, start, key=_START) - 1, 0)
        near = self.blocks[first : bisect_left(self.blocks, stop, key=_START)]
        for block in near:
            if block.storage.expired():
                self.blocks.remove(block)
        return [b for b in near if b.stop > start and not b.storage.expired()]

    def mark(self, tensor: Tensor) -> None:
        """Take the bytes of a tensor's elements as written; gaps between them stay as they are."""
        if not tensor.numel():
            return
        size, start = tensor.element_size(), tensor.data_ptr()
        steps = [n * size for n in tensor.stride()]
        stop = start + size + sum((n - 1) * s for n, s in zip(tensor.shape, steps, strict=True))
        for block in self.touched(start, stop):
            if block.start <= start and stop <= block.stop:
                flags = block.written[start - block.origin :]
                shape, strides = (*tensor.shape, size), (*steps, 1)
                np.lib.stride_tricks.as_strided(flags, shape, strides)[...] = 1

    def stored(self, addresses: Array, size: int) -> list[tuple[Array, Array, Array]]:
        """Take ``size`` bytes at each of the addresses as written.

        Returns the flags, the entries that were set and what they held, for each block.
        """
        before = []
        for block in self.touched(int(addresses.min()), int(addresses.max()) + size):
            flags, at = block.elements(addresses, size)
            before.append((flags, at, flags[at]))
            flags[at] = _all(size)
        return before

    def fresh(self, addresses: Array, size: int) -> int | None:
        """Return the first of the addresses with a byte that nobody has written, None for none."""
        for block in self.touched(int(addresses.min()), int(addresses.max()) + size):
            flags, at = block.elements(addresses, size)
            left = flags[at] != _all(size)
            if left.any() and block.fill is not None:
                left &= ~block.unlike_fill(at, size)
            if left.any():
                return block.origin + int(at[left][0]) * size
        return None


def _all(size: int) -> int:
    """Return the flags of an element whose bytes are all written."""
    return int.from_bytes(b"\1" * size, "little")


_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


def current() -> Watch | None:
    """Return the innermost open watch, None outside of any."""
    return _watch.get()


@contextmanager
def watching() -> Iterator[None]:
    """Raise UnwrittenRead where a launch reads what was declared ``unwritten`` in this context.

    Contexts may be nested; only the innermost one counts.
    """
    token = _watch.set(Watch())
    try:
        yield
    finally:
        _watch.reset(token)


def unwritten(tensor: Tensor, fill: int | None = None) -> None:
    """Declare that nobody has written to the storage of a CPU tensor, all of its bytes.

    With ``fill`` (0 to 255) every byte holds that value: an element that holds another one has been
    written by something that nobody has seen, and is no fault.  Outside of ``watching``, and for
    tensors of other devices, this does nothing.
    """
    watch = _watch.get()
    if watch is not None and tensor.device.type == "cpu":
        watch.add(tensor, fill)


def mark(tensor: Tensor) -> None:
    """Declare that the elements of a CPU tensor have been written, those of a strided view exactly.

    Outside of ``watching``, and for tensors of other devices or nobody's, this does nothing.
    """
    watch = _watch.get()
    if watch is not None and tensor.device.type == "cpu":
        watch.mark(tensor)
