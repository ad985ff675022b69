"""The memory of one tensor argument of a launch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]


@dataclass(eq=False)
class Region:
    """The bytes of one tensor argument: ``[start, stop)``."""

    name: str
    tensor: torch.Tensor
    start: int = 0
    stop: int = 0
    views: dict[Any, tuple[int, Array]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Measure the tensor."""
        t = self.tensor
        self.start = self.stop = t.data_ptr()
        if t.numel():
            last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            self.stop += (last + 1) * t.element_size()

    def elements(self, kind: np.dtype[Any]) -> tuple[int, Array]:
        """Return (address, array) of this memory as elements of ``kind``, the address aligned."""
        if kind not in self.views:
            origin = self.start - self.start % kind.itemsize
            count = (self.stop - origin) // kind.itemsize
            raw = (ctypes.c_char * (count * kind.itemsize)).from_address(origin)
            self.views[kind] = origin, np.frombuffer(memoryview(raw), dtype=kind)
        return self.views[kind]

    def element(self, address: int) -> str:
        """Name the element that an address belongs to: ``element [3, 0] of scales (...)``."""
        size, shape = self.tensor.element_size(), self.tensor.shape
        left, index = (address - self.start) // size, [0] * len(shape)
        for n in sorted(range(len(shape)), key=self.tensor.stride, reverse=True):
            if shape[n] > 1 and self.tensor.stride(n):
                index[n] = min(left // self.tensor.stride(n), shape[n] - 1)
                left -= index[n] * self.tensor.stride(n)
        if left:
            return f"byte {address - self.start}, between the elements, of {self}"
        return f"element {index} of {self}"

    def __str__(self) -> str:
        """Describe the tensor for an error message."""
        return f"{self.name} ({str(self.tensor.dtype)[6:]} {list(self.tensor.shape)})"
