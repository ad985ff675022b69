"""Many programs of a launch as one: what an operation costs, it costs once for hundreds of them.

Every value has a first axis for programs (``values.Value``).  A group of programs goes on as long
as all of them take the same way.  Where a condition or the bounds of a loop part them, the group is
undone, and each part begins anew by itself.

A group is a shortcut and decides nothing.  What it cannot tell undoes the whole launch, and the
programs run one after another instead: an atomic, memory that two programs may both touch
(``crossings``), an error of any kind.  So every sentence, and every bit that could depend on the
order of programs, comes from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np

from moe_parity.kernels.virtual_gpu.crossings import Crossings

if TYPE_CHECKING:
    from moe_parity.kernels.virtual_gpu.builder import VirtualBuilder
    from moe_parity.kernels.virtual_gpu.values import Value

Array = np.ndarray[Any, Any]

ELEMENTS = 1 << 17
"""Of the largest block of a group: more leave the cache, and fewer cost their calls."""

MOST = 1 << 12
"""Programs of a group."""

NOTED = 1 << 26
"""Bytes of what stores replaced from which on whole tensors may take less."""

PARTINGS = 6
"""Times that a group may part until its programs run singly: each time begins anew."""

_SINGLY: WeakSet[Any] = WeakSet()
"""Functions of kernels that have an operation for which programs must run one after another."""


class Alone(Exception):
    """An operation that a group cannot do."""


class Parted(Exception):
    """The programs of a group take several ways; ``keys`` has a row for each program."""

    def __init__(self, keys: Array) -> None:
        """Take the rows: equal ones go on together."""
        super().__init__()
        self.keys = keys


def alone(what: str, *values: Value | None) -> None:
    """Raise Alone where an operand differs between the programs of a group."""
    if any(value is not None and len(value.data) > 1 for value in values):
        raise Alone(what)


def common(*scalars: Array) -> list[Any]:
    """Return scalars [programs] that all programs of a group have in common; raise Parted if not.

    The results are Python numbers.
    """
    if any(len(data) > 1 for data in scalars):
        rows = np.stack(np.broadcast_arrays(*scalars), axis=1)
        if (rows != rows[0]).any():
            raise Parted(rows)
    return [data[0].item() for data in scalars]


def steps(start: Array, stop: Array, step: Array) -> list[Array]:
    """Return the values of ``range`` over bounds [programs]; raise Parted for several lengths."""
    if max(map(len, (start, stop, step))) == 1:
        return [np.array([n]) for n in range(int(start[0]), int(stop[0]), int(step[0]))]
    bounds = np.broadcast_arrays(start, stop, step)
    lengths = np.array([len(range(*row)) for row in np.stack(bounds, axis=1).tolist()])
    if (lengths != lengths[0]).any():
        raise Parted(lengths[:, None])
    return [start + n * step for n in range(lengths[0])]


def level(*arrays: Array) -> tuple[Array, ...]:
    """Return arrays [programs, *shape] of one rank: a scalar meets a block without its axes."""
    rank = max(data.ndim for data in arrays)
    return tuple(
        data if data.ndim == rank else data.reshape(-1, *[1] * (rank - 1)) for data in arrays
    )


def each(*arrays: Array) -> list[tuple[Array, ...]]:
    """Return the arrays of each program, from those of all of them."""
    count = max(map(len, arrays))
    return [tuple(x[n if len(x) > 1 else 0] for x in arrays) for n in range(count)]


def run(kernel: Any, body: Callable[[], None], builder: VirtualBuilder, programs: Array) -> bool:
    """Run the programs [n] of a launch, by their numbers, in groups; False if nothing was done."""
    if programs.size < 2 or kernel.fn in _SINGLY:
        return False
    memory, used = builder.memory, dict(builder.used)
    memory.races = crossings = Crossings(memory.regions)
    memory.undo = []
    try:
        _groups(body, builder, crossings, programs)
    except Exception as error:  # one after another, they say it in their own words
        if isinstance(error, Alone):
            _SINGLY.add(kernel.fn)
        memory.back(0, 0, 0)
        builder.forget(used)
        return False
    else:
        return True
    finally:
        memory.races, memory.undo, memory.programs = memory.exact, None, 1


def _groups(
    body: Callable[[], None], builder: VirtualBuilder, crossings: Crossings, programs: Array
) -> None:
    memory = builder.memory
    waiting = [(programs, 0)]
    while waiting:
        group, parted = waiting.pop()
        # at first as many as there are: those without work of their own end before large blocks
        fit = max(1, ELEMENTS // max(memory.widest, 1)) if parted else MOST
        if group.size > fit:
            chunks = [group[n : n + fit] for n in range(0, group.size, fit)]
            waiting += [(chunk, parted) for chunk in reversed(chunks)]
            continue
        before = len(memory.undo or ()), memory.bytes_loaded, memory.bytes_stored
        builder.take(group)
        memory.programs = group.size
        crossings.begin(group)
        try:
            body()
        except Parted as ways:
            memory.back(*before)
            waiting += [(part, parted + 1) for part in reversed(_parts(group, ways, parted))]
        else:
            memory.settle()


def _parts(group: Array, ways: Parted, parted: int) -> list[Array]:
    if parted == PARTINGS:
        return list(group[:, None])
    _, part = np.unique(ways.keys, axis=0, return_inverse=True)
    return [group[part.ravel() == n] for n in range(int(part.max()) + 1)]
