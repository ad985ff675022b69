"""Sequences of cases for one kernel: what a cache, a counter or a workspace may get wrong.

A sequence comes back to its first case again and again.  Between two calls of it stands a case
that differs in one word only, the one that a key may lack; then M goes up across every bucket edge
and down again.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from moe_parity.kernels import Kernel
from moe_parity.references.language import (
    Arrival,
    Case,
    Hazard,
    InputDtype,
    Routing,
    ScaleFormat,
    ScaleLayout,
    Values,
)
from moe_parity.references.language.case import Gate

EDGES = (
    1, 33, 17, 3, 65, 129, 2, 5, 9, 16, 32, 4, 8, 64, 128, 257, 256, 513, 512, 1025, 4097
)  # fmt: skip
"""Row counts on both sides of where kernels change their tiles or paths, what tells most first."""
VIRTUAL_COST = 220
"""Cost of all calls of a sequence on the virtual GPU, some five ms each."""
FOR_WORDS = 0.6
"""The part of the budget that goes into words; the rest is for the edges."""
MULTIPLY_ADDS = {"cpu": 1 << 27, "cuda": 1 << 33}
"""Device type -> about how many multiply-adds the references of all calls may take."""
TEN = 10
"""Calls after which the first one is probed, whatever they cost."""

BATCHES = 9
"""About how many calls as large as the case `batched` is for."""
ROWS = {
    "cpu": (257, 256, 129, 128, 65, 40, 33, 17, 9, 5, 3),
    "cuda": (1025, 384, 257, 256, 129, 65, 33, 17, 3),
}
"""Device type -> the row counts of a case whose rows are called in other batches."""

SMALL = {
    "weight_quant": Case(i=130, h=128),
    "act_quant": Case(m=4, h=128),
    "align": Case(m=9, e=6, k=2),
    "permute": Case(m=5, e=4, k=2, h=128),
    "fc1": Case(m=4, e=2, h=128, i=128),
    "swiglu": Case(m=8, e=3, i=256),
    "swiglu_quant": Case(m=8, e=3, i=256),
    "fc2": Case(m=4, e=2, h=128, i=128),
    "combine": Case(m=5, e=6, k=2, h=256),
    "layer": Case(m=2, e=2, h=128, i=128),
}
"""Stage -> its case of a few programs; another stage begins with a case of its witnesses."""


def bases(kernel: Kernel, device: str) -> Iterator[Case]:
    """Yield small cases that a kernel takes, in the first format, layout and type that it does."""
    stage = kernel.stage
    small = SMALL.get(stage.name)
    if small is None:
        small = next(iter(stage.witness_cases()))
    wide = dataclasses.replace(small, h=512) if "h" in stage.sizes else small
    wide = dataclasses.replace(wide, i=512) if "i" in stage.sizes else wide
    sizes = [small, wide, dataclasses.replace(small, m=128)]
    if "k" in stage.reads:
        sizes.append(dataclasses.replace(small, e=1, k=1))
    sizes += [dataclasses.replace(size, clamp=1.0) for size in sizes if "clamp" in stage.reads]
    words = itertools.product(sizes, ScaleFormat, ScaleLayout, InputDtype)
    for size, scale, layout, dtype in words:
        case = dataclasses.replace(size, scale=scale, layout=layout, dtype=dtype)
        if kernel.declines(case, device) is None:
            yield case


def base_of(kernel: Kernel, device: str) -> Case | None:
    """Return the first of these, or None where the kernel takes none."""
    return next(bases(kernel, device), None)


def sequences(kernel: Kernel, base: Case, device: str) -> list[Case]:
    """Return the calls of a sequence that begins with ``base``, as many as the budget has room for.

    A kernel on the virtual GPU has a budget of programs, any other one of its references.
    """
    budget = _Budget(kernel, device)
    found, rest = [base], budget.total * (1 - FOR_WORDS)
    budget.fits([base])
    # a first neighbour in every word before the second one in any
    for other in _neighbours(kernel, base, device):
        if budget.fits([other, base], keep=rest):
            found += [other, base]
    # an edge is met on the way up and on the way down
    up = [
        case
        for case in _edges(base, kernel)
        if kernel.declines(case, device) is None and budget.fits([case, case])
    ]
    up.sort(key=lambda case: (case.m, case.i))
    found += [*up, *up[-2::-1], base]
    other = dataclasses.replace(base, seed=base.seed + 1)
    return found + [other] * max(TEN - len(found), 0) + ([base] if len(found) < TEN else [])


def batched(kernel: Kernel, base: Case, device: str) -> Case | None:
    """Return the largest case like ``base`` whose rows can be called in all sorts of batches.

    None where the kernel takes no case of several rows.
    """
    word = "m" if "m" in kernel.stage.sizes else "i"
    found = None
    for rows in ROWS[device]:
        case = with_rows(base, word, rows if word == "m" else 64 * rows)
        if (word == "i" and rows > BATCHES) or kernel.declines(case, device) is not None:
            continue
        found = case
        budget = _Budget(kernel, device)
        if budget.fits([case] * BATCHES, keep=0.4 * budget.total):
            break
    return found


def _neighbours(kernel: Kernel, base: Case, device: str) -> list[Case]:
    """Return cases that differ from one in a word, or in its values alone."""
    taken = [
        [case for case in cases if case != base and kernel.declines(case, device) is None]
        for cases in _words(base)
    ]
    every = itertools.chain.from_iterable(itertools.zip_longest(*taken))
    return list(dict.fromkeys(case for case in every if case is not None))


def _words(base: Case) -> Iterator[Iterable[Case]]:
    """Yield, word by word, the cases in which it has another value; what keys lack often first."""

    def other(**words: Any) -> Case:
        return dataclasses.replace(base, **words)

    yield (other(seed=base.seed + 1),)
    yield [other(scale=scale) for scale in ScaleFormat]
    yield [other(mid_scale=scale) for scale in ScaleFormat]
    yield [other(dtype=dtype) for dtype in InputDtype]
    yield [other(arrives=arrival) for arrival in Arrival]
    yield [other(clamp=limit) for limit in (0.5, None, 7.0)]
    yield [other(h=base.h * 2), other(h=base.h + 128)]
    yield [other(i=base.i * 2), other(i=base.i + 128)]
    yield [other(routing=routing) for routing in Routing]
    yield [other(k=base.k + 1)]
    yield [other(e=base.e + 2), other(e=base.e * 2)]
    yield [other(ep_rank=rank, ep_size=2) for rank in (1, 0) if base.e % 2 == 0]
    yield [other(group=base.group // 2), other(group=base.group * 2)]
    yield [other(gate=gate) for gate in Gate]
    yield [other(layout=layout) for layout in ScaleLayout]
    # as many elements, or pairs, in another shape
    wide, deep = dataclasses.replace(base, h=base.h * 2), dataclasses.replace(base, i=base.i * 2)
    yield [dataclasses.replace(wide, m=max(base.m // 2, 1))]
    yield [dataclasses.replace(deep, m=max(base.m // 2, 1))]
    yield [other(m=max(base.m // 2, 1), k=base.k * 2)]
    yield [other(hazard=hazard) for hazard in (Hazard.STRIDED, Hazard.TRANSPOSED)]
    yield [other(values=values) for values in (Values.WIDE, Values.SPECIAL, Values.AIMED)]


def _edges(base: Case, kernel: Kernel) -> list[Case]:
    """Return a case at every edge of the rows."""
    word = "m" if "m" in kernel.stage.sizes else "i"
    return [with_rows(base, word, edge) for edge in EDGES]


def with_rows(base: Case, word: str, rows: int) -> Case:
    """Return a case with other rows, whose word is ``m``, or ``i`` for those of a weight."""
    return dataclasses.replace(base, m=rows) if word == "m" else dataclasses.replace(base, i=rows)


class _Budget:
    """What the calls of a sequence may cost together."""

    def __init__(self, kernel: Kernel, device: str) -> None:
        self.stage = kernel.stage
        self.virtual = kernel.runs_on(device) == "virtual_gpu"
        self.total = self.left = VIRTUAL_COST if self.virtual else MULTIPLY_ADDS[device]

    def fits(self, cases: list[Case], keep: float = 0.0) -> bool:
        """Whether the calls fit into what is left but for a rest, which they then have used."""
        cost = sum(self._cost(case) for case in cases)
        if cost > self.left - keep:
            return False
        self.left -= cost
        return True

    def _cost(self, case: Case) -> int:
        if self.virtual:
            return self.stage.cost(case)
        rows = case.m if "m" in self.stage.sizes else case.i
        pairs = rows * (case.k if "k" in self.stage.reads else 1)
        columns: list[int] = [
            getattr(case, word) for word in ("h", "i") if word in self.stage.sizes
        ]
        # a quantized element takes as long as some multiply-adds, and a call is never free
        each = math.prod(columns) if len(columns) > 1 else 64 * sum(columns)
        return max(pairs * each, 1 << 20)
