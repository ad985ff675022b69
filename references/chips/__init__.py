"""What a chip does with numbers: its dot-product units and its tables of special functions.

A chip that is modelled is a file here and a line in ``CHIPS``.
"""

from __future__ import annotations

from moe_parity.references.chips.chip import Chip, Unit
from moe_parity.references.chips.hopper import HOPPER
from moe_parity.references.errors import ParityError

CHIPS: dict[str, Chip] = {chip.architecture: chip for chip in (HOPPER,)}
"""Architecture -> chip, of those whose bits were measured."""

REFERENCE = HOPPER
"""The chip whose bits references give, and that the virtual GPU is."""

_UNMODELLED = {
    "sm_89": "the FP8 unit of Ada takes 16 products a step",
    "sm_100": "Blackwell has another tensor core",
    "sm_103": "Blackwell has another tensor core",
    "sm_120": "Blackwell has another tensor core",
}


def why_not_modelled(architecture: str) -> str | None:
    """Return None for a chip that is modelled, else one sentence."""
    if architecture in CHIPS:
        return None
    why = _UNMODELLED.get(architecture, "its units and tables were never measured")
    return f"{architecture}: {why}, its model is not here"


def unit_named(name: str) -> Unit:
    """Return the unit of that name; raises ParityError, listing the units, for another one."""
    units = {unit.name: unit for chip in CHIPS.values() for unit in chip.units}
    if name not in units:
        raise ParityError(f"unknown unit {name!r}; units: {', '.join(units)}.")
    return units[name]


__all__ = ["CHIPS", "HOPPER", "REFERENCE", "Chip", "Unit", "unit_named", "why_not_modelled"]
