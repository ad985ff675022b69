"""Whether programs that run as one may touch each other's memory: then their order could show.

Each element remembers the program that stored to it and the one that read it.  It is a suspicion
and no verdict: ``races`` judges, with the programs one after another, and knows what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from moe_parity.kernels.virtual_gpu.region import Region
from moe_parity.kernels.virtual_gpu.spans import Spans

Array = np.ndarray[Any, Any]

_SEVERAL = -1
"""In the place of a program: more than one."""


class Crossed(Exception):
    """Two programs may meet in an element."""


class Crossings:
    """Who touched what, of the programs of one launch; raises Crossed."""

    def __init__(self, regions: Sequence[Region]) -> None:
        """Take the tensors of a launch."""
        self._spans = Spans(regions)
        self._group = np.zeros(0, np.int32)

    def begin(self, group: Array) -> None:
        """Say which programs run from here on, by their numbers [n]."""
        self._group = (group + 1).astype(np.int32)

    def load(self, region: Region, addresses: Array, size: int, lanes: Array | None) -> None:
        """Note a load: ``lanes`` [programs, *shape] are those of ``addresses``, None for all."""
        span, at = self._spans.enter(region, addresses, size)
        own = self._own(addresses, lanes, at)
        _apart(span.seen.get("stored"), at, own)
        read = span.of("read")
        before = read[at]
        read[at] = own
        several = ((before != 0) & (before != own)) | (read[at] != own)
        if several.any():
            read[at[several]] = _SEVERAL

    def store(
        self, region: Region, addresses: Array, size: int, lanes: Array | None,
        _changed: Callable[[], Array],
    ) -> None:  # fmt: skip
        """Note a store, before it.

        Equal bits of two programs are no race, but what one of them stores besides may be, in the
        one order and not in the other: groups have an order of their own, so it counts here.
        """
        span, at = self._spans.enter(region, addresses, size)
        own = self._own(addresses, lanes, at)
        stored = span.of("stored")
        for seen in (stored, span.seen.get("read")):
            _apart(seen, at, own)
        stored[at] = own
        if (own == _SEVERAL).any() or (stored[at] != own).any():
            raise Crossed

    def atomic(self, *_: Any) -> NoReturn:
        """Atomics put programs in an order."""
        raise Crossed

    def lanes(self, *_: Any) -> NoReturn:
        """Lanes give one element different values."""
        raise Crossed

    def _own(self, addresses: Array, lanes: Array | None, at: Array) -> Array:
        """Return the program of each entry; that of several programs is none of them."""
        shape = addresses.shape if lanes is None else lanes.shape
        if self._group.size == 1:
            own = self._group
        elif shape[0] == 1:
            own = np.array([_SEVERAL], np.int32)
        else:
            each = self._group.reshape(-1, *[1] * (len(shape) - 1))
            own = np.broadcast_to(each, shape)
            own = own.ravel() if lanes is None else own[lanes]
        return np.broadcast_to(own.reshape(-1, *[1] * (at.ndim - 1)), at.shape)


def _apart(seen: Array | None, at: Array, own: Array) -> None:
    """Raise where another program was before."""
    if seen is None:
        return
    before = seen[at]
    if ((before != 0) & ((before != own) | (own == _SEVERAL))).any():
        raise Crossed
