"""Verdicts: what a check found, ready to be recorded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of one check of one kernel on one case."""

    check: str
    verdict: Literal["pass", "fail", "skip"]
    stage: str = ""
    """The stage inside a layer that is judged; empty for the kernel's own."""
    message: str = ""
    reason: str = ""
    """Why a check was skipped."""
    recipe: str = ""
    decision: str = ""
    """The diverging decision, e.g. ``quant.apply=divide``, where a neighbour has the bits."""
    compared: int = 0
    differing: int = 0
    code_flips: int = 0
    max_ulp: int | None = None
    could_show: int | None = None
    """Outputs that would be red under some mutant of the recipe."""
    nearest_mutant: str = ""
    mutant_distance: int | None = None
    """Outputs that tell the nearest mutant."""
    rel_err_bf16: float | None = None
    rel_err_f64: float | None = None

    @property
    def failed(self) -> bool:
        """Whether it is red."""
        return self.verdict == "fail"

    def fields(self) -> dict[str, Any]:
        """Return the verdict as fields of a record."""
        return dataclasses.asdict(self)


def found(check: str, fault: str, **fields: Any) -> Verdict:
    """Return the verdict of a check: red with a fault in words, else green."""
    fields.setdefault("differing", int(bool(fault)))
    return Verdict(check=check, verdict="fail" if fault else "pass", message=fault, **fields)
