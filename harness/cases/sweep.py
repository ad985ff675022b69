"""Every size that a kernel may choose by: rows, experts with their choices, widths, one at a time.

A drawn case meets a bucket by chance, and the fault of one bucket of many goes by.  Here a small
case of the kernel is changed in one size, through every bucket that heuristics know, as far as the
budget goes: what tells most comes first, and another base seed begins elsewhere in the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, zip_longest
from typing import Any

from moe_parity.harness.cases.budget import skip_of
from moe_parity.harness.cases.sequences import base_of
from moe_parity.harness.cases.strategies import CHOICES, EXPERTS, TOKENS, WIDEST, formats
from moe_parity.kernels import Kernel
from moe_parity.references.arithmetic.formats import BLOCK
from moe_parity.references.language import Case, Routing, Values

INSIDE: tuple[int, ...] = (
    1,
    3,
    2,
    6,
    12,
    20,
    28,
    40,
    56,
    80,
    112,
    160,
    224,
    320,
    448,
    640,
    896,
    1280,
    1792,
    2560,
)
INSIDE += (3584, 5120, 7168, 12288)
"""Row counts inside every bucket between powers of two, and between these and their middles: no
edge, and no power."""
FEW = tuple(range(41))
"""Row counts that are all met: each may have a kernel of its own."""
ROUND = (*range(100, 1000, 100), *range(1000, 4001, 500), 5000, 6000, 8000, 10000)
EDGES = {*TOKENS, *ROUND, 8191, 8192, 8193} - {*FEW}
"""Both sides of every edge, and what people ask for."""

VIRTUAL_SHARE = 30
"""The virtual GPU's budget is the square of the cases that a run draws over this: a look where all
kernels are checked, most of the sizes where one was named."""
ONE_CALL = (24, 260)
"""A fifth of it is what one call may have, but at least and at most so much."""
WORK = {"cpu": 3 << 26, "cuda": 1 << 34}
"""Device type -> about how many multiply-adds the references of all sizes may take, of each kind;
a quarter of them for one call."""
NAMED = 200
"""Drawn cases from which on the references have all of that."""
WEIGHTS = 1 << 24
"""Elements of the experts' weights."""
CALL = 1 << 17
"""Multiply-adds that take as long as a call of nothing."""
Cost = Callable[[Case], int]


