"""Hypothesis strategies: whole cases of any kernel, with their boundaries as well as their ranges.

Every word that a stage reads is drawn, simple values first, so that a failure shrinks to them; a
word that the kernel declines is left at a value that it takes.  Sizes and seeds are drawn, tensors
never: a smaller case keeps the bits of its rows.  What a case costs is chosen before its sizes:
many small ones, some large.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from hypothesis import strategies as st

from moe_parity.harness.cases.budget import skip_of
from moe_parity.kernels import Kernel
from moe_parity.references.arithmetic.formats import BLOCK, ScaleFormat, ScaleLayout
from moe_parity.references.language import (
    Arrival,
    Case,
    Gate,
    Hazard,
    InputDtype,
    Routing,
    Stage,
    Values,
)

SEEDS = st.integers(0, 2**32 - 1)

EDGES: Final = (8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096)
TOKENS: Final = tuple(edge + step for edge in EDGES for step in (-1, 0, 1))
"""Powers of two and the edges of tiles, and their neighbours."""
BUCKETS: Final = tuple(itertools.pairwise((40, *(edge for edge in EDGES if edge > 40), 1 << 14)))
"""Between which numbers of tokens a kernel may take one tile or path."""
EXPERTS: Final = (1, 2, 5, 8, 72, 96, 160, 256, 257, 288, 512, 1024, 1025)
MANY: Final = (257, 1024, 1025)
"""Experts past what a byte, a block of threads or a table of 1024 holds: drawn more often."""
CHOICES: Final = (1, 2, 6, 8, 9, 22)
"""Experts of a token."""
BLOCKS: Final = (3, 5, 7, 9, 15, 17, 31, 33, 36, 56, 72)
"""Blocks of 128 columns beyond the first few: models' own sizes, and no multiples of a power."""
WIDEST: Final = 72
"""Blocks up to which any number of them is drawn."""
RAGGED: Final = (1, 8, 16, 64, 100, 120)
NARROW: Final = 16
"""A width of weights of which there are many."""
GROUPS: Final = (128, 64, 32, 96, 256)
LIMITS: Final = (None, 7.0, 9.97, 1.0, 0.5, 30.0)
"""None of what a limit could be, one that BF16 cannot hold, some that are reached."""
RANKS: Final = (1, 2, 4, 8)
ROUTINGS: Final = (*Routing, Routing.LAST)
"""The last expert more often than the others: of many experts few tokens hit it by chance."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much a drawn case may cost."""

    cost: int
    """As the stage counts it, where a CPU runs the kernel on the virtual GPU."""
    work: int
    """The same for the reference alone, of a kernel whose own cost is not the virtual GPU's."""
    elements: int
    """Elements of an input or an output."""
    weights: int
    """Elements of the experts' weights."""


SMALL = Size(cost=32, work=400, elements=1 << 15, weights=1 << 21)
LARGE = Size(cost=160, work=4000, elements=1 << 20, weights=1 << 24)
ON_GPU = Size(cost=1 << 40, work=1 << 17, elements=1 << 24, weights=1 << 27)


def cases(kernel: Kernel, device: str) -> st.SearchStrategy[Case]:
    """Draw whole cases that a kernel takes on a device: small ones, and a large one in eight.

    Nothing is drawn where all that it takes is over a CPU's budget.
    """
    if not _affordable(kernel, device):
        return st.nothing()
    sizes = st.sampled_from((SMALL,) * 7 + (LARGE if device == "cpu" else ON_GPU,))
    return sizes.flatmap(lambda size: of_size(kernel, device, size))


@st.composite
def of_size(draw: st.DrawFn, kernel: Kernel, device: str, size: Size) -> Case:
    """Draw a case of at most ``size``."""
    return _Drawing(draw, kernel, device, size).case()


