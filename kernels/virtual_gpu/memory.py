"""The memory a kernel may touch: the tensors handed over, and nothing else.

A tensor covers the bytes from its first to its last element, so the gaps of a strided view count
as inside.  A pointer remembers the tensor it was derived from: running off its end is caught even
where another tensor begins.  A lane that is masked off and has no ``other`` reads 0, which is what
the PTX of Triton 3.6 to 3.9 does (it zeroes the register before the predicated load).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_parity.kernels import written
from moe_parity.kernels.virtual_gpu import abreast
from moe_parity.kernels.virtual_gpu.crossings import Crossings
from moe_parity.kernels.virtual_gpu.errors import OutOfBounds, UnwrittenRead
from moe_parity.kernels.virtual_gpu.order import Order
from moe_parity.kernels.virtual_gpu.races import Races
from moe_parity.kernels.virtual_gpu.region import Region

if TYPE_CHECKING:
    from moe_parity.kernels.virtual_gpu.values import Value

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _Access:
    """One load, store or atomic of a block of pointers."""

    what: str
    pointer: Value
    mask: Array | None
    """None if every lane is active."""
    size: int

    @classmethod
    def of(
        cls, what: str, pointer: Value, mask: Array | None, size: int, *others: Array | None
    ) -> _Access:
        """Describe an access; a mask that masks nothing off is dropped.

        Where the mask or another operand differs from program to program, the pointers do too.
        """
        programs = max(len(x) for x in (pointer.data, mask, *others) if x is not None)
        if programs > len(pointer.data):
            data = np.broadcast_to(pointer.data, (programs, *pointer.data.shape[1:]))
            pointer = replace(pointer, data=data)
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

    def __init__(self, kernel: str, regions: list[Region]) -> None:
        """Take the tensors; the list may still grow before the first access."""
        self.regions = regions
        self.bytes_loaded = 0
        self.bytes_stored = 0
        self.watch = written.current()
        self.exact = Races(kernel, regions)
        self.races: Races | Crossings = self.exact
        self.programs = 1
        """That run as one (``abreast``)."""
        self.widest = 0
        """Elements of the largest block of a program."""
        self.undo: list[tuple[Array, Any, Array]] | None = None
        """Memory, entries and what they held, for each store since programs run as one."""

        self._noted = 0
        """Bytes of ``undo`` since the last look at it."""

    def fits(self, elements: int) -> None:
        """Part programs that run as one where their blocks together are too large."""
        self.widest = max(self.widest, elements)
        at_once = max(abreast.ELEMENTS // max(elements, 1), 1)
        if self.programs > 4 * at_once:
            raise abreast.Parted(np.arange(self.programs) // at_once)

    def load(
        self, pointer: Value, mask: Array | None, other: Array | None, kind: np.dtype[Any]
    ) -> Array:
        """Return the elements at ``pointer``; lanes masked off give ``other``, or 0."""
        access = _Access.of("load", pointer, mask, kind.itemsize, other)
        parts = list(self._parts(access))
        self._read(access, parts, kind)
        for region, lanes, address in parts:
            self.races.load(region, address, kind.itemsize, lanes)
        if len(parts) == 1 and parts[0][1] is None:
            region, _, address = parts[0]
            origin, elements = region.elements(kind)
            return elements[_index(address, origin, kind)]
        shape = access.pointer.data.shape
        result = np.zeros(shape, kind) if other is None else np.array(np.broadcast_to(other, shape))
        for region, lanes, address in parts:
            origin, elements = region.elements(kind)
            result[lanes] = elements[_index(address, origin, kind)]
        return result

    def store(self, pointer: Value, value: Array, mask: Array | None) -> None:
        """Write ``value`` to the unmasked lanes of ``pointer``."""
        kind = value.dtype
        access = _Access.of("store", pointer, mask, kind.itemsize, value)
        value = np.broadcast_to(value, access.pointer.data.shape)
        for region, lanes, address in list(self._parts(access)):
            origin, elements = region.elements(kind)
            index = _index(address, origin, kind)
            given = value if lanes is None else value[lanes]
            changes = partial(_differ, elements, index, given)
            self.races.store(region, address, kind.itemsize, lanes, changes)
            if self.undo is not None:
                self.undo.append((elements, index, elements[index]))
                self._noted += index.size * (index.itemsize + kind.itemsize)
            elements[index] = given
            lost = changes()  # a lane whose value another lane of this store has replaced
            if lost.any():
                self.races.lanes(region, int(address[lost][0]))
            self._wrote(access, address, kind)

    def update(
        self,
        pointer: Value,
        operand: Array,
        mask: Array | None,
        function: Callable[[Array, Array], Array],
        order: Order,
        promise: str = "acq_rel",
    ) -> Array:
        """Replace each element by ``function(old, operand)``, lane by lane; return the old ones.

        Lanes go in ``order``: the GPU promises none.
        ``promise`` is the order of memory: ``relaxed``, ``acquire``, ``release`` or ``acq_rel``.
        """
        if self.undo is not None:
            raise abreast.Alone("an atomic, which puts programs in an order")
        kind, shape = operand.dtype, pointer.data.shape
        operand, old = np.broadcast_to(operand, shape), np.zeros(shape, operand.dtype)
        access = _Access.of("atomic", pointer, mask, kind.itemsize)
        parts = list(self._parts(access))
        self._read(access, parts, kind)
        for region, lanes, address in parts:
            self.races.atomic(region, address, kind.itemsize, promise)
            origin, elements = region.elements(kind)
            where = np.flatnonzero(np.ones(shape, bool) if lanes is None else lanes)
            index = _index(address, origin, kind).ravel()
            for n in order(index.size):
                at = slice(index[n], index[n] + 1)
                old.flat[where[n]] = elements[at][0]
                elements[at] = function(elements[at], operand.flat[where[n] : where[n] + 1])
            self._wrote(access, address, kind)
        return old

    def back(self, stores: int, loaded: int, stored: int) -> None:
        """Undo all stores but the first ones, and set the counts of bytes."""
        undo = self.undo or []
        while len(undo) > stores:
            memory, at, before = undo.pop()
            memory[at] = before
        self.bytes_loaded, self.bytes_stored = loaded, stored

    def settle(self) -> None:
        """Replace a long list of stores by copies of the tensors as they were before the launch."""
        if self._noted <= abreast.NOTED:
            return
        self._noted, undo = 0, self.undo or []
        arrays = {(a.ctypes.data, a.nbytes): a for a, _, _ in undo}
        whole = sum(a.nbytes for a in arrays.values())
        noted = sum(held.nbytes + at.nbytes for _, at, held in undo if not isinstance(at, slice))
        if noted > 2 * whole:
            now = [a.copy() for a in arrays.values()]
            counts = self.bytes_loaded, self.bytes_stored
            self.back(0, *counts)
            undo += [(a, slice(None), a.copy()) for a in arrays.values()]
            for array, copy in zip(arrays.values(), now, strict=True):
                array[:] = copy

    def _times(self, access: _Access) -> int:
        """Return the programs that make an access as it stands."""
        return self.programs if len(access.pointer.data) == 1 else 1

    def _read(self, access: _Access, parts: list[Part], kind: np.dtype[Any]) -> None:
        """Count what is read; raise where nobody has written it."""
        for region, _, address in parts:
            self.bytes_loaded += address.size * kind.itemsize * self._times(access)
            at = None if self.watch is None else self.watch.fresh(address, kind.itemsize)
            if at is not None:
                raise UnwrittenRead(
                    f"{region.element(at)} is read, and nobody has written it: mask the lane off, "
                    "or fill the tensor before the launch."
                )

    def _wrote(self, access: _Access, address: Array, kind: np.dtype[Any]) -> None:
        self.bytes_stored += address.size * kind.itemsize * self._times(access)
        if self.watch is not None:
            flags = self.watch.stored(address, kind.itemsize)
            if self.undo is not None:
                self.undo += flags

    def _parts(self, access: _Access) -> Iterator[Part]:
        """Split an access by tensor; raise where an active lane has none."""
        self.fits(access.pointer.data[0].size)
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
        lane = lane[1:] or lane
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


def _differ(elements: Array, index: Array, given: Array) -> Array:
    """Return where memory does not hold the bits given."""
    bits = np.dtype(f"u{elements.dtype.itemsize}")
    differ: Array = elements.view(bits)[index] != np.ascontiguousarray(given).view(bits)
    return differ
