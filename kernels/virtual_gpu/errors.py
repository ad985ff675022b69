"""What the virtual GPU raises; every message is a sentence that says what, where and what to do."""

from __future__ import annotations

from typing import NoReturn

from moe_parity.kernels.faults import MemoryFault, OutOfBounds, Race, UnwrittenRead

__all__ = [
    "MemoryFault",
    "OutOfBounds",
    "Race",
    "UnmodelledOperation",
    "UnwrittenRead",
    "unmodelled",
]


class UnmodelledOperation(Exception):
    """An operation that has no exact model of the H200: the launch stops rather than guess."""


def unmodelled(what: str) -> NoReturn:
    """Raise for an operation without a model."""
    raise UnmodelledOperation(
        f"{what} has no exact model of an H200; use a modelled operation, or run this kernel on a "
        "GPU."
    )
