"""Mistakes of what only some quantizers have: words of four scales, and tiles with edges."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import BLOCK, bits_of, from_bits
from moe_parity.references.language.mistake import Mistake
from moe_parity.references.stages.mistakes.anywhere import Outputs, without
from moe_parity.references.stages.mistakes.groups import Groups

ORDERS = (
    ("from the last to the first", (3, 2, 1, 0)),
    ("with its halves swapped", (2, 3, 0, 1)),
    ("with the bytes of each half swapped", (1, 0, 3, 2)),
    ("with the two in the middle swapped", (0, 2, 1, 3)),
)
"""Orders of the bytes of a word."""


# --- words ---------------------------------------------------------------------------------------


def of_words(groups: Groups) -> Iterator[Mistake]:
    """Yield wrong bytes in words of four exponents."""
    if not groups.packed:
        return
    for words, order in ORDERS:
        yield Mistake(
            name="byte_order", words=f"the four exponents of a word {words}",
            outputs=groups.stored(partial(_reordered, groups, order)),
        )  # fmt: skip
    yield Mistake(
        name="mantissa_leak", words="the mantissa of an unrounded scale in the bytes below it",
        outputs=partial(_leaking, groups),
    )  # fmt: skip


def _in_words(groups: Groups, of_group: Tensor) -> Tensor:
    """Return a number of each group as [rows, words, 4], zeros for groups that do not exist."""
    down, across = groups.grid
    wide = torch.nn.functional.pad(of_group.view(down, across), (0, -across % 4))
    return wide.view(down, -1, 4)


def _reordered(groups: Groups, order: tuple[int, ...], scale: Tensor) -> Tensor:
    made = _in_words(groups, scale)[:, :, list(order)]
    return made.flatten(1)[:, : groups.grid[1]].reshape(-1)


def _leaking(groups: Groups) -> Outputs:
    amax = groups.amax()
    scale = groups.scale(amax)
    mantissa = bits_of(groups.scale(amax, power_of_two=False)) & 0x7FFFFF
    bits = _in_words(groups, (bits_of(scale) | mantissa).long())
    place = 8 * torch.arange(4, device=bits.device)
    # a word has the exponent of its group n in bits 8 n to 8 n + 7, and what lies below it there
    parts = (bits << place) >> 23
    word = parts[..., 0] | parts[..., 1] | parts[..., 2] | parts[..., 3]
    byte = (word[:, :, None] >> place) & 0xFF
    stored = from_bits((byte << 23).int()).flatten(1)[:, : groups.grid[1]]
    return groups.give(groups.codes(amax, scale), stored.reshape(-1))


# --- tiles ---------------------------------------------------------------------------------------


def of_tiles(groups: Groups) -> Iterator[Mistake]:
    """Yield groups of another size inside, and wrong edges of tiles."""
    high, wide = groups.shape
    sizes = [("half of a group", (1, wide // 2))]
    if high > 1:
        sizes = [("row of a tile", (1, wide)), ("64 rows of a tile", (64, wide))]
    for noun, size in sizes:
        if high % size[0] == 0 and size != groups.shape:
            for stored, first in (("the scale of it all", False), ("that of the first", True)):
                yield Mistake(
                    name="group_size", words=f"codes by a scale for each {noun}, {stored} stored,",
                    outputs=partial(_inside, groups, size, first),
                )  # fmt: skip
    if high == 1:
        return
    rows, columns = groups.right()["codes"].shape
    for noun, dim, extent in (("row", 0, rows), ("column", 1, columns)):
        whole = extent // BLOCK
        if extent % BLOCK and whole:
            yield Mistake(
                name="edge_lost", words=f"the last {noun} of tiles, not whole, left at zero",
                outputs=partial(_without_edge, groups, dim, whole), local=dim == 1,
            )  # fmt: skip
        if groups.grid[dim] > 1:
            yield Mistake(
                name="amax_of_neighbour", local=dim == 1,
                words=f"the maximum of the {noun} before for the last {noun} of tiles",
                outputs=groups.reduced(partial(_of_one_before, groups, dim)),
            )  # fmt: skip


def _inside(groups: Groups, size: tuple[int, int], first: bool) -> Outputs:
    """Return codes by scales of groups of another size, and one scale for all in a group."""
    count, high, wide = groups.rows.shape
    cut = groups.rows.view(count, high // size[0], size[0], wide // size[1], size[1])
    values = cut.transpose(2, 3).reshape(-1, size[0] * size[1])
    own = dataclasses.replace(groups, values=values, shape=size)
    scale = own.scale(own.amax())
    codes = own.codes(own.amax(), scale).view(*cut.transpose(2, 3).shape).transpose(2, 3)
    missing = groups.values.shape[1] - high * wide
    flat = torch.nn.functional.pad(codes.reshape(count, -1), (0, missing))
    return groups.give(flat, scale.view(count, -1)[:, 0] if first else groups.scale(groups.amax()))


def _without_edge(groups: Groups, dim: int, whole: int) -> Outputs:
    cuts = {"codes": slice(BLOCK * whole, None), "scales": slice(whole, None)}
    made = dict(groups.right())
    for name, cut in cuts.items():
        made[name] = without(made[name], (cut,) if dim == 0 else (slice(None), cut))
    return made


def _of_one_before(groups: Groups, dim: int, amax: Tensor) -> Tensor:
    last = groups.grid[dim] - 1
    index = torch.arange(last + 1, device=amax.device).clamp(max=max(last - 1, 0))
    return groups.on_grid(amax, partial(torch.index_select, dim=dim, index=index))
