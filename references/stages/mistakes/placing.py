"""Mistakes of alignment and permutation: whose pair is whose, slots, blocks, counts, copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_parity.references.language.mistake import Mistake
from moe_parity.references.stages.mistakes import routing
from moe_parity.references.stages.mistakes.anywhere import (
    Change,
    Outputs,
    changed,
    contiguous_reading,
    reread,
    shifts,
    stored_as,
    without,
)
from moe_parity.references.stages.mistakes.geometry import Some, extremes, misread
from moe_parity.references.stages.mistakes.placing_blocks import of_blocks
from moe_parity.references.stages.routing import place

if TYPE_CHECKING:
    from moe_parity.references.stages.align import RoutedRows

Reference = Callable[["RoutedRows"], Outputs]
BLOCKS = (16, 32, 64, 128, 8)


def of_routing(inputs: RoutedRows, reference: Reference) -> Iterator[Mistake]:
    """Yield what alignment and permutation may do wrong alike: whose pair is whose."""
    for name, words, expert in (*_lost(inputs), *_foreign(inputs), *_taken(inputs)):
        if bool((expert != inputs.expert).any()):
            other = dataclasses.replace(inputs, expert=expert)
            yield Mistake(name=name, words=words, outputs=partial(reference, other), local=False)
    yield from misread(inputs, reference, {"ids": "ids"})


Wrong = Iterator[tuple[str, str, Tensor]]
"""(name, words, the expert of each pair, int64 [P])."""


def _lost(inputs: RoutedRows) -> Wrong:
    """Yield pairs left out."""
    expert, k = inputs.expert, inputs.ids.shape[1]
    pair = torch.arange(expert.numel(), device=expert.device)
    masks = (
        ("duplicate_lost", "a token's second pair with the same expert left out",
         routing.second_ones(inputs.ids, expert >= 0)),
        ("pair_lost", "the last pair of each expert left out",
         routing.last_of_each(expert, inputs.experts)),
        ("pair_lost", "the last pair left out", pair == expert.numel() - 1),
        ("pair_lost", "the first pair left out", pair == 0),
        ("pair_lost", "the last pair of each token left out", pair % k == k - 1),
        ("last_expert_lost", "the last expert's pairs left out", expert == inputs.experts - 1),
        ("first_expert_lost", "expert 0's pairs left out", expert == 0),
        *(("pair_lost", f"the pairs of tokens from {token} on left out", pair // k >= token)
          for token in (32, 33, 64, 65)),
        *(("expert_lost", f"the pairs of experts from {power} on left out", expert >= power)
          for power in routing.powers_below(inputs.experts)),
        *routing.past_of_k(pair, k),
        *routing.past_of_expert(expert),
    )  # fmt: skip
    for name, words, mask in masks:
        yield name, words, torch.where(mask, -1, expert)


def _foreign(inputs: RoutedRows) -> Wrong:
    """Yield pairs of nobody, or of another rank, that an expert gets."""
    ids, last = inputs.ids.flatten().long(), inputs.experts - 1
    local, none, negative = ids - inputs.first, inputs.expert < 0, ids < 0
    masks = (
        ("pairs whose id is negative given to the last expert", negative, last),
        ("pairs whose id is negative given to expert 0", negative, 0),
        ("pairs whose id lies past the end given to the last expert", local > last, last),
        ("pairs that nobody owns given to the nearest expert", none, local.clamp(0, last)),
        ("pairs that nobody owns given to expert 0", none, 0),
        ("pairs that nobody owns given to the last expert", none, last),
    )
    for words, mask, given in masks:
        yield "foreign_pair", words, torch.where(mask, given, inputs.expert)
    in_range = (ids >= 0) & (ids <= last)
    ignored = [
        ("global ids taken for local ones", in_range, ids),
        ("global ids taken modulo the rank's experts", ids >= 0, ids % inputs.experts),
    ]
    if inputs.first:
        ignored += [
            (f"the rank's first expert taken one too {size}", (other >= 0) & (other <= last), other)
            for size, other in (("small", local + 1), ("large", local - 1))
        ]
    for words, mask, given in ignored:
        yield "rank_ignored", words, torch.where(mask, given, -1)
    if inputs.expert_map is not None:
        ends = torch.where(ids < 0, -1, ids.clamp(max=inputs.expert_map.numel() - 1))
        words = "ids outside of the map of experts read at its end"
        yield "foreign_pair", words, inputs.expert_map.long()[ends]


def _taken(inputs: RoutedRows) -> Wrong:
    """Yield pairs given to other experts."""
    yield from routing.wrong_experts(inputs.expert, inputs.ids, inputs.experts, " taken")
    for power in routing.powers_below(inputs.experts):
        cut = torch.where(inputs.expert < 0, -1, inputs.expert % power)
        yield "expert_cut", f"experts modulo {power}", cut


# --- alignment ----------------------------------------------------------------------------------


def of_align(inputs: RoutedRows, reference: Reference) -> Iterator[Mistake]:
    """Yield what an alignment may do wrong."""
    yield from of_routing(inputs, reference)
    right = partial(reference, inputs)
    for block in BLOCKS:
        if block != inputs.block:
            yield Mistake(
                name="block_size", words=f"blocks of {block} rows instead of {inputs.block}",
                outputs=partial(reference, dataclasses.replace(inputs, block=block)), local=False,
            )  # fmt: skip
    for name, words, change in _wrong_slots(inputs):
        yield Mistake(name=name, words=words, outputs=changed(right, change, "slots"), local=False)
    experts: tuple[tuple[str, str, Change], ...] = (
        ("off_by_one", "the next expert named for every block", lambda e: e + 1),
        ("off_by_one", "the previous expert named for every block", lambda e: e - 1),
        ("expert_of_neighbour", "the next expert named for all but an expert's first block",
         _after_the_first),
        *(("experts_lost", f"experts named for the first {count} blocks alone, zeros after them,",
           partial(without, index=slice(count, None)))
          for count in (4, 8)),
        ("expert_of_neighbour", "the expert of the next block named", lambda e: e.roll(-1)),
        ("expert_of_neighbour", "the expert of the previous block named", lambda e: e.roll(1)),
        ("global_id", "global ids named for the blocks", lambda e: e + inputs.first),
        ("one_expert", "expert 0 named for all blocks", torch.zeros_like),
        ("no_expert", "no expert (-1) named for the blocks", lambda e: torch.full_like(e, -1)),
    )  # fmt: skip
    for name, words, change in experts:
        yield Mistake(
            name=name, words=words, outputs=changed(right, change, "experts"), local=False
        )
    yield from of_blocks(inputs)
    yield Mistake(
        name="empty_expert", words="a block of padding for each expert without a pair", local=False,
        outputs=partial(_with_empty, inputs),
    )  # fmt: skip
    yield Mistake(
        name="pair_lost", words="slots of padding before an expert's first pair", local=False,
        outputs=changed(right, partial(_flipped_blocks, block=inputs.block), "slots"),
    )  # fmt: skip


def _after_the_first(experts: Tensor) -> Tensor:
    again = torch.zeros_like(experts, dtype=torch.bool)
    again[1:] = experts[1:] == experts[:-1]
    return torch.where(again, experts + 1, experts)


def _wrong_slots(inputs: RoutedRows) -> Iterator[tuple[str, str, Change]]:
    """Yield (name, words, a change of the slots)."""
    pairs, k = inputs.expert.numel(), inputs.ids.shape[1]
    tokens = inputs.ids.shape[0]
    more = f"empty slots that hold {pairs + 1}, one more than the pairs,"

    def empty(number: int) -> Change:
        return lambda slots: torch.where(slots < pairs, slots, number)

    def filled(change: Change) -> Change:
        return lambda slots: torch.where(slots < pairs, change(slots), slots)

    if place(inputs.expert, inputs.experts, inputs.block).used > int((inputs.expert >= 0).sum()):
        yield "padding", more, empty(pairs + 1)
        for number in dict.fromkeys((0, -1, pairs - 1, tokens, tokens - 1, k, inputs.experts)):
            if number < pairs:
                yield "padding", f"empty slots that hold {number}", empty(number)
    ways: tuple[tuple[str, str, Change], ...] = (
        ("token_for_pair", "tokens in the slots instead of pairs", filled(lambda s: s // k)),
        ("token_for_pair", "tokens in the slots instead of pairs, their number in empty ones,",
         lambda s: torch.where(s < pairs, s // k, pairs // k)),
        ("pair_order", "pairs numbered k first, in the places of the others,",
         filled(lambda s: s % k * tokens + s // k)),
        ("pair_order", "an expert's pairs in the order of k, then of tokens,",
         partial(_by_k, inputs)),
        ("pair_order", "an expert's pairs from the last to the first",
         lambda s: _backwards(inputs)),
        ("off_by_one", "every pair's number one too large", filled(lambda s: s + 1)),
        ("off_by_one", "every slot one too far", lambda s: s.roll(1)),
        ("off_by_one", "every slot one too early", lambda s: s.roll(-1)),
    )  # fmt: skip
    yield from ways


def _by_k(inputs: RoutedRows, slots: Tensor) -> Tensor:
    """Return the slots of pairs that are numbered k first."""
    tokens, k = inputs.ids.shape
    expert = inputs.expert.view(tokens, k).t().flatten()
    placed = place(expert, inputs.experts, inputs.block)
    pair = placed.pairs()
    swapped = torch.where(
        pair < expert.numel(), pair % max(tokens, 1) * k + pair // max(tokens, 1), pair
    )
    return swapped.to(slots.dtype)


def _backwards(inputs: RoutedRows) -> Tensor:
    count = inputs.expert.numel()
    pair = place(inputs.expert.flip(0), inputs.experts, inputs.block).pairs()
    return torch.where(pair < count, count - 1 - pair, pair).int()


def _flipped_blocks(slots: Tensor, block: int) -> Tensor:
    return slots.view(-1, block).flip(1).flatten()


def _with_empty(inputs: RoutedRows) -> dict[str, Tensor]:
    """Return an alignment in which no expert has less than a block."""
    count = inputs.expert.numel()
    every = torch.arange(inputs.experts, device=inputs.expert.device)
    missing = every[~torch.isin(every, inputs.expert)]
    placed = place(torch.cat([inputs.expert, missing]), inputs.experts, inputs.block)
    return {"experts": placed.block_expert(), "slots": placed.pairs().clamp(max=count).int()}


# --- permutation --------------------------------------------------------------------------------


def of_permute(inputs: RoutedRows, reference: Reference, some: Some) -> Iterator[Mistake]:
    """Yield what a permutation may do wrong; ``some`` gives the inputs of a few tokens."""
    right = partial(reference, inputs)
    yield from _of_copies(inputs, reference, some)
    for name, words, change in _wrong_counts(inputs):
        yield Mistake(name=name, words=words, outputs=changed(right, change, "counts"), local=False)
    masks = [
        ("duplicate_lost", "a token's second pair with the same expert left at zero",
         routing.second_ones(inputs.ids, inputs.expert >= 0)),
        ("pair_lost", "the last pair of each expert left at zero",
         routing.last_of_each(inputs.expert, inputs.experts)),
    ]  # fmt: skip
    rank = routing.rank_of(inputs.expert)
    masks += [
        ("tile_lost", f"the rows of an expert from {tile} on left at zero",
         (inputs.expert >= 0) & (rank >= tile))
        for tile in (16, 32, 64)
    ]  # fmt: skip
    for name, words, mask in masks:
        if bool(mask.any()):
            yield Mistake(
                name=name, words=words, local=False,
                outputs=changed(right, partial(without, index=mask), "codes", "scales"),
            )  # fmt: skip
    for count in (16, 32, 64, 128):
        if inputs.codes.shape[1] > count:
            cut = (slice(None), slice(-count, None))
            yield Mistake(
                name="last_columns_lost", words=f"the last {count} columns of codes left at zero",
                outputs=changed(right, partial(without, index=cut), "codes"),
            )  # fmt: skip
    yield from of_routing(inputs, reference)


def _of_copies(inputs: RoutedRows, reference: Reference, some: Some) -> Iterator[Mistake]:
    """Yield copies of other rows, and rows with other scales."""
    tokens, k = inputs.ids.shape
    source = torch.arange(tokens * k, device=inputs.ids.device) // k
    for name, words, other in routing.wrong_rows(source, tokens, k):
        for names, what in (
            (("codes", "scales"), ""),
            (("scales",), ", of the scales alone,"),
            (("codes",), ", of the codes alone,"),
        ):
            yield Mistake(
                name=name, words=words.rstrip(",") + what if what else words, local=False,
                outputs=partial(_moved, inputs, reference, other, names),
            )  # fmt: skip
    scales = [
        ("scale_of_neighbour", f"the scale of the {side} group", other, own)
        for side, other, own in shifts(inputs.scales, 1)
    ]
    scales += [
        ("transposed_scales", "transposed scales", reread(inputs.scales), False),
        ("transposed_scales", "transposed scales (column-major memory)",
         stored_as(inputs.scales), False),
        ("scales_lost", "the last scale of a row left at zero",
         without(inputs.scales, (slice(None), slice(-1, None))), True),
        ("no_scales", "no scales", torch.ones_like(inputs.scales), True),
    ]  # fmt: skip
    scales += [(*wrong, True) for wrong in extremes("activations", inputs.scales)]
    for name, words, other, own in scales:
        yield Mistake(
            name=name, words=words, local=own,
            outputs=partial(reference, dataclasses.replace(inputs, scales=other)),
        )  # fmt: skip
    flat = contiguous_reading(inputs.codes)
    if flat is not None:
        yield Mistake(
            name="row_stride", words="rows read with their length as the stride", local=False,
            outputs=partial(reference, dataclasses.replace(inputs, codes=flat)),
        )  # fmt: skip
    nouns = {"codes": "codes", "scales": "scales"}
    yield from misread(inputs, reference, nouns, known=("codes",), some=some)


def _wrong_counts(inputs: RoutedRows) -> Iterator[tuple[str, str, Change]]:
    """Yield (name, words, a change of the counts)."""
    every = inputs.ids.flatten().long().clamp(0, inputs.experts - 1)
    owned = inputs.expert >= 0
    once = owned & ~routing.second_ones(inputs.ids, owned)

    def padded(block: int) -> Change:
        return lambda counts: -(-counts // block) * block

    yield from (
        ("counts_foreign", "counts with the pairs that nobody owns",
         lambda c: torch.bincount(every, minlength=inputs.experts).int()),
        ("counts_of_tokens", "counts of tokens, a token with an expert twice once,",
         lambda c: torch.bincount(inputs.expert[once], minlength=inputs.experts).int()),
        ("off_by_one", "every expert's end one row too early", lambda c: c - 1),
        ("off_by_one", "every expert's end one row too late", lambda c: c + 1),
        ("counts_padded", "counts rounded up to blocks of 128", padded(128)),
        ("counts_padded", f"counts rounded up to blocks of {inputs.block}", padded(inputs.block)),
        ("counts_ends", "ends of the experts' rows for counts", lambda c: c.cumsum(0).int()),
        ("counts_starts", "starts of the experts' rows for counts",
         lambda c: (c.cumsum(0) - c).int()),
        ("counts_shifted", "the next expert's counts", lambda c: c.roll(-1)),
        ("counts_shifted", "the previous expert's counts", lambda c: c.roll(1)),
        ("last_expert_lost", "the last expert's count left at zero",
         lambda c: without(c, slice(-1, None))),
    )  # fmt: skip


def _moved(
    inputs: RoutedRows, reference: Reference, source: Tensor, names: tuple[str, ...]
) -> dict[str, Tensor]:
    """Return the copies of other tokens' rows, of those outputs."""
    mine = (inputs.expert >= 0)[:, None]
    made = dict(reference(inputs))
    for name in names:
        value = getattr(inputs, name)[source]
        made[name] = torch.where(mine, value, torch.zeros_like(value))
    return made
