"""Mistakes of alignment and permutation, and what is wrong with them in their own terms."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_parity.references.language.mistake import Mistake
from moe_parity.references.stages.mistakes import routing
from moe_parity.references.stages.mistakes.anywhere import (
    Outputs,
    changed,
    contiguous_reading,
    reread,
    shifts,
    without,
)
from moe_parity.references.stages.routing import place

if TYPE_CHECKING:
    from moe_parity.references.stages.align import RoutedRows

Reference = Callable[["RoutedRows"], Outputs]
BLOCKS = (16, 32, 64, 128, 8)


def of_routing(inputs: RoutedRows, reference: Reference) -> Iterator[Mistake]:
    """Yield what alignment and permutation may do wrong alike: whose pair is whose."""
    expert, ids = inputs.expert, inputs.ids
    owned = expert >= 0
    flat, last = ids.flatten().long() - inputs.first, inputs.experts - 1
    second = routing.second_ones(ids, owned)
    ends = routing.last_of_each(expert, inputs.experts)
    pairs = torch.arange(expert.numel(), device=expert.device)
    k = ids.shape[1]
    wrong: list[tuple[str, str, Tensor]] = [
        ("duplicate_lost", "a token's second pair with the same expert left out", torch.where(second, -1, expert)),
        ("pair_lost", "the last pair of each expert left out", torch.where(ends, -1, expert)),
        ("pair_lost", "the last pair left out", torch.where(pairs == expert.numel() - 1, -1, expert)),
        ("pair_lost", "the first pair left out", torch.where(pairs == 0, -1, expert)),
        ("pair_lost", "the last pair of each token left out", torch.where(pairs % k == k - 1, -1, expert)),
        ("last_expert_lost", "the last expert's pairs left out", torch.where(expert == last, -1, expert)),
        ("first_expert_lost", "expert 0's pairs left out", torch.where(expert == 0, -1, expert)),
        ("foreign_pair", "pairs whose id is negative given to the last expert", torch.where(ids.flatten() < 0, last, expert)),
        ("foreign_pair", "pairs whose id is negative given to expert 0", torch.where(ids.flatten() < 0, 0, expert)),
        ("foreign_pair", "pairs whose id lies past the end given to the last expert", torch.where(flat > last, last, expert)),
        ("foreign_pair", "pairs that nobody owns given to the nearest expert", flat.clamp(0, last)),
        ("foreign_pair", "pairs that nobody owns given to expert 0", torch.where(owned, expert, 0)),
        ("foreign_pair", "pairs that nobody owns given to the last expert", torch.where(owned, expert, last)),
        ("rank_ignored", "global ids taken for local ones", _in_range(ids.flatten().long(), last)),
        ("rank_ignored", "global ids taken modulo the rank's experts", torch.where(ids.flatten() >= 0, ids.flatten().long() % (last + 1), -1)),
    ]  # fmt: skip
    wrong += list(routing.wrong_experts(expert, ids, inputs.first, inputs.experts))
    for name, words, other in wrong:
        if bool((other != expert).any()):
            yield Mistake(
                name=name, words=words, local=False,
                outputs=lambda o=other: reference(dataclasses.replace(inputs, expert=o)),  # type: ignore[misc]
            )  # fmt: skip


def _in_range(ids: Tensor, last: int) -> Tensor:
    return torch.where((ids >= 0) & (ids <= last), ids, -1)


# --- alignment ----------------------------------------------------------------------------------


def of_align(inputs: RoutedRows, reference: Reference) -> Iterator[Mistake]:
    """Yield what an alignment may do wrong."""
    yield from of_routing(inputs, reference)
    pairs, k = inputs.expert.numel(), inputs.ids.shape[1]

    def right() -> Outputs:
        return reference(inputs)

    for block in BLOCKS:
        if block != inputs.block:
            yield Mistake(
                name="block_size", words=f"blocks of {block} rows instead of {inputs.block}",
                outputs=lambda b=block: reference(dataclasses.replace(inputs, block=b)), local=False,  # type: ignore[misc]
            )  # fmt: skip
    slots: tuple[tuple[str, str, Callable[[Tensor], Tensor]], ...] = (
        ("token_for_pair", "tokens in the slots instead of pairs", lambda s: torch.where(s < pairs, s // k, s)),
        ("token_for_pair", "tokens in the slots instead of pairs, their number in empty ones,", lambda s: torch.where(s < pairs, s // k, pairs // k)),
        ("padding", "empty slots that hold 0", lambda s: torch.where(s < pairs, s, 0)),
        ("padding", "empty slots that hold -1", lambda s: torch.where(s < pairs, s, -1)),
        ("padding", f"empty slots that hold {pairs + 1}, one more than the pairs,", lambda s: torch.where(s < pairs, s, pairs + 1)),
        ("pair_order", "an expert's pairs in the order of their k, tokens then", lambda s: _by_k(inputs, s)),
        ("pair_order", "an expert's pairs from the last to the first", lambda s: _backwards(inputs)),
        ("off_by_one", "every pair's number one too large", lambda s: torch.where(s < pairs, s + 1, s)),
        ("off_by_one", "every slot one too far", lambda s: s.roll(1)),
        ("off_by_one", "every slot one too early", lambda s: s.roll(-1)),
    )  # fmt: skip
    for name, words, change in slots:
        yield Mistake(name=name, words=words, outputs=changed(right, change, "slots"), local=False)
    experts: tuple[tuple[str, str, Callable[[Tensor], Tensor]], ...] = (
        ("off_by_one", "the next expert named for every block", lambda e: e + 1),
        ("off_by_one", "the previous expert named for every block", lambda e: e - 1),
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
    yield Mistake(
        name="empty_expert", words="a block of padding for each expert without a pair", local=False,
        outputs=lambda: _with_empty(inputs),
    )  # fmt: skip
    yield Mistake(
        name="pair_lost", words="slots of padding before an expert's first pair", local=False,
        outputs=changed(right, lambda s: _flipped_blocks(s, inputs.block), "slots"),
    )  # fmt: skip


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


def align_told(inputs: RoutedRows, got: Mapping[str, Tensor]) -> str:
    """Return what is wrong with an alignment: which block, expert, pair; empty for nothing."""
    if not {"experts", "slots"} <= got.keys():
        return ""
    placed = place(inputs.expert, inputs.experts, inputs.block)
    return "; ".join(_block_faults(inputs, placed.block_expert(), got["experts"])) or "; ".join(
        _slot_faults(inputs, placed.pairs(), got)
    )


def _block_faults(inputs: RoutedRows, want: Tensor, got: Tensor) -> Iterator[str]:
    live = min(len(want), len(got))
    wrong = (want[:live] != got[:live]).nonzero()[:, 0]
    if len(want) != len(got):
        count = torch.bincount(inputs.expert[inputs.expert >= 0], minlength=inputs.experts)
        blocks = -(-count // inputs.block)
        found = torch.bincount(
            got[(got >= 0) & (got < inputs.experts)].long(), minlength=inputs.experts
        )
        odd = (blocks != found).nonzero()[:, 0]
        why = ""
        if odd.numel():
            one = int(odd[0])
            why = (
                f": expert {one} has {int(found[one])}, and {_count(int(count[one]), 'pair')} of it "
                f"fill {int(blocks[one])}"
            )
        yield f"{_count(len(got), 'block')} in use, expected {len(want)}{why}"
    elif wrong.numel():
        at = int(wrong[0])
        yield f"block {at} names expert {int(got[at])}, expected {int(want[at])}"


def _slot_faults(inputs: RoutedRows, want: Tensor, got: Mapping[str, Tensor]) -> Iterator[str]:
    slots, k = got["slots"].long(), inputs.ids.shape[1]
    count = inputs.expert.numel()
    seen = torch.bincount(slots[(slots >= 0) & (slots < count)], minlength=count)
    due = (inputs.expert >= 0).long()

    def pair(index: int) -> str:
        own = int(inputs.expert[index])
        whose = f"expert {own}" if own >= 0 else f"id {int(inputs.ids.flatten()[index])}, nobody's"
        return f"token {index // k}, k {index % k} ({whose})"

    lost, twice, foreign = ((seen < due), (seen > 1) & (due > 0), (seen > 0) & (due == 0))
    for mask, words in (
        (lost, "is in no slot"), (twice, "is in several slots"), (foreign, "has a slot"),
    ):  # fmt: skip
        if bool(mask.any()):
            yield f"{pair(int(mask.nonzero()[0, 0]))} {words}, {_count(int(mask.sum()), 'pair')} in all"
    if len(slots) == len(want) and bool((slots != want).any()):
        at = int((slots != want).nonzero()[0, 0])
        own, right = int(slots[at]), int(want[at])
        holds = pair(own) if 0 <= own < count else f"{own}"
        due_here = pair(right) if right < count else f"{right}, for none"
        yield f"slot {at} of block {at // inputs.block} holds {holds}, expected {due_here}"
    elif len(slots) != len(want):
        yield f"{len(slots)} slots in use, expected {len(want)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


# --- permutation --------------------------------------------------------------------------------


def of_permute(inputs: RoutedRows, reference: Reference) -> Iterator[Mistake]:
    """Yield what a permutation may do wrong."""

    def right() -> Outputs:
        return reference(inputs)

    def counts(change: Callable[[Tensor], Tensor]) -> Callable[[], Outputs]:
        return changed(right, change, "counts")

    tokens, k = inputs.ids.shape
    pair = torch.arange(tokens * k, device=inputs.ids.device)
    reads = [
        ("row_of_neighbour", "the row of the next token", (pair // k + 1) % max(tokens, 1)),
        ("row_of_neighbour", "the row of the previous token", (pair // k - 1) % max(tokens, 1)),
        ("pair_for_token", "a pair's number taken for its token's", pair % max(tokens, 1)),
        ("pair_for_token", "a pair's number taken for its token's, up to the last,", pair.clamp(max=tokens - 1)),
        ("one_row", "the first token's row for all", torch.zeros_like(pair)),
    ]  # fmt: skip
    for name, words, source in reads if tokens > 1 else ():
        for names, what in (
            (("codes", "scales"), ""),
            (("scales",), ", of the scales alone,"),
            (("codes",), ", of the codes alone,"),
        ):
            yield Mistake(
                name=name, words=words + what, local=False,
                outputs=lambda s=source, n=names: _moved(inputs, right(), s, n),  # type: ignore[misc]
            )  # fmt: skip
    scales = [
        (f"the scale of the {side} group", s, own) for side, s, own in shifts(inputs.scales, 1)
    ]
    scales.append(("transposed scales", reread(inputs.scales), False))
    scales.append(("no scales", torch.ones_like(inputs.scales), True))
    for words, other, own in scales:
        yield Mistake(
            name="scale_of_neighbour" if "group" in words else words.replace(" ", "_"), words=words,
            outputs=lambda s=other: reference(dataclasses.replace(inputs, scales=s)),  # type: ignore[misc]
            local=own,
        )  # fmt: skip
    flat = contiguous_reading(inputs.codes)
    if flat is not None:
        yield Mistake(
            name="row_stride", words="rows read with their length as the stride", local=False,
            outputs=lambda: reference(dataclasses.replace(inputs, codes=flat)),
        )  # fmt: skip
    owned = inputs.expert >= 0
    every = inputs.ids.flatten().long().clamp(0, inputs.experts - 1)
    wrong_counts: tuple[tuple[str, str, Callable[[Tensor], Tensor]], ...] = (
        ("counts_foreign", "counts with the pairs that nobody owns", lambda c: torch.bincount(every, minlength=inputs.experts).int()),
        ("counts_padded", "counts rounded up to blocks of 128", lambda c: -(-c // 128) * 128),
        ("counts_padded", f"counts rounded up to blocks of {inputs.block}", lambda c: -(-c // inputs.block) * inputs.block),
        ("counts_ends", "ends of the experts' rows for counts", lambda c: c.cumsum(0).int()),
        ("counts_starts", "starts of the experts' rows for counts", lambda c: (c.cumsum(0) - c).int()),
        ("counts_shifted", "the next expert's counts", lambda c: c.roll(-1)),
        ("counts_shifted", "the previous expert's counts", lambda c: c.roll(1)),
        ("last_expert_lost", "the last expert's count left at zero", lambda c: without(c, slice(-1, None))),
    )  # fmt: skip
    for name, words, change in wrong_counts:
        yield Mistake(name=name, words=words, outputs=counts(change), local=False)
    second = routing.second_ones(inputs.ids, owned)
    ends = routing.last_of_each(inputs.expert, inputs.experts)
    for name, words, mask in (
        ("duplicate_lost", "a token's second pair with the same expert left at zero", second),
        ("pair_lost", "the last pair of each expert left at zero", ends),
    ):
        if bool(mask.any()):
            yield Mistake(
                name=name, words=words, local=False,
                outputs=changed(right, lambda t, m=mask: without(t, m), "codes", "scales"),  # type: ignore[misc]
            )  # fmt: skip
    yield from of_routing(inputs, reference)


def _moved(
    inputs: RoutedRows, right: Outputs, source: Tensor, names: tuple[str, ...]
) -> dict[str, Tensor]:
    """Return the copies of other tokens' rows, of those outputs."""
    mine = (inputs.expert >= 0)[:, None]
    made = dict(right)
    for name in names:
        value = getattr(inputs, name)[source]
        made[name] = torch.where(mine, value, torch.zeros_like(value))
    return made


