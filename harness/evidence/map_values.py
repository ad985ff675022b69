"""What an invariance map holds: spans of equal bits, lines of them, and its sentence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from moe_parity.harness.diagnosis.labels import numbers
from moe_parity.kernels import Kernel
from moe_parity.references.language import Case, Check

PLACES = ("first", "in the middle", "last")
"""Where in a batch a token stands."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Numbers of tokens from one to another at which a token has the same bits."""

    first: int
    last: int
    bits: str
    """Their digest."""
    recipe: str
    decision: str = ""
    """What changes from the span before; empty for the first."""
    declared: bool = True
    """Whether the kernel states another recipe from here on."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One token at one place in one company, over all numbers of tokens."""

    words: str
    unit: int
    place: str
    inputs: Any = field(repr=False)
    others: Tensor = field(repr=False)
    """The units beside it, in order, taken again from the start where they are too few."""
    spans: tuple[Span, ...] = ()
    called: tuple[int, ...] = ()
    """The numbers of tokens of all calls."""
    agrees: bool = True
    """Whether it has the bits of the first line wherever both were called."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """Positions in a batch of copies of a token at which it has the same bits."""

    m: int
    positions: str
    bits: str
    recipe: str
    decision: str = ""


@dataclass(frozen=True, kw_only=True)
class InvarianceMap:
    """What was found of one configuration of a kernel on one case."""

    kernel: Kernel
    case: Case
    config: str
    lines: tuple[Line, ...]
    """The first is the one that the others are held against."""
    places: tuple[Places, ...] = ()
    """Where the copies of a token do not all have the same bits: which have which."""
    compared: int = 0
    calls: int = 0
    could_show: int = 0
    """Outputs compared on which some other decision would have shown."""
    refused: tuple[int, ...] = ()
    """Numbers of tokens that the kernel does not take."""

    @property
    def said(self) -> tuple[Line, ...]:
        """The lines that say something: the first, and those that differ from it."""
        return tuple(line for n, line in enumerate(self.lines) if n == 0 or not line.agrees)

    @property
    def changes(self) -> bool:
        """Whether the bits change at all."""
        return bool(self.places) or any(len(x.spans) > 1 or not x.agrees for x in self.lines)

    @property
    def broken(self) -> bool:
        """Whether they change where the kernel promises, and states, that they do not."""
        if Check.INVARIANCE not in self.kernel.contract.checks:
            return False
        undeclared = any(not span.declared for line in self.lines for span in line.spans)
        return undeclared or bool(self.places) or any(not line.agrees for line in self.lines)

    @property
    def sentence(self) -> str:
        """The map in a sentence."""
        first = self.lines[0]
        low, high = first.spans[0].first, first.spans[-1].last
        counts = f"{self.compared:,} outputs compared in {self.calls} calls, of which "
        counts += f"{self.could_show:,} could have shown a change"
        if self.refused:
            counts += f"; not taken: M = {numbers(set(self.refused))}"
        if not self.changes:
            return (
                f"a token's bits are the same for M = {low} to {high}, at every position and "
                f"beside every neighbour: {counts}"
            )
        found = [
            f"at M = {span.first} ({span.decision})" if line is first
            else f"{line.words} at M = {span.first} ({span.decision})"
            for line in self.said for span in line.spans[1:]
        ]  # fmt: skip
        found += [
            f"{line.words} from M = {line.spans[0].first} on" for line in self.said
            if len(line.spans) == 1 and line is not first
        ]  # fmt: skip
        found += [f"at positions {p.positions} of {p.m} copies" for p in self.places if p.decision]
        return f"a token's bits change {'; '.join(found)}: {counts}"