def formats(kernel: Kernel, device: str) -> list[Case]:
    """Return a small case for each scale format, layout and dtype that a kernel takes."""
    stage = kernel.stage
    kinds = {"scale": ScaleFormat, "mid_scale": (None, *ScaleFormat), "layout": ScaleLayout}
    kinds |= {"dtype": InputDtype, "group": GROUPS}
    own = {name: tuple(values) for name, values in kinds.items() if name in stage.reads}
    bases = _bases(stage)
    made = []
    for values in itertools.product(*own.values()):
        words: dict[str, Any] = dict(zip(own, values, strict=True))
        words |= _whole(stage, words.get("group", BLOCK))
        for base in bases:
            case = dataclasses.replace(base, **words)
            if kernel.declines(case, device) is None:
                made.append(case)
                break
    return made


@lru_cache(maxsize=64)
def _affordable(kernel: Kernel, device: str) -> tuple[Case, ...]:
    return tuple(c for c in formats(kernel, device) if skip_of(kernel, c, device) is None)


def _whole(stage: Stage[Any], group: int) -> dict[str, int]:
    """Return widths of whole groups, and of whole words of packed exponents."""
    return {name: 4 * max(group, BLOCK) for name in ("h", "i") if name in stage.reads}


def _bases(stage: Stage[Any]) -> list[Case]:
    """Return cases from which a kernel takes at least one: with and without a limit, both gates."""
    limits = (None, 7.0) if "clamp" in stage.reads else (None,)
    gates = tuple(Gate) if "gate" in stage.reads else (Gate.SILU,)
    rows = (1, BLOCK) if "m" in stage.reads else (1,)
    return [Case(m=m, clamp=limit, gate=gate) for m in rows for gate in gates for limit in limits]


