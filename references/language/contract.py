"""Contracts: the checks that a kernel promises to pass."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Check(StrEnum):
    """A property of (kernel, case)."""

    EXACT = "exact"
    """Every bit as the recipe says, codes and scales separately."""
    FINITE = "finite"
    """Finite wherever the reference is finite."""
    WRITE_SET = "write_set"
    """Writes all of its outputs and nothing beside them: poison, stride gaps, scale padding."""
    RERUN = "rerun"
    """The same bits a second time."""
    ROW_SUBSET = "row_subset"
    """A row's bits do not depend on the other rows."""
    INPUT_KEPT = "input_kept"
    """The input, and the memory between its rows, is as it was."""


@dataclass(frozen=True, kw_only=True)
class Contract:
    """The checks a kernel must pass; ``pads_zero``: scale padding must hold zeros after a call."""

    checks: frozenset[Check] = frozenset(Check)
    pads_zero: bool = False

    def without(self, *dropped: Check) -> Contract:
        """Return the contract less some checks."""
        return Contract(checks=self.checks - set(dropped), pads_zero=self.pads_zero)