def permute_told(inputs: RoutedRows, got: Mapping[str, Tensor], right: Outputs) -> str:
    """Return what is wrong with a permutation: whose row holds what; empty for nothing."""
    k = inputs.ids.shape[1]
    owned = (inputs.expert >= 0)[:, None]
    for name, noun in (("codes", "row"), ("scales", "scales")):
        if name not in got:
            continue
        bad = ((got[name] != right[name]) & owned).any(1).nonzero()[:, 0]
        if not bad.numel():
            continue
        at = int(bad[0])
        source = getattr(inputs, name)
        same = (source == got[name][at]).all(1).nonzero()[:, 0]
        holds = "another one than its token's"
        if same.numel():
            holds = f"the {noun} of token {int(same[0])}"
        elif not bool(got[name][at].any()):
            holds = "zeros"
        return (
            f"the {noun} of token {at // k}, k {at % k} (expert {int(inputs.expert[at])}) holds "
            f"{holds}, {bad.numel()} of {int(owned.sum())} pairs in all"
        ).replace("scales of token", "scales of token", 1)
    if "counts" in got and bool((got["counts"] != right["counts"]).any()):
        at = int((got["counts"] != right["counts"]).nonzero()[0, 0])
        want, found = int(right["counts"][at]), int(got["counts"][at])
        return f"expert {at} is said to have {_count(found, 'row')}, expected {want}"
    return ""