class _Drawing:
    """One case in the making: every word is kept only where the kernel takes it."""

    def __init__(self, draw: st.DrawFn, kernel: Kernel, device: str, size: Size) -> None:
        self.draw, self.kernel, self.device, self.size = draw, kernel, device, size
        self.stage = kernel.stage
        self.made = Case()
        self.least = 0

    def case(self) -> Case:
        """Draw formats, then sizes, then what surrounds and fills them.

        A kernel may take no case as small as the size; it gets the smallest that it takes.
        """
        known = _affordable(self.kernel, self.device)
        self.made = self.draw(st.sampled_from(known), label="format")
        self.least = self.kernel.cost(self.made)
        self.try_one("clamp", LIMITS)
        self.try_one("gate", tuple(Gate))
        self.widths()
        self.routed()
        self.tokens()
        self.try_one("values", tuple(Values))
        self.try_one("hazard", tuple(Hazard))
        self.try_one("pool", (1, 2))
        if self.kernel.takes_quantized:
            self.try_one("arrives", tuple(Arrival))
        return self.replaced(seed=self.draw(SEEDS, label="seed"))

    def replaced(self, **words: Any) -> Case:
        return dataclasses.replace(self.made, **words)

    def takes(self, case: Case) -> bool:
        return self.kernel.declines(case, self.device) is None and self.fits(case)

    def keep(self, **words: Any) -> bool:
        """Set words where the kernel takes the case with them."""
        read = {name: value for name, value in words.items() if name in self.stage.reads}
        if not read:
            return False
        case = self.replaced(**read)
        if not self.takes(case):
            return False
        self.made = case
        return True

    def try_one(self, name: str, values: tuple[Any, ...]) -> None:
        """Draw one word of the case."""
        allowed = self.stage.reads.get(name, frozenset())
        known = tuple(v for v in values if allowed is None or v in allowed)
        if known:
            self.keep(**{name: self.draw(st.sampled_from(known), label=name)})

    def fits(self, case: Case) -> bool:
        """Whether a case is within the size, and within what a CPU does at all."""
        size, cost = self.size, self.kernel.cost(case)
        virtual = self.kernel.runs_on(self.device) == "virtual_gpu"
        rows = case.m * (case.k if "k" in self.stage.reads else 1)
        wide = max(
            case.h if "h" in self.stage.reads else 1, case.i if "i" in self.stage.reads else 1
        )
        weights = (
            3 * case.local_experts * case.h * case.i
            if {"e", "h", "i"} <= self.stage.reads.keys()
            else 0
        )
        return (
            cost <= max(self.least, size.cost if virtual else size.work)
            and rows * wide <= size.elements
            and weights <= size.weights
            and skip_of(self.kernel, case, self.device) is None
        )

    def widths(self) -> None:
        """Draw H and I: a few blocks, many, ragged ones."""
        self.made = self.replaced(**{w: BLOCK for w in ("h", "i") if w in self.stage.reads})
        group = self.made.group
        unit = group if "group" in self.stage.reads else BLOCK
        count = st.one_of(st.integers(1, 6), st.sampled_from(BLOCKS), st.integers(7, WIDEST))
        if self.size.work > SMALL.work and self.draw(st.booleans(), label="tall"):
            count = st.integers(1, 2)  # room for thousands of tokens
        for word in ("h", "i"):
            if word not in self.stage.reads:
                continue
            blocks = self.draw(count, label=f"blocks of {word}")
            rest = self.draw(st.sampled_from((0, 0, 0, *RAGGED)), label=f"ragged {word}")
            for width in self.narrowing(unit, blocks, rest):
                if self.keep(**{word: width}):
                    break

    @staticmethod
    def narrowing(unit: int, blocks: int, rest: int) -> Iterator[int]:
        """Yield a width, then what may be taken in its place."""
        if rest:
            yield unit * (blocks - 1) + rest
        yield unit * blocks
        yield unit * -(-blocks // 4) * 4
        yield unit * min(blocks, 4)
        yield unit * 4
        yield unit

    def routed(self) -> None:
        """Draw experts, ranks, the experts of a token and who takes which."""
        if "e" not in self.stage.reads:
            return
        ranks = 1
        if "ep_size" in self.stage.reads:
            ranks = self.draw(st.sampled_from(RANKS), label="ranks")
        few = st.integers(1, 12)
        counts = st.one_of(few, few, st.sampled_from(EXPERTS), st.sampled_from(MANY))
        every = self.draw(st.booleans(), label="experts of every rank")
        for e in (self.draw(counts, label="experts"), 5):
            whole = e * ranks if every else -(-e // ranks) * ranks
            place = self.draw(st.sampled_from((0, ranks - 1, ranks // 2)), label="rank")
            if self.among(e=whole, ep_size=ranks, ep_rank=place) or self.among(e=e):
                break
        choices = st.one_of(
            st.integers(1, 4), st.sampled_from(CHOICES), st.sampled_from(CHOICES[-2:])
        )
        k = self.draw(choices, label="k")
        _ = self.keep(k=k) or self.keep(k=min(k, self.made.e))
        self.try_one("routing", ROUTINGS)

    def among(self, **words: Any) -> bool:
        """Set words of experts; many experts have narrow weights, where the kernel takes them."""
        narrow = {n: BLOCK for n in ("h", "i") if n in self.stage.reads}
        ways: tuple[dict[str, int], ...] = (
            {},
            narrow,
            narrow | {"i": NARROW},
            narrow | {"h": NARROW},
        )
        return any(self.keep(**words, **way) for way in ways[: len(ways) if narrow else 1])

    def tokens(self) -> None:
        """Draw M up to what the size allows."""
        if "m" not in self.stage.reads:
            return
        most = self.most()
        edges = [m for m in TOKENS if m <= most] or [0]
        # a bucket first, then what is in it: of all numbers most would be in the last bucket
        inside = [st.integers(low + 1, min(high, most)) for low, high in BUCKETS if low < most]
        drawn = st.one_of(
            st.integers(0, min(40, most)),
            st.sampled_from(edges),
            st.sampled_from(inside or [st.just(0)]).flatmap(lambda bucket: bucket),
        )
        m = self.draw(drawn, label="m")
        _ = self.keep(m=m) or self.keep(m=-(-m // BLOCK) * BLOCK)

    def most(self) -> int:
        """Return the most tokens that fit, by halving."""
        low, high = 0, 1 << 14
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.fits(self.replaced(m=middle))
            low, high = (middle, high) if fits else (low, middle - 1)
        return low
