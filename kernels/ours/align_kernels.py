"""Triton kernels that sort (token, k) pairs into blocks of one expert each.

A pair that this rank does not own appears in no block.  Inside an expert the pairs keep their
order, and nothing is atomic, so the layout is a function of the ids alone.  ``slots`` holds pair
numbers, ``pairs`` where a block is not full; ``block_expert`` holds -1 past the last block.
"""

# Triton kernels have no Python types: their arguments are pointers and compile-time constants.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def local_expert(ids_ptr, pair, live, first, experts):
    """Return the local expert of pairs, -1 for what this rank does not own.

    ``first`` is never negative, so that -1, an id that is nobody's, stays below every local expert;
    pairs that are not live have it as well.
    """
    local = tl.load(ids_ptr + pair, mask=live, other=-1).to(tl.int64) - first
    owned = (local >= 0) & (local < experts)
    return tl.where(owned, local, -1).to(tl.int32)


@triton.jit(do_not_specialize=["pairs", "first", "experts", "blocks"])
def align_small_kernel(
    ids_ptr, slots_ptr, block_expert_ptr, pairs, first, experts, blocks,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Align up to PAIRS pairs in one program, every pair compared with every other.

    PAIRS is the only size that is compiled in: there are never more blocks than pairs.
    """
    i = tl.arange(0, PAIRS)
    mine = local_expert(ids_ptr, i, i < pairs, first, experts)
    j = tl.arange(0, PAIRS)
    other = local_expert(ids_ptr, j, j < pairs, first, experts)
    same = (mine[:, None] == other[None, :]) & (other[None, :] >= 0)
    rank = tl.sum((same & (j[None, :] < i[:, None])).to(tl.int32), 1)
    count = tl.sum(same.to(tl.int32), 1)
    # The same two numbers laid out along the other axis.
    rank_j = tl.sum((same & (i[:, None] < j[None, :])).to(tl.int32), 0)
    count_j = tl.sum(same.to(tl.int32), 0)
    leads_j = (other >= 0) & (rank_j == 0)
    blocks_j = tl.where(leads_j, (count_j + BLOCK - 1) // BLOCK, 0)
    start = tl.sum(tl.where(other[None, :] < mine[:, None], blocks_j[None, :], 0), 1)
    owned = mine >= 0
    tl.store(slots_ptr + start * BLOCK + rank, i, mask=owned)
    tl.store(block_expert_ptr + start + rank // BLOCK, mine, mask=owned & (rank % BLOCK == 0))
    used = (count + BLOCK - 1) // BLOCK
    lane = (used[:, None] - 1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    empty = (owned & (rank == 0))[:, None] & (lane >= count[:, None])
    tl.store(slots_ptr + start[:, None] * BLOCK + lane, pairs + 0 * lane, mask=empty)
    block = tl.arange(0, PAIRS)
    spare = (block >= tl.sum(blocks_j, 0)) & (block < blocks)
    tl.store(block_expert_ptr + block, -1 + 0 * block, mask=spare)


@triton.jit(do_not_specialize=["pairs", "first", "experts"])
def count_kernel(ids_ptr, counts_ptr, pairs, first, experts, TILE: tl.constexpr):
    """Count the pairs of one expert: grid (experts,)."""
    expert = tl.program_id(0)
    count = tl.zeros((TILE,), tl.int32)
    for start in range(0, pairs, TILE):
        pair = start + tl.arange(0, TILE)
        mine = local_expert(ids_ptr, pair, pair < pairs, first, experts)
        count += (mine == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(count, 0))


@triton.jit(do_not_specialize=["experts", "blocks"])
def prefix_kernel(
    counts_ptr, starts_ptr, block_expert_ptr, experts, blocks,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Turn counts into each expert's first block, and mark the blocks past the last one."""
    lane = tl.arange(0, TILE)
    total = tl.zeros((1,), tl.int32)
    for start in range(0, experts, TILE):
        expert = start + lane
        count = tl.load(counts_ptr + expert, mask=expert < experts, other=0)
        used = (count + BLOCK - 1) // BLOCK
        ends = tl.cumsum(used, 0)
        tl.store(starts_ptr + expert, total + ends - used, mask=expert < experts)
        total += tl.sum(used, 0)
    for start in range(0, blocks, TILE):
        block = start + lane
        spare = (block < blocks) & (block >= total)
        tl.store(block_expert_ptr + block, -1 + 0 * block, mask=spare)


@triton.jit(do_not_specialize=["pairs", "first", "experts"])
def place_kernel(
    ids_ptr, counts_ptr, starts_ptr, slots_ptr, block_expert_ptr, pairs, first, experts,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Place the pairs of one expert in their order: grid (experts,)."""
    expert = tl.program_id(0)
    count = tl.load(counts_ptr + expert)
    start = tl.load(starts_ptr + expert)
    base = slots_ptr + start.to(tl.int64) * BLOCK
    seen = tl.zeros((1,), tl.int32)
    for tile in range(0, pairs, TILE):
        pair = tile + tl.arange(0, TILE)
        mine = local_expert(ids_ptr, pair, pair < pairs, first, experts) == expert
        ends = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(base + seen + ends - 1, pair, mask=mine)
        seen += tl.sum(mine.to(tl.int32), 0)
    used = (count + BLOCK - 1) // BLOCK
    # Without pairs there is no last block: its lanes lie before the first one, below the count.
    lane = (used - 1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(base + lane, pairs + 0 * lane, mask=lane >= count)
    for first_block in range(0, used, BLOCK):
        block = first_block + tl.arange(0, BLOCK)
        tl.store(block_expert_ptr + start + block, expert + 0 * block, mask=block < used)
