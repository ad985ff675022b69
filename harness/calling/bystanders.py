"""What stands where a GPU's memory was freed: a graph that still writes there writes into it.

A CPU's recording knows what was freed.  A CUDA graph keeps addresses, and the allocator keeps the
memory mapped: a graph that uses a workspace which its kernel has let go of gives the right bits,
and destroys whatever lies there by then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

MARK = 0xA5
"""The byte that they hold."""
MOST = 1 << 30
"""Bytes of all of them together."""


class Bystanders:
    """Tensors that take what the allocator has free."""

    def __init__(self, sizes: Sequence[int], device: str) -> None:
        """Take a tensor of each number of bytes, small ones first, as long as all fit."""
        self.tensors: list[Tensor] = []
        total = 0
        for size in sorted(sizes):
            total += size
            if total > MOST:
                break
            made = torch.full((size,), MARK, dtype=torch.uint8, device=device)
            self.tensors.append(made)

    @property
    def hit(self) -> int:
        """Bytes that somebody else has written by now; asking for it waits for a GPU."""
        return sum(int((tensor != MARK).sum()) for tensor in self.tensors)


def free_blocks(snapshot: Sequence[dict[str, Any]], stream: int) -> Iterator[int]:
    """Yield the sizes of free blocks of a stream, in bytes, those of graphs' own pools left out.

    ``snapshot`` is what ``torch.cuda.memory_snapshot()`` returns.
    """
    for segment in snapshot:
        if segment["stream"] != stream or tuple(segment["segment_pool_id"]) != (0, 0):
            continue
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                yield int(block["size"])


def bystanders() -> Bystanders:
    """Take what the current GPU's allocator has free."""
    stream = torch.cuda.current_stream().cuda_stream
    snapshot: Any = torch.cuda.memory_snapshot()
    return Bystanders(list(free_blocks(snapshot, stream)), "cuda")
