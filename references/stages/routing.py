"""Which expert a pair takes, which rank owns it, and where its row lies once pairs are sorted.

A pair is (token, k), in that order, P = M * k of them.  This is the project's one way of sorting
pairs by expert: the alignment, every padded buffer and the compiled reference are made from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moe_parity.references.arithmetic import random_bits
from moe_parity.references.language.case import Case, Routing, Values


def draw_ids(case: Case, device: str) -> Tensor:
    """Return global expert ids int32 [m, k]; a token's first ids do not depend on k."""
    seed, m, k, e = case.seed, case.m, case.k, case.e
    if case.routing in (Routing.ONE, Routing.LAST):
        own = case.first_expert
        own += case.local_experts - 1 if case.routing is Routing.LAST else 0
        return torch.full((m, k), own, dtype=torch.int32, device=device)
    if case.routing is Routing.NOBODY:
        count = case.local_experts
        start = (case.ep_rank + 1) % case.ep_size * count
        drawn = random_bits.integers(seed, "routing/id", m, k, below=count, device=device).int()
        return start + drawn if case.ep_size > 1 else torch.full_like(drawn, -1)
    if case.routing is Routing.REPEATED or k > e:
        return random_bits.integers(seed, "routing/id", m, k, below=e, device=device).int()
    score = random_bits.uniform(seed, "routing/score", m, e, device=device)
    if pairs_experts(case):
        pair = score[:, : e // 2].argsort(dim=1, stable=True)[:, : k // 2]
        ids = torch.cat([2 * pair, 2 * pair + 1], 1).int()
    else:
        ids = score.argsort(dim=1, stable=True)[:, :k].int().contiguous()
    if case.routing is Routing.HOLES:
        odd = random_bits.integers(seed, "routing/hole", m, k, below=6, device=device)
        strange = torch.tensor([-1, e, e + 7], dtype=torch.int32, device=device)
        ids = torch.where(odd < 3, strange[odd.clamp(max=2)], ids)
    return ids


def pairs_experts(case: Case) -> bool:
    """Whether a token's experts come in pairs that cancel."""
    return case.values is Values.AIMED and case.k % 2 == 0 and case.e >= case.k


def local_expert(ids: Tensor, first: int, experts: int) -> Tensor:
    """Return the local expert of each pair, int64 [P]; -1 where the rank does not own it.

    ``first`` is not negative, so that a negative id is never local.
    """
    local = ids.flatten().long() - first
    owned = (local >= 0) & (local < experts)
    return torch.where(owned, local, -1)


def expert_map(case: Case, device: str) -> Tensor | None:
    """Return the local expert of every global one, int32 [E], or None without ranks."""
    if case.ep_size == 1:
        return None
    every = torch.arange(case.e, dtype=torch.int32)
    return local_expert(every, case.first_expert, case.local_experts).int().to(device)


def pairs_of(tokens: Tensor, k: int) -> Tensor:
    """Return the pairs of some tokens, int64 [T * k]."""
    return (tokens[:, None] * k + torch.arange(k, device=tokens.device)).flatten()


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the rows of the experts lie in one buffer, each expert at a multiple of ``align``."""

    slot: Tensor
    """The buffer row of each pair, int64 [P]; -1 for pairs that are not owned."""
    starts: Tensor
    """The start of each expert, int32 [E]."""
    ends: Tensor
    """The exclusive end of each expert's live rows, int32 [E]."""
    align: int

    @cached_property
    def used(self) -> int:
        """Rows up to the last expert's padding; asking for it waits for a GPU."""
        return int(self.padded)

    @property
    def padded(self) -> Tensor:
        """The same as a tensor, int64 []."""
        return (-(-self.counts.long() // self.align) * self.align).sum()

    @property
    def bound(self) -> int:
        """The most rows that so many pairs can take, whichever experts they are of."""
        pairs, experts = self.slot.numel(), self.starts.numel()
        hit = min(pairs, experts)
        return (hit + (pairs - hit) // self.align) * self.align

    @property
    def counts(self) -> Tensor:
        """Live rows of each expert, int32 [E]."""
        return self.ends - self.starts

    def pairs(self) -> Tensor:
        """Return the pair in each buffer row, int64 [used]; P where there is none."""
        live = self.slot >= 0
        count = self.slot.numel()
        rows = torch.full((self.used,), count, dtype=torch.int64, device=self.slot.device)
        rows[self.slot[live]] = live.nonzero()[:, 0]
        return rows

    def block_expert(self) -> Tensor:
        """Return the expert of each block of ``align`` rows, int32 [used / align]."""
        blocks = -(-self.counts.long() // self.align)
        experts = torch.arange(self.counts.numel(), device=self.slot.device)
        return experts.repeat_interleave(blocks).int()


def place(expert: Tensor, experts: int, align: int) -> Placement:
    """Lay the rows of each expert one after the other, in the order of their pairs.

    ``expert`` int64 [P] is the local expert of each pair; any number that is none leaves it out.
    No value is looked at, so a call that places rows may be captured in a CUDA graph.
    """
    known = (expert >= 0) & (expert < experts)
    own = torch.where(known, expert, experts)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=expert.device)
    counts = counts.scatter_add_(0, own, torch.ones_like(own))[:experts]
    padded = -(-counts // align) * align
    starts = padded.cumsum(0) - padded
    order = torch.argsort(own, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device=order.device)
    own = own.clamp(max=max(experts - 1, 0))
    slot = rank - (counts.cumsum(0) - counts)[own] + starts[own]
    return Placement(
        slot=torch.where(known, slot, -1), starts=starts.int(),
        ends=(starts + counts).int(), align=align,
    )  # fmt: skip
