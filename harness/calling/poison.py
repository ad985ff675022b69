"""Poisoned outputs: what a kernel wrote, what it left, and what it touched beside its outputs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_parity.kernels.written import unwritten

GUARD = 4096
"""Bytes of poison before and after every output; keeps 16-byte alignment."""

POISONS = (0xFF, 0x5C)
"""Two fills: what equals its fill under both was not written.  The first is a NaN."""

ZEROS = 0
"""A third: a test for zero comes out the same under both poisons, which hold none."""

SCRATCH = {0xFF: 0xFF, 0x5C: 0x3A, ZEROS: ZEROS}
"""The fill of memory that is no output, under each poison: copied from there it is another byte."""

OWN = (0x3B, 0x36, 0x3D, 0x33, 0x39, 0x3E, 0x31)
"""Fills of what a kernel takes by itself, in turn, under the second poison.

As POISONS[1] and SCRATCH they are small positive numbers in every float format, FP8 too, and large
integers: an index read from there is out of range.  In turn, so that a copy is not taken for an
element that was left."""


def fills(poison: int) -> frozenset[int]:
    """Return the bytes that memory which nobody has written may hold under a poison."""
    return frozenset({poison, SCRATCH[poison], *(OWN if poison == POISONS[1] else ())})


def own_fill(poison: int, number: int, dtype: torch.dtype) -> int:
    """Return the fill of a kernel's own allocation ``number``; a bool is true once, then false."""
    if dtype is torch.bool:
        return int(poison == POISONS[0])
    return OWN[number % len(OWN)] if poison == POISONS[1] else poison


@dataclass(kw_only=True)
class Output:
    """One output with its surroundings."""

    name: str
    view: Tensor
    storage: Tensor
    """The whole allocation, uint8 [bytes]."""
    poison: int
    owned: int
    """Bytes from the view's start to its last element."""
    tail: int
    """Bytes after them that pad the last row of the layout."""

    def written_bytes(self) -> Tensor:
        """Return a mask over the storage: bytes that belong to the view."""
        size = self.view.element_size()
        mask = torch.zeros(self.storage.numel() // size, dtype=torch.bool)
        offset = GUARD // size
        mask.as_strided(self.view.shape, self.view.stride(), offset).fill_(True)
        return mask.repeat_interleave(size)

    def trespass(self, pads_zero: bool) -> int | None:
        """Return the byte offset, relative to the output, of a wrong byte beside it, or None.

        Guards and gaps must be as they were; with ``pads_zero`` the gaps must be zeros instead, and
        what pads the last row may be.
        """
        storage = self.storage.cpu()
        wrong = ~self.written_bytes()
        end = GUARD + self.owned
        inside, last = torch.zeros_like(wrong), torch.zeros_like(wrong)
        inside[GUARD:end] = last[end : end + self.tail] = pads_zero
        wrong &= torch.where(inside, storage != 0, storage != self.poison)
        wrong &= ~(last & (storage == 0))
        return int(wrong.nonzero()[0, 0]) - GUARD if bool(wrong.any()) else None


@dataclass(kw_only=True)
class PoisonedAllocator:
    """An allocator whose outputs lie in poison: guards, stride gaps, padding, the output itself."""

    device: str
    poison: int
    names: Collection[str]
    """What the stage's outputs are called; anything else is scratch memory."""
    outputs: list[Output] = field(default_factory=list)

    def __call__(
        self, name: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """Return a tensor of that geometry whose storage, gaps and guards hold the poison."""
        size = torch.empty(0, dtype=dtype).element_size()
        extent = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1
        extent = max(extent, 0) if all(shape) else 0
        # A layout with a longer row owns the padding after its last row as well.
        pad = -extent % max(strides, default=1) if extent else 0
        count = GUARD + -(-(extent + pad) * size // 16) * 16 + GUARD
        fill = self.poison if name in self.names else SCRATCH[self.poison]
        storage = torch.full((count,), fill, dtype=torch.uint8, device=self.device)
        unwritten(storage, fill)
        view = storage.view(dtype).as_strided(shape, strides, GUARD // size)
        self.outputs.append(
            Output(
                name=name,
                view=view,
                storage=storage,
                poison=fill,
                owned=extent * size,
                tail=pad * size,
            )
        )
        return view
