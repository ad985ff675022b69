"""What a kernel may do wrong to memory, as the virtual GPU sees it happen."""

from __future__ import annotations

from typing import ClassVar


class MemoryFault(Exception):
    """An access that no kernel may make; the launch ends with it.

    The text says kernel, line, program or programs, tensor and element, and what to do.
    """

    name: ClassVar[str] = ""
    """What reports call it: ``race``, ``unwritten_read``, ``out_of_bounds``."""


class OutOfBounds(MemoryFault):
    """An unmasked lane read or wrote outside the tensors handed to the kernel."""

    name = "out_of_bounds"


class Race(MemoryFault):
    """Two programs, or two lanes, touch the same byte in no order, one of them writing."""

    name = "race"


class UnwrittenRead(MemoryFault):
    """An unmasked lane read memory that nobody has written."""

    name = "unwritten_read"
