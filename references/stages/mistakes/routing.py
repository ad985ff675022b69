"""Mistakes about which expert a pair takes and which rank owns it, for every stage with pairs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def wrong_experts(
    expert: Tensor, ids: Tensor, first: int, experts: int
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (name, words, the expert of each owned pair, int64 [P]); -1 stays for foreign ones.

    ``expert`` int64 [P] is the right one, ``ids`` [M, k] the global ids, ``first`` the global id of
    this rank's expert 0, ``experts`` how many it has.
    """
    owned = expert >= 0
    flat = ids.flatten().long()
    k = ids.shape[1]
    pairs = torch.arange(expert.numel(), device=expert.device)
    last = experts - 1
    wrong: list[tuple[str, str, Tensor]] = [
        ("wrong_expert", "the next expert's weights", (expert + 1) % experts),
        ("wrong_expert", "the previous expert's weights", (expert - 1) % experts),
        ("wrong_expert", "the next expert's weights, up to the last,", (expert + 1).clamp(max=last)),
        ("wrong_expert", "the previous expert's weights, down to the first,", (expert - 1).clamp(min=0)),
        ("one_expert", "the first expert's weights for all", torch.zeros_like(expert)),
        ("one_expert", "the last expert's weights for all", torch.full_like(expert, last)),
        ("global_id", "the global id taken for the local one", flat % max(experts, 1)),
        ("global_id", "the global id taken for the local one, up to the last,", flat.clamp(0, last)),
        ("token_for_pair", "the expert of a token's first pair for all of them", expert[pairs // k * k]),
        ("wrong_expert", "the experts in the other order", last - expert),
    ]  # fmt: skip
    for step, side in ((1, "next"), (-1, "previous")):
        near = expert.roll(-step)
        wrong.append(("expert_of_neighbour", f"the expert of the {side} pair", near))
    for name, words, other in wrong:
        made = torch.where(owned, other, -1)
        if bool((made != expert).any()) and bool((made[owned] >= 0).all()):
            yield name, words, made


def second_ones(ids: Tensor, owned: Tensor) -> Tensor:
    """Return a mask [P] of owned pairs whose token takes the same expert once more before them."""
    same = ids[:, :, None] == ids[:, None, :]
    before = torch.ones_like(same[0]).tril(-1)
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
    for index in expert[expert >= 0].unique().tolist():
        mine = (expert == index).nonzero()[:, 0]
        found[mine[mine.numel() // tile * tile :]] = True
    return found
