"""All planted faults."""

from __future__ import annotations

from moe_parity.suites.faulty import arithmetic, kept, routed, sizes

FAULTS = (*sizes.FAULTS, *routed.FAULTS, *arithmetic.FAULTS, *kept.FAULTS)
"""One kernel each."""