def swept(kernel: Kernel, device: str, drawn: int, seed: int = 0) -> list[Case]:
    """Return cases of a kernel that differ in one size from a small one.

    ``drawn`` is how many cases a run draws for a kernel: the budget of the virtual GPU grows with
    it.  A format of the kernel is taken for each case in turn where calls are cheap, else one.
    """
    base = base_of(kernel, device)
    if base is None:
        return []
    base = dataclasses.replace(base, seed=seed)
    virtual = kernel.runs_on(device) == "virtual_gpu"
    kinds = [_rows(base, kernel, seed), _choices(base, kernel, device), _widths(base, kernel, seed)]
    if virtual:
        total = drawn * drawn / VIRTUAL_SHARE
        most = min(max(total / 5, ONE_CALL[0]), ONE_CALL[1])
        affordable = _taken(kernel, device, _in_turn(kinds), kernel.cost, (total, most, 16))
        return affordable or [base]
    total = WORK[device] * min(drawn, NAMED) // NAMED
    limits = (total, total // 4, total // 128)
    taken = [_taken(kernel, device, kind, partial(_work, kernel), limits) for kind in kinds]
    return _in_formats(kernel, device, chain.from_iterable(taken))


def _taken(
    kernel: Kernel, device: str, cases: Iterable[Case], cost: Cost,
    limits: tuple[float, float, float],
) -> list[Case]:  # fmt: skip
    """Return what fits into a budget, of which one case may have a part.

    ``limits`` are the budget, what one case may cost, and what it may cost without an attempt to
    take fewer columns.
    """
    left, most, cheap = limits
    found: dict[Case, None] = {}
    for case in cases:
        tried = [case]
        if cost(case) > cheap:
            tried = [*_narrow(case, kernel), case]
        if "m" in kernel.stage.sizes:
            tried.append(dataclasses.replace(case, m=-(-case.m // BLOCK) * BLOCK))
        for other in tried:
            needed = cost(other)
            if other not in found and needed <= min(left, most) and _runs(kernel, other, device):
                left -= needed
                found[other] = None
                break
    return list(found)


def _narrow(case: Case, kernel: Kernel) -> Iterator[Case]:
    """Yield the case with fewer columns, for stages that have a kernel for them."""
    for word in ("i", "h"):
        for width in (16, BLOCK):
            if word in kernel.stage.reads and getattr(case, word) > width:
                yield widened(case, word, width)


def _work(kernel: Kernel, case: Case) -> int:
    """Return about how many multiply-adds a call and its reference take.

    An element that is moved or rounded takes as long as some of them, and no call is free.
    """
    return max(_arithmetic(kernel, case), CALL)


def _arithmetic(kernel: Kernel, case: Case) -> int:
    reads = kernel.stage.reads
    rows = (case.m if "m" in reads else 1) * (case.k if "k" in reads else 1)
    if {"e", "h", "i"} <= reads.keys():
        return rows * 3 * case.h * case.i + case.e * case.h * case.i // 4
    columns = max(case.h if "h" in reads else 1, case.i if "i" in reads else 1)
    return rows * columns * 16 if "m" in reads else case.h * case.i * 16


def _runs(kernel: Kernel, case: Case, device: str) -> bool:
    reads = kernel.stage.reads
    weights = 3 * case.e * case.h * case.i if {"e", "h", "i"} <= reads.keys() else 0
    return weights <= WEIGHTS and skip_of(kernel, case, device) is None


def _rows(base: Case, kernel: Kernel, seed: int) -> list[Case]:
    """Return the case at other rows: tokens, or those of a weight."""
    rest = [_turned(sorted(set(some) - set(INSIDE)), seed) for some in (FEW, EDGES)]
    counts = [*INSIDE, *chain.from_iterable(rest)]
    if "m" not in kernel.stage.reads:
        return [dataclasses.replace(base, i=rows) for rows in counts if rows]
    small = _dense(base, kernel)
    return [dataclasses.replace(small, m=rows) for rows in counts]


def _dense(base: Case, kernel: Kernel) -> Case:
    """Return the case with one choice of few experts."""
    if "k" in kernel.stage.reads:
        base = dataclasses.replace(base, k=1, e=min(base.e, 2))
    return base


def widened(case: Case, word: str, width: int) -> Case:
    """Return a case with another width, whose word is ``h`` or ``i``."""
    return dataclasses.replace(case, h=width) if word == "h" else dataclasses.replace(case, i=width)


def _choices(base: Case, kernel: Kernel, device: str) -> list[Case]:
    """Return the case with any experts and any choices of them, the largest first.

    Odd numbers of choices are all of the last expert, which few tokens hit by chance.
    """
    reads = kernel.stage.reads
    if "e" not in reads:
        return []
    few = dataclasses.replace(base, m=min(base.m, 2) if "k" in reads else base.m)
    if "k" not in reads:
        return [dataclasses.replace(few, e=e) for e in reversed(EXPERTS)]
    pairs = [(e, k) for k in reversed(CHOICES) for e in reversed(EXPERTS) if k <= e or e == 1]
    cases = []
    for e, k in pairs:
        case = dataclasses.replace(few, e=e, k=k)
        last = dataclasses.replace(case, routing=Routing.LAST)
        if "routing" in reads and k % 2 and kernel.declines(last, device) is None:
            case = last
        weights = 3 * case.e * case.h * case.i if "i" in reads else 0
        if weights > WEIGHTS:
            narrow = max(WEIGHTS // (3 * case.e * case.h) // 16 * 16, 16)
            case = dataclasses.replace(case, i=narrow)
        cases.append(case)
    return cases


def _widths(base: Case, kernel: Kernel, seed: int) -> list[Case]:
    """Return the case with any number of blocks in H, and in I."""
    small = _dense(base, kernel)
    if "m" in kernel.stage.reads:
        small = dataclasses.replace(small, m=min(base.m, 2))
    odd = [n for n in range(1, WIDEST + 1) if n % 2]
    first = (33, 71, 17, 9, 5)
    rest = _turned([n for n in odd if n not in first], seed)
    rest += _turned(list(range(2, WIDEST + 1, 2)), seed)
    words = [word for word in ("h", "i") if word in kernel.stage.reads]
    return [widened(small, w, BLOCK * n) for n in (*first, *rest) for w in words]


def _turned(values: list[int], seed: int) -> list[int]:
    """Return values from another one on, with another step: a part of them is spread over all."""
    step = next(n for n in (7, 11, 13, 17, 19, 1) if len(values) % n or n == 1)
    return [values[(seed + n * step) % len(values)] for n in range(len(values))]


def _in_turn(kinds: list[list[Case]]) -> Iterator[Case]:
    """Yield rows, and after some of them each other size."""
    rows, *others = kinds
    for n, several in enumerate(zip_longest(*others)):
        yield from rows[3 * n : 3 * n + 3]
        yield from (case for case in several if case is not None)
    yield from rows[3 * max(map(len, others)) :]


def _in_formats(kernel: Kernel, device: str, cases: Iterable[Case]) -> list[Case]:
    """Return all cases, each with the words of another format, where the kernel takes it so."""
    known = formats(kernel, device)
    found: dict[Case, None] = {}
    for n, case in enumerate(cases):
        words: dict[str, Any] = {}
        if known:
            form = known[n % len(known)]
            words = {
                name: getattr(form, name)
                for name in ("scale", "mid_scale", "layout", "dtype", "group")
                if name in kernel.stage.reads
            }
        if "values" in kernel.stage.reads and n % 2:
            words["values"] = Values.AIMED
        other = dataclasses.replace(case, **words)
        found.setdefault(other if skip_of(kernel, other, device) is None else case)
    return list(found)
