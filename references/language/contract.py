"""Contracts: the checks that a kernel promises to pass."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from moe_parity.references.errors import ParityError


class Check(StrEnum):
    """A property of (kernel, case)."""

    EXACT = "exact"
    """Every bit as the recipe says."""
    INPUT_KEPT = "input_kept"
    """The inputs, and the memory between their rows, are as they were."""
    FINITE = "finite"
    """Finite wherever the reference is finite."""
    WRITE_SET = "write_set"
    """Writes what it owns and nothing beside it: poison, stride gaps, padding, declared fates."""
    RERUN = "rerun"
    """The same bits a second time, on other memory and in another order of programs."""
    ROW_SUBSET = "row_subset"
    """A row's bits do not depend on the other rows."""
    SEQUENCE = "sequence"
    """The calls before a call, and after it, change nothing."""
    INVARIANCE = "invariance"
    """A row has the same bits alone, in any batch, at any position, beside any other rows."""
    CONFIGS = "configs"
    """Every configuration of an autotuned kernel has the bits of a recipe."""
    REPLAY = "replay"
    """Captured once, it is right on whatever its inputs then hold."""
    NO_SYNC = "no_sync"
    """A call never waits for the GPU."""
    NO_RECOMPILE = "no_recompile"
    """After a few sizes nothing is compiled, and no integer of the batch is compiled in."""


EXTRA = frozenset({Check.NO_SYNC, Check.NO_RECOMPILE})
"""What a kernel promises only if it says so; of others it is measured."""
DEFAULT = frozenset(Check) - EXTRA


@dataclass(frozen=True, kw_only=True)
class Contract:
    """The checks a kernel must pass; ``pads_zero``: scale padding must hold zeros after a call.

    Raises ParityError for a contract without the check ``exact``.
    """

    checks: frozenset[Check] = DEFAULT
    pads_zero: bool = False

    def __post_init__(self) -> None:
        """Demand the one check that all others lean on."""
        if Check.EXACT not in self.checks:
            raise ParityError("a contract holds the check exact: without it nothing is compared.")

    def without(self, *dropped: Check) -> Contract:
        """Return the contract less some checks."""
        return Contract(checks=self.checks - set(dropped), pads_zero=self.pads_zero)

    def promising(self, *more: Check) -> Contract:
        """Return the contract with more checks."""
        return Contract(checks=self.checks | set(more), pads_zero=self.pads_zero)

    @property
    def words(self) -> str:
        """The contract in a word or two, for reports."""
        missing = [c.value for c in Check if c in DEFAULT and c not in self.checks]
        promised = f"all but {', '.join(missing)}" if missing else "all checks"
        more = [c.value for c in Check if c in EXTRA and c in self.checks]
        return "; ".join([promised, *more, *(["zero padding"] if self.pads_zero else [])])
