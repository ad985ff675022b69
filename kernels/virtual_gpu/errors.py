"""What the virtual GPU raises; every message is a sentence that says what, where and what to do."""

from __future__ import annotations


class UnmodelledOperation(Exception):
    """An operation that has no exact model of the H200: the launch stops rather than guess."""


class OutOfBounds(Exception):
    """An unmasked lane read or wrote outside the tensors handed to the kernel."""
