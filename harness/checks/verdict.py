"""Verdicts: what a check found, ready to be recorded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from moe_parity.harness.diagnosis.cause import Cause


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
    cause_kind: str = ""
    """What sort of thing made it red (``diagnosis.cause.CauseKind``)."""
    cause: str = ""
    """Its name, e.g. ``quant.apply=divide`` or ``k_tail``."""
    alternatives: tuple[str, ...] = ()
    """The names of what explains the same bits as well."""
    compared: int = 0
    differing: int = 0
    code_flips: int = 0
    max_ulp: int | None = None
    could_show: int | None = None
    """Outputs that would be red under some mutant of the recipe."""
    nearest_mutant: str = ""
    mutant_distance: int | None = None
    """Outputs that tell the nearest mutant."""
    sequence: tuple[str, ...] = ()
    """The calls, ``<kernel>-<case id>@<seed>``, that reproduce it where one call does not."""
    config: str = ""
    """The configuration that reproduces it, by name or number, where the first does not."""
    digest: str = ""
    """Of the bits that were judged (``checks.compare.digest``)."""
    rel_err_bf16: float | None = None
    rel_err_f64: float | None = None

    @property
    def causes(self) -> tuple[str, ...]:
        """The names of all that explains it."""
        return (self.cause, *self.alternatives) if self.cause else ()

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


def caused(verdict: Verdict, cause: Cause) -> Verdict:
    """Return a verdict with its cause as data; where it acts is in the message, not in its name."""
    return dataclasses.replace(
        verdict, cause_kind=cause.kind.value, cause=cause.name, alternatives=cause.others
    )
