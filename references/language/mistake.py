"""A mistake: what a kernel may do wrong that no decision holds.

As a decision's options are, mistakes are hypotheses of the diagnosis: each has a name, the bits
that come of it, and the words that say it.  The catalogue is ``references/stages/mistakes``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One way to go wrong on given inputs."""

    name: str
    """Of its kind, for reports: ``k_tail``."""
    words: str
    """What is wrong, in words that may begin a sentence: ``the last 128 of K left out``."""
    outputs: Callable[[], Mapping[str, Tensor]]
    """Makes what a kernel gives that goes wrong so, in canonical form."""
    local: bool = True
    """Whether a row goes wrong in the same way when it is called alone."""
    few: Callable[[Tensor], Mapping[str, Tensor]] | None = None
    """Makes what some units, int64 [U], get of it, as ``Stage.some`` orders them, where a row goes
    wrong by what others hold; None where that takes all outputs, or as much."""
    late: bool = False
    """Whether it is tried where no other mistake explains what is seen: one of very many."""
    figures: str = ""
    """The numbers of these very inputs, which a report says behind the words."""
