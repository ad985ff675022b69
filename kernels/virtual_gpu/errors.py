"""What the virtual GPU raises; every message is a sentence that says what, where and what to do."""

from __future__ import annotations

from moe_parity.kernels.faults import MemoryFault, OutOfBounds, Race, UnwrittenRead

__all__ = ["MemoryFault", "OutOfBounds", "Race", "UnmodelledOperation", "UnwrittenRead"]


class UnmodelledOperation(Exception):
    """An operation that has no exact model of the H200: the launch stops rather than guess."""
