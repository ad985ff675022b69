"""What is wrong with an alignment or a permutation, in their own terms: which pair, block, row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_parity.references.stages.mistakes.anywhere import Outputs
from moe_parity.references.stages.routing import place

if TYPE_CHECKING:
    from moe_parity.references.stages.align import RoutedRows


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
            own = _count(int(count[one]), "pair")
            why = f": expert {one} has {int(found[one])}, and {own} of it fill {int(blocks[one])}"
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
            first, many = int(mask.nonzero()[0, 0]), _count(int(mask.sum()), "pair")
            yield f"{pair(first)} {words}, {many} in all"
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
        )
    if "counts" in got and bool((got["counts"] != right["counts"]).any()):
        at = int((got["counts"] != right["counts"]).nonzero()[0, 0])
        want, found = int(right["counts"][at]), int(got["counts"][at])
        return f"expert {at} is said to have {_count(found, 'row')}, expected {want}"
    return ""
