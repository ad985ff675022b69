"""Triton kernels that lay quantized rows out by expert: ends, places, and the copy.

An expert's rows start at the end of the one before, rounded up to ALIGN; ``ends`` are exclusive
ends of live rows, as DeepGEMM's prefix-sum layout has them.  Inside an expert the pairs keep their
order, and nothing is atomic, so the layout is a function of the ids alone.  Rows between an end and
the next start are not written.
"""

# Triton kernels have no Python types: their arguments are pointers and compile-time constants.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from moe_parity.kernels.ours.align_kernels import local_expert
from moe_parity.kernels.ours.quant_kernels import packed_byte


@triton.jit
def start_of(ends_ptr, expert, inside, ALIGN: tl.constexpr):
    """Return the first row of experts: the end before, rounded up; 0 where not ``inside``."""
    end = tl.load(ends_ptr + expert - 1, mask=inside & (expert > 0), other=0)
    return (end + ALIGN - 1) // ALIGN * ALIGN


@triton.jit(do_not_specialize=["experts"])
def ends_kernel(ends_ptr, experts, ALIGN: tl.constexpr, TILE: tl.constexpr):
    """Turn counts into the ends of each expert's live rows, in place: grid (1,)."""
    total = tl.zeros((1,), tl.int32)
    for start in range(0, experts, TILE):
        expert = start + tl.arange(0, TILE)
        count = tl.load(ends_ptr + expert, mask=expert < experts, other=0)
        room = (count + ALIGN - 1) // ALIGN * ALIGN
        before = total + tl.cumsum(room, 0) - room
        tl.store(ends_ptr + expert, before + count, mask=expert < experts)
        total += tl.sum(room, 0)


@triton.jit(do_not_specialize=["pairs", "first", "experts"])
def place_kernel(
    ids_ptr, ends_ptr, place_ptr, pairs, first, experts, ALIGN: tl.constexpr, TILE: tl.constexpr
):
    """Give the pairs of one expert their rows, in their order: grid (experts,).

    The first program gives -1 to the pairs that this rank does not own.
    """
    expert = tl.program_id(0)
    row = start_of(ends_ptr, expert, True, ALIGN)
    for start in range(0, pairs, TILE):
        pair = start + tl.arange(0, TILE)
        owner = local_expert(ids_ptr, pair, pair < pairs, first, experts)
        mine = owner == expert
        rank = tl.cumsum(mine.to(tl.int32), 0)
        nobody = (owner < 0) & (pair < pairs) & (expert == 0)
        tl.store(place_ptr + pair, tl.where(mine, row + rank - 1, -1), mask=mine | nobody)
        row += tl.sum(mine.to(tl.int32), 0)


@triton.jit(
    do_not_specialize=["scales_row", "scales_column", "laid_scales_row", "laid_scales_column"]
)
def copy_kernel(
    codes_ptr, scales_ptr, place_ptr, laid_ptr, laid_scales_ptr,
    codes_row, scales_row, scales_column, laid_row, laid_scales_row, laid_scales_column,
    WIDTH: tl.constexpr, TOPK: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Copy COLUMNS codes of a token and their scales to its rows: grid (tokens, WIDTH / COLUMNS).

    PACKED: four power-of-two scales are one word of exponents; bytes of groups that do not exist
    are 0.  A token without a row is not read.
    """
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    rows = tl.load(place_ptr + token * TOPK + lane, mask=lane < TOPK, other=-1)
    if tl.max(rows, 0) < 0:
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    code = tl.load(codes_ptr + token * codes_row + column, mask=inside, other=0)
    groups: tl.constexpr = WIDTH // 128
    parts: tl.constexpr = 4 if PACKED else 1
    across: tl.constexpr = COLUMNS // 128 // parts
    word = tl.program_id(1) * across + tl.arange(0, across)
    exists = word * parts < groups
    from_ptr = scales_ptr + token * scales_row
    if PACKED:
        held = tl.zeros((across,), tl.int32)
        for part in tl.static_range(parts):
            group = word * parts + part
            place = from_ptr + group.to(tl.int64) * scales_column
            scale = tl.load(place, mask=group < groups, other=0.0)
            held |= packed_byte(scale, group < groups) << (8 * part)
    else:
        held = tl.load(from_ptr + word.to(tl.int64) * scales_column, mask=exists, other=0.0)
    for slot in tl.static_range(TOPK):
        row = tl.load(place_ptr + token * TOPK + slot).to(tl.int64)
        live = row >= 0
        tl.store(laid_ptr + row * laid_row + column, code, mask=inside & live)
        to = laid_scales_ptr + row * laid_scales_row + word.to(tl.int64) * laid_scales_column
        tl.store(to, held, mask=exists & live)
