"""Races of one launch: accesses of the same byte, one of them writing, that nothing puts in order.

Programs of a launch run at the same time, in no order, and so do the lanes of one program.  Each
element of memory remembers who read it, who stored to it and who was there with an atomic; aliasing
arguments share that memory.  These are races, whatever the order of the programs that shows them:

* a store of one program beside a load, store or atomic of another;
* an atomic of one beside a plain load of another (an atomic beside an atomic is none);
* a store of several lanes of one program to one element, with different values.

Programs that store equal bits to one element race by the letter, but no order shows, and kernels in
wide use do it (the ep_scatter that LightLLM wrote: every program stores the prefix sum over all
experts).  A store that leaves bits as an earlier store of the launch made them is none.

What an atomic hands over is no race: an access before a releasing atomic of one program comes
before what another does after its own acquiring atomic on the same address (locks, counters by
which the last program knows that it is the last).
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, NoReturn

import numpy as np

from moe_parity.kernels.virtual_gpu.errors import Race
from moe_parity.kernels.virtual_gpu.region import Region
from moe_parity.kernels.virtual_gpu.rewrite import HELPERS
from moe_parity.kernels.virtual_gpu.spans import Span, Spans

Array = np.ndarray[Any, Any]
Program = tuple[int, int, int]

_VERBS = {"reads": "loads", "writes": "stores", "atomics": "atomically updates"}


class Races:
    """The accesses of a launch, program after program; raises Race at the second of two."""

    def __init__(self, kernel: str, regions: Sequence[Region]) -> None:
        """Take the tensors of a launch; the list may still grow before the first access."""
        self._kernel = kernel
        self._spans = Spans(regions)
        self._programs: list[Program] = []
        self._starts: list[int] = []
        """The first access of each program."""
        self._lines: list[tuple[CodeType, int] | None] = [None]
        """The line of each access."""
        self._first = 1
        """The first access of the running program."""
        self._handed: list[tuple[int, str, Array]] = []
        """Number, order and addresses of each atomic."""

    def begin(self, program: Program) -> None:
        """Say which program runs from here on."""
        self._programs.append(program)
        self._first = len(self._lines)
        self._starts.append(self._first)

    def load(self, region: Region, addresses: Array, size: int, _lanes: Any = None) -> None:
        """Note a load."""
        span, at = self._enter(region, addresses, size)
        self._beside(span, at, region, "reads", ("writes", "atomics"))
        self._join(span, at, "reads")

    def store(
        self, region: Region, addresses: Array, size: int, _lanes: Any, changed: Callable[[], Array]
    ) -> None:
        """Note a store, before it; ``changed`` says which lanes change what the memory holds."""
        span, at = self._enter(region, addresses, size)
        self._beside(span, at, region, "writes", ("writes", "reads", "atomics"), changed)
        span.of("writes")[at] = len(self._lines) - 1

    def atomic(self, region: Region, addresses: Array, size: int, order: str) -> None:
        """Note an atomic; ``order`` is what it promises, ``relaxed`` or any other."""
        span, at = self._enter(region, addresses, size)
        self._beside(span, at, region, "atomics", ("writes", "reads"))
        self._join(span, at, "atomics")
        if order != "relaxed":
            self._handed.append((len(self._lines) - 1, order, addresses.ravel()))

    def lanes(self, region: Region, address: int) -> NoReturn:
        """Raise for an element to which the lanes of a store give different values."""
        raise Race(
            f"program {self._programs[-1]} of {self._kernel}{self._line(len(self._lines) - 1)} "
            f"stores different values to {region.element(address)} from several lanes of one "
            "store, and which one stays is undefined: give each lane an element of its own, or "
            "mask off all but one."
        )

    # ---------------------------------------------------------------------------------------------

    def _enter(self, region: Region, addresses: Array, size: int) -> tuple[Span, Array]:
        frame: Any = sys._getframe(3)
        while frame is not None and HELPERS not in frame.f_globals:
            frame = frame.f_back
        self._lines.append(None if frame is None else (frame.f_code, frame.f_lineno))
        return self._spans.enter(region, addresses, size)

    def _join(self, span: Span, at: Array, name: str) -> None:
        """Enter the running access as the first reader, or atomic, of what has none yet."""
        first = span.of(name)
        new = first[at] == 0
        if new.any():
            first[at if new.all() else at[new]] = len(self._lines) - 1

    def _beside(
        self, span: Span, at: Array, region: Region, own: str, others: Sequence[str],
        changed: Callable[[], Array] | None = None,
    ) -> None:  # fmt: skip
        """Raise where another program was before, unless an atomic stands between."""
        for name in others:
            if name not in span.seen:
                continue
            before = span.seen[name][at]
            # of 0, the highest unsigned number is left: one comparison for 0 < before < first
            foreign = (before.view(np.uint32) - np.uint32(1)) < np.uint32(self._first - 1)
            if not foreign.any():
                continue
            if changed is not None and "writes" in span.seen:
                lanes = changed().reshape(-1, *[1] * (at.ndim - 1))
                foreign &= lanes | (span.seen["writes"][at] == 0)
            for event in np.unique(before[foreign]).tolist():
                if not self._in_order(event):
                    place = int(at[foreign & (before == event)][0])
                    address = max(span.start + place * span.unit, region.start)
                    self._raise(region, address, event, own, name)

    def _in_order(self, event: int) -> bool:
        """Whether a releasing atomic after an access meets an acquiring one of this program."""
        stop = self._starts[bisect_right(self._starts, event)]
        given = [a for n, order, a in self._handed if event < n < stop and order != "acquire"]
        taken = [a for n, order, a in self._handed if n >= self._first and order != "release"]
        return bool(given and taken) and bool(
            np.isin(np.concatenate(given), np.concatenate(taken)).any()
        )

    def _raise(self, region: Region, address: int, event: int, own: str, name: str) -> NoReturn:
        earlier = self._programs[bisect_right(self._starts, event) - 1]
        now, then = self._line(len(self._lines) - 1), self._line(event)
        element = region.element(address)
        if own == name:
            same = now == then
            who = (
                f"programs {earlier} and {self._programs[-1]} of {self._kernel}{now}"
                if same
                else f"programs {earlier}{then} and {self._programs[-1]}{now} of {self._kernel}"
            )
            raise Race(
                f"{who} both store {element}, and whichever runs last wins: let one program own "
                "the element, or use an atomic."
            )
        raise Race(
            f"program {self._programs[-1]} of {self._kernel}{now} {_VERBS[own]} {element}, which "
            f"program {earlier}{then} {_VERBS[name]}, and programs of a launch run in no order: "
            "use an atomic for both, or a launch of its own for each."
        )

    def _line(self, event: int) -> str:
        site = self._lines[event]
        if site is None:
            return ""
        return f" (line {site[1]} of {site[0].co_filename.rsplit('/', 1)[-1]})"
