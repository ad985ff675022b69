"""Rows by expert for the tests of the prefix-sum kernels, laid out in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import E4M3

POISON = {torch.uint8: E4M3.nan, torch.int32: -77}
"""What memory holds before a call; NaN where the type has one."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Where every row has to lie."""

    ends: list[int]
    place: list[int]

    def live(self, rows: int, device: str = "cpu") -> Tensor:
        """Return which rows of a buffer are live."""
        mask = torch.zeros(rows, dtype=torch.bool, device=device)
        mask[[row for row in self.place if row >= 0]] = True
        return mask


def expected(ids: Sequence[int], first: int, experts: int, alignment: int) -> Expected:
    """Lay pairs out one after the other, an expert at a time, starts rounded up."""
    ends, place, row = [], [-1] * len(ids), 0
    for expert in range(experts):
        while row % alignment:
            row += 1
        for pair, number in enumerate(ids):
            if number - first == expert:
                place[pair] = row
                row += 1
        ends.append(row)
    return Expected(ends=ends, place=place)


def poison(tensor: Tensor) -> Tensor:
    """Overwrite a tensor, its own elements alone; return it."""
    return tensor.fill_(POISON.get(tensor.dtype, float("nan")))


def poisoned(
    shape: Sequence[int], dtype: torch.dtype, device: str, strides: Sequence[int] | None = None
) -> Tensor:
    """Return poison."""
    steps = strides or torch.empty(tuple(shape), device="meta").stride()
    return poison(torch.empty_strided(tuple(shape), tuple(steps), dtype=dtype, device=device))


def as_bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bits as integers of its size, row-major."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def untouched(tensor: Tensor, live: Tensor) -> bool:
    """Whether the rows that are not live hold the poison, bit for bit."""
    rest = tensor[~live]
    return torch.equal(as_bits(rest), as_bits(poison(torch.empty_like(rest))))
