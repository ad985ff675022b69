"""Who touched which element of the memory of a launch: arrays beside it, filled in as it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moe_parity.kernels.shadow import zeros
from moe_parity.kernels.virtual_gpu.region import Region

Array = np.ndarray[Any, Any]

_ALIGNED = 16
"""No element is larger."""

_ENTRY = np.dtype(np.int32)


@dataclass(eq=False)
class Span:
    """Memory that one argument, or several that overlap, cover, and who was there.

    The arrays have an entry for every ``unit`` bytes: the number of an access, 0 for none.  Of the
    readers the first is enough, and of the atomics: programs run one after another here, so that it
    is another program wherever there is one.
    """

    start: int
    stop: int
    unit: int = 0
    """Bytes of the smallest access so far."""
    seen: dict[str, Array] = field(default_factory=dict)

    def index(self, addresses: Array, size: int) -> Array:
        """Return the entries of accesses of ``size`` bytes, int64 [n] or [n, entries of each]."""
        if not self.unit:
            self.unit = size
        elif size < self.unit:
            self.seen = {n: _finer(a, self.unit // size) for n, a in self.seen.items()}
            self.unit = size
        at = (addresses.ravel() - np.uint64(self.start)).view(
            np.int64
        ) >> self.unit.bit_length() - 1
        return at if size == self.unit else at[:, None] + np.arange(size // self.unit)

    def of(self, name: str) -> Array:
        """Return one of the arrays."""
        found = self.seen.get(name)
        if found is None:
            count = -(-(self.stop - self.start) // self.unit)
            found = self.seen[name] = zeros(count, _ENTRY)
        return found


def _finer(seen: Array, parts: int) -> Array:
    """Return an array with every entry ``parts`` times; what was never touched stays so."""
    made, touched = zeros(seen.size * parts, _ENTRY), np.flatnonzero(seen)
    made[touched[:, None] * parts + np.arange(parts)] = seen[touched][:, None]
    return made


class Spans:
    """The memory of a launch's tensors, each with what overlaps it."""

    def __init__(self, regions: Sequence[Region]) -> None:
        """Take the tensors; the list may still grow before the first access."""
        self._regions = regions
        self._spans: dict[Region, Span] = {}

    def enter(self, region: Region, addresses: Array, size: int) -> tuple[Span, Array]:
        """Return the memory of a tensor, and the entries of accesses of ``size`` bytes."""
        span = self._spans.get(region) or self._made(region)
        return span, span.index(addresses, size)

    def _made(self, region: Region) -> Span:
        """Make the entries of a tensor's memory, and of all that overlaps it."""
        group: set[Region] = set()
        more = {region}
        while more - group:
            group |= more
            low, high = min(r.start for r in group), max(r.stop for r in group)
            more = {r for r in self._regions if r.start < high and low < r.stop}
        span = Span(low - low % _ALIGNED, high)
        self._spans |= dict.fromkeys(group, span)
        return span
