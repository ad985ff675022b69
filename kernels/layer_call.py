"""What the harness hands to a layer kernel; it gets a ``Trace`` back."""

from __future__ import annotations

from dataclasses import dataclass

from moe_parity.references.language import Case
from moe_parity.references.layer import Asked, Experts, Routed


@dataclass(frozen=True, kw_only=True)
class LayerCall:
    """One batch for one rank's experts."""

    case: Case
    batch: Routed
    experts: Experts
    asked: Asked
