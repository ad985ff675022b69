"""Mistakes of an alignment's blocks: their number, their order, and that of pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_parity.references.language.mistake import Mistake

if TYPE_CHECKING:
    from moe_parity.references.stages.align import RoutedRows

Count = Callable[[int], int]
"""Pairs of an expert -> blocks that it gets."""


def of_blocks(inputs: RoutedRows) -> Iterator[Mistake]:
    """Yield alignments with other blocks, or pairs of an expert in another order."""
    block = inputs.block
    counts: tuple[tuple[str, str, Count], ...] = (
        ("extra_block", "a block more for an expert whose pairs fill its blocks",
         lambda pairs: pairs // block + 1 if pairs else 0),
        ("extra_block", "a block more than the full ones for every expert",
         lambda pairs: pairs // block + 1),
        ("block_lost", "the partly filled block of an expert left out",
         lambda pairs: pairs // block),
        ("block_lost", "the partly filled block of an expert left out, unless it is the first,",
         lambda pairs: max(pairs // block, 1) if pairs else 0),
    )  # fmt: skip
    ways = [(name, words, partial(_laid, inputs, blocks=count)) for name, words, count in counts]
    ways += [
        ("expert_order", "experts from the last to the first",
         partial(_laid, inputs, experts=range(inputs.experts - 1, -1, -1))),
        ("pair_order", "an expert's even pairs before the odd ones",
         partial(_laid, inputs, pairs=_evens_first)),
    ]  # fmt: skip
    for name, words, made in ways:
        yield Mistake(name=name, words=words, outputs=made, local=False)


def _evens_first(pairs: Tensor) -> Tensor:
    return torch.cat([pairs[pairs % 2 == odd] for odd in (0, 1)])


def _laid(
    inputs: RoutedRows,
    *,
    blocks: Count | None = None,
    experts: range | None = None,
    pairs: Callable[[Tensor], Tensor] = lambda pairs: pairs,
) -> dict[str, Tensor]:
    """Return the blocks of one expert after the other."""
    block, count = inputs.block, inputs.expert.numel()
    names, slots = [], []
    for one in experts or range(inputs.experts):
        mine = pairs((inputs.expert == one).nonzero()[:, 0])
        many = blocks(mine.numel()) if blocks else -(-mine.numel() // block)
        own = torch.full((many * block,), count, device=mine.device)
        live = mine[: many * block]
        own[: live.numel()] = live
        names.append(torch.full((many,), one, device=mine.device))
        slots.append(own)
    return {"experts": torch.cat(names).int(), "slots": torch.cat(slots).int()}
