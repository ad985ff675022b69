"""The memory a kernel may touch: the tensors handed over, and nothing else.

A tensor covers the bytes from its first to its last element, so the gaps of a strided view count
as inside.  A pointer remembers the tensor it was derived from: running off its end is caught even
where another tensor begins.  A lane that is masked off and has no ``other`` reads 0, which is what
the PTX of Triton 3.6 to 3.9 does (it zeroes the register before the predicated load).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from moe_parity.kernels import written
from moe_parity.kernels.virtual_gpu.errors import OutOfBounds, UnwrittenRead

if TYPE_CHECKING:
    from moe_parity.kernels.virtual_gpu.values import Value

Array = np.ndarray[Any, Any]


@dataclass(eq=False)
class Region:
    """The bytes of one tensor argument: ``[start, stop)``."""

    name: str
    tensor: torch.Tensor
    start: int = 0
    stop: int = 0
    views: dict[Any, tuple[int, Array]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Measure the tensor."""
        t = self.tensor
        self.start = self.stop = t.data_ptr()
        if t.numel():
            last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            self.stop += (last + 1) * t.element_size()

    def elements(self, kind: np.dtype[Any]) -> tuple[int, Array]:
        """Return (address, array) of this memory as elements of ``kind``, the address aligned."""
        if kind not in self.views:
            origin = self.start - self.start % kind.itemsize
            count = (self.stop - origin) // kind.itemsize
            raw = (ctypes.c_char * (count * kind.itemsize)).from_address(origin)
            self.views[kind] = origin, np.frombuffer(memoryview(raw), dtype=kind)
        return self.views[kind]

    def element(self, address: int) -> str:
        """Name the element that an address belongs to: ``element [3, 0] of scales (...)``."""
        size, shape = self.tensor.element_size(), self.tensor.shape
        left, index = (address - self.start) // size, [0] * len(shape)
        for n in sorted(range(len(shape)), key=self.tensor.stride, reverse=True):
            if shape[n] > 1 and self.tensor.stride(n):
                index[n] = min(left // self.tensor.stride(n), shape[n] - 1)
                left -= index[n] * self.tensor.stride(n)
        if left:
            return f"byte {address - self.start}, between the elements, of {self}"
        return f"element {index} of {self}"

    def __str__(self) -> str:
        """Describe the tensor for an error message."""
        return f"{self.name} ({str(self.tensor.dtype)[6:]} {list(self.tensor.shape)})"


@dataclass(frozen=True)
class _Access:
    """One load, store or atomic of a block of pointers."""

    what: str
    pointer: Value
    mask: Array | None
    """None if every lane is active."""
    size: int

    @classmethod
    def of(cls, what: str, pointer: Value, mask: Array | None, size: int) -> _Access:
        """Describe an access; a mask that masks nothing off is dropped."""
        if mask is not None:
            mask = np.broadcast_to(mask, pointer.data.shape)
            mask = None if mask.all() else mask
        return cls(what, pointer, mask, size)

    @property
    def addresses(self) -> Array:
        """The addresses of the active lanes."""
        return self.pointer.data if self.mask is None else self.pointer.data[self.mask]


Part = tuple[Region, Array | None, Array]
"""A tensor, the lanes that access it (None for all), and their addresses."""


class Memory:
    """The regions of one launch, with bounds checks and byte counts."""

    def __init__(self, regions: list[Region]) -> None:
        """Take the tensors; the list may still grow before the first access."""
        self.regions = regions
        self.bytes_loaded = 0
        self.bytes_stored = 0
        self.watch = written.current()

    def load(
        self, pointer: Value, mask: Array | None, other: Array | None, kind: np.dtype[Any]
    ) -> Array:
        """Return the elements at ``pointer``; lanes masked off give ``other``, or 0."""
        parts = list(self._parts(_Access.of("load", pointer, mask, kind.itemsize)))
        self._read(parts, kind)
        if len(parts) == 1 and parts[0][1] is None:
            region, _, address = parts[0]
            origin, elements = region.elements(kind)
            return elements[_index(address, origin, kind)]
        shape = pointer.data.shape
        result = np.zeros(shape, kind) if other is None else np.array(np.broadcast_to(other, shape))
        for region, lanes, address in parts:
            origin, elements = region.elements(kind)
            result[lanes] = elements[_index(address, origin, kind)]
        return result

    def store(self, pointer: Value, value: Array, mask: Array | None) -> None:
        """Write ``value`` to the unmasked lanes of ``pointer``."""
        kind = value.dtype
        value = np.broadcast_to(value, pointer.data.shape)
        access = _Access.of("store", pointer, mask, kind.itemsize)
        for region, lanes, address in list(self._parts(access)):
            origin, elements = region.elements(kind)
            elements[_index(address, origin, kind)] = value if lanes is None else value[lanes]
            self._wrote(address, kind)

    def update(
        self,
        pointer: Value,
        operand: Array,
        mask: Array | None,
        function: Callable[[Array, Array], Array],
        order: np.random.Generator | None,
    ) -> Array:
        """Replace each element by ``function(old, operand)``, lane by lane; return the old ones.

        Lanes go in ascending order, or in one drawn from ``order``: the GPU promises none.
        """
        kind, shape = operand.dtype, pointer.data.shape
        operand, old = np.broadcast_to(operand, shape), np.zeros(shape, operand.dtype)
        access = _Access.of("atomic", pointer, mask, kind.itemsize)
        parts = list(self._parts(access))
        self._read(parts, kind)
        for region, lanes, address in parts:
            origin, elements = region.elements(kind)
            where = np.flatnonzero(np.ones(shape, bool) if lanes is None else lanes)
            index = _index(address, origin, kind).ravel()
            sequence = order.permutation(index.size) if order else np.arange(index.size)
            for n in sequence:
                at = slice(index[n], index[n] + 1)
                old.flat[where[n]] = elements[at][0]
                elements[at] = function(elements[at], operand.flat[where[n] : where[n] + 1])
            self._wrote(address, kind)
        return old

    def _read(self, parts: list[Part], kind: np.dtype[Any]) -> None:
        """Count what is read; raise where nobody has written it."""
        for region, _, address in parts:
            self.bytes_loaded += address.size * kind.itemsize
            at = None if self.watch is None else self.watch.fresh(address, kind.itemsize)
            if at is not None:
                raise UnwrittenRead(
                    f"{region.element(at)} is read, and nobody has written it: mask the lane off, "
                    "or fill the tensor before the launch."
                )

    def _wrote(self, address: Array, kind: np.dtype[Any]) -> None:
        self.bytes_stored += address.size * kind.itemsize
        if self.watch is not None:
            self.watch.stored(address, kind.itemsize)

    def _parts(self, access: _Access) -> Iterator[Part]:
        """Split an access by tensor; raise where an active lane has none."""
        active, size, home = access.addresses, access.size, access.pointer.region
        if not active.size:
            return
        low, high = int(active.min()), int(active.max())
        if (active & np.uint64(size - 1)).any():
            raise self._error(access, next(int(a) for a in active.flat if a % size), home)
        if home is not None and not (home.start <= low and high + size <= home.stop):
            outside = (active < np.uint64(home.start)) | (active + np.uint64(size) > home.stop)
            raise self._error(access, int(active[outside].flat[0]), home)
        if home is not None:
            yield home, access.mask, active
        else:
            yield from self._scattered(access)

    def _scattered(self, access: _Access) -> Iterator[Part]:
        """Sort lanes whose pointers come from several tensors, or from integers."""
        address = access.pointer.data
        left = np.ones(address.shape, bool) if access.mask is None else access.mask.copy()
        for region in self.regions:
            inside = left & (address >= np.uint64(region.start))
            inside &= address + np.uint64(access.size) <= np.uint64(region.stop)
            if inside.any():
                yield region, inside, address[inside]
                left &= ~inside
        if left.any():
            raise self._error(access, int(address[left].flat[0]), None)

    def _error(self, access: _Access, address: int, home: Region | None) -> OutOfBounds:
        """Describe the first bad lane."""
        bad = access.pointer.data == np.uint64(address)
        lane = np.argwhere(bad if access.mask is None else bad & access.mask)[0].tolist()
        start = f"a {access.what} of {access.size} bytes"
        place = f"lane {lane} is {self._place(access, address, home)}"
        if address % access.size:
            return OutOfBounds(f"{start} is misaligned: {place}; the GPU faults on it.")
        return OutOfBounds(
            f"{start} is outside the tensors handed over: {place}; mask the lane off or pass a "
            "larger tensor."
        )

    def _place(self, access: _Access, address: int, home: Region | None) -> str:
        """Say where an address lies relative to its own tensor, or to the nearest one."""
        stop = address + access.size
        if home is None and self.regions:
            home = min(self.regions, key=lambda r: max(r.start - address, stop - r.stop))
        if home is None:
            return f"at address {address:#x}, and the kernel was handed no tensor"
        if address < home.start:
            return f"{home.start - address} bytes before the start of {home}"
        if address >= home.stop:
            return f"{address - home.stop} bytes past the end of {home}"
        return f"at byte {address - home.start} of {home}"


def _index(address: Array, origin: int, kind: np.dtype[Any]) -> Array:
    shifted: Array = (address - np.uint64(origin)) >> np.uint64(kind.itemsize.bit_length() - 1)
    return shifted
