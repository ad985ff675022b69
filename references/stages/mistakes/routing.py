"""Mistakes about which expert and which row a pair takes, for every stage with pairs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

FEW = 8
"""Experts up to which each is tried for all of the others."""
ROOM = (16, 32, 64, 128, 256)
"""Pairs of an expert that a tile, a warp or a buffer of fixed size holds."""


def wrong_experts(
    expert: Tensor, ids: Tensor, experts: int, taken: str
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (name, words, the expert of each owned pair, int64 [P]); -1 stays for foreign ones.

    ``expert`` int64 [P] is the right one, ``ids`` [M, k] the global ids, ``experts`` how many this
    rank has.  ``taken`` goes on from an expert: what of it a stage takes.
    """
    owned = expert >= 0
    flat = ids.flatten().long()
    k = ids.shape[1]
    pairs = torch.arange(expert.numel(), device=expert.device)
    last = experts - 1
    after, before = f"the next expert{taken}", f"the previous expert{taken}"
    wrong: list[tuple[str, str, Tensor]] = [
        ("wrong_expert", after, (expert + 1) % experts),
        ("wrong_expert", before, (expert - 1) % experts),
        ("wrong_expert", f"{after}, up to the last,", (expert + 1).clamp(max=last)),
        ("wrong_expert", f"{before}, down to the first,", (expert - 1).clamp(min=0)),
        ("global_id", "the global id taken for the local one", flat % experts),
        ("global_id", "the global id taken for the local one, up to the last,",
         flat.clamp(0, last)),
        ("token_for_pair", "the expert of a token's first pair for all of them",
         expert[pairs // k * k]),
        ("wrong_expert", "the experts in the other order", last - expert),
        ("expert_of_neighbour", "the expert of the next pair", expert.roll(-1)),
        ("expert_of_neighbour", "the expert of the previous pair", expert.roll(1)),
    ]  # fmt: skip
    wrong += [
        ("wrong_expert", f"expert {one}{taken}", torch.full_like(expert, one))
        for one in (range(experts) if experts <= FEW else (0, last))
    ]
    wrong += [
        ("expert_of_tile", f"the expert of the first of every {tile} pairs",
         expert[pairs // tile * tile])
        for tile in (16, 32, 64)
    ]  # fmt: skip
    for name, words, other in wrong:
        made = torch.where(owned, other, -1)
        if bool((made != expert).any()) and bool((made[owned] >= 0).all()):
            yield name, words, made


def powers_below(experts: int) -> list[int]:
    """Return the powers of two from 2 on that are less than the number of experts."""
    return [1 << bit for bit in range(1, experts.bit_length()) if 1 << bit < experts]


def past_of_k(pairs: Tensor, k: int) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (name, words, mask of pairs) for a kernel that has room for some of a token's pairs."""
    for room in (4, 8, 16):
        if room < k:
            yield (
                "pair_lost",
                f"the pairs of a token past the first {room} left out",
                (pairs % k >= room),
            )


def past_of_expert(expert: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (name, words, mask of pairs) for a kernel that has room for some of an expert's."""
    rank = rank_of(expert)
    for room in ROOM:
        past = (rank >= room) & (expert >= 0)
        if bool(past.any()):
            yield "pair_lost", f"the pairs of an expert past the first {room} left out", past


def wrong_rows(source: Tensor, tokens: int, k: int) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (name, words, whose row each pair takes); ``source`` int64 [P] is right, of k ids."""
    if tokens < 2:
        return
    pair = torch.arange(source.numel(), device=source.device)
    for divisor in sorted({2, 4, 8, k} - {1}):
        other = (pair // divisor).clamp(max=tokens - 1)
        if divisor != source.numel() // tokens and bool((other != source).any()):
            yield "another_k", f"the row at a pair's number divided by {divisor}", other
    yield from (
        ("row_of_neighbour", "the row of the next token", (source + 1) % tokens),
        ("row_of_neighbour", "the row of the previous token", (source - 1) % tokens),
        ("pair_for_token", "a pair's number taken for its token's", pair % tokens),
        ("pair_for_token", "a pair's number taken for its token's, up to the last,",
         pair.clamp(max=tokens - 1)),
        ("one_row", "the first token's row for all", torch.zeros_like(pair)),
    )  # fmt: skip


def in_tiles(expert: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    """Return two pairs for each pair [P], both of its own expert.

    They are the first in its tile of the expert's rows, and that as many rows before as a tile has,
    itself where there is none.
    """
    order = torch.argsort(expert, stable=True)
    start, rank = torch.searchsorted(expert[order], expert), rank_of(expert)
    before = torch.where(rank < tile, rank, rank - tile)
    return order[start + rank // tile * tile], order[start + before]


def rank_of(expert: Tensor) -> Tensor:
    """Return how many pairs of its own expert stand before each pair, int64 [P]."""
    order = torch.argsort(expert, stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    return place - torch.searchsorted(expert[order], expert)


def second_ones(ids: Tensor, owned: Tensor) -> Tensor:
    """Return a mask [P] of owned pairs whose token takes the same expert once more before them."""
    same = ids[:, :, None] == ids[:, None, :]
    before = torch.ones(same.shape[1:], dtype=torch.bool, device=ids.device).tril(-1)
    return (same & before).any(2).flatten() & owned


def last_of_each(expert: Tensor, experts: int) -> Tensor:
    """Return a mask [P] of the last pair of each expert."""
    found = torch.zeros_like(expert, dtype=torch.bool)
    for index in range(experts):
        mine = (expert == index).nonzero()[:, 0]
        if mine.numel():
            found[mine[-1]] = True
    return found


def past_full_tiles(expert: Tensor, tile: int) -> Tensor:
    """Return a mask [P] of the pairs in the last, partly filled tile of their expert's rows."""
    found = torch.zeros_like(expert, dtype=torch.bool)
    for index in set(expert[expert >= 0].tolist()):
        mine = (expert == index).nonzero()[:, 0]
        found[mine[mine.numel() // tile * tile :]] = True
    return found
