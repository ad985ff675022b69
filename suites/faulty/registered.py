"""All planted kernels as a file for ``parity check --kernel``: take one with ``-k NAME``."""

from __future__ import annotations

from moe_parity.kernels import registry
from moe_parity.suites.faulty.table import FAULTS

registry._KERNELS.update((fault.name, fault.kernel) for fault in FAULTS)
