"""Faults that only some routings and ranks show: duplicates, -1, foreign ids, empty experts."""

from __future__ import annotations

from typing import Any

import torch

from moe_parity.kernels import Call
from moe_parity.references.language import Routing
from moe_parity.suites.faulty.planting import (
    case_is,
    fault,
    given,
    layer_with,
    right,
    written,
    wrong,
)

RANKED = case_is(lambda c: c.ep_size > 1 and c.ep_rank == c.ep_size - 1)
MIDDLE = case_is(lambda c: 0 < c.ep_rank < c.ep_size - 1)


def _seconds(ids: torch.Tensor) -> torch.Tensor:
    """Mark the pairs whose expert the token already has, bool [M, k]."""
    same = ids[:, :, None] == ids[:, None, :]
    mine: torch.Tensor = same.tril(-1).any(2)
    return mine


def _first_only(call: Call) -> Any:
    again = _seconds(call.inputs.ids).flatten()
    return given(call, expert=torch.where(again, -1, call.inputs.expert))


def _layer_first_only(call: Call) -> Any:
    ids = call.inputs.batch.ids
    return layer_with(call, batch={"ids": torch.where(_seconds(ids), -1, ids)})


def _minus_one_is_zero(call: Call) -> Any:
    none = call.inputs.ids.flatten() < 0
    return given(call, expert=torch.where(none, 0, call.inputs.expert))


def _past_is_last(call: Call) -> Any:
    past = call.inputs.ids.flatten() >= call.inputs.first + call.inputs.experts
    return given(call, expert=torch.where(past, call.inputs.experts - 1, call.inputs.expert))


def _layer_clamps(call: Call) -> Any:
    own = call.inputs.experts
    ids = call.inputs.batch.ids.clamp(own.first, own.first + own.count - 1)
    return layer_with(call, batch={"ids": ids})


def _global_is_local(call: Call) -> Any:
    ids = call.inputs.ids.flatten().long()
    mine = (ids >= 0) & (ids < call.inputs.experts)
    return given(call, expert=torch.where(mine, ids, -1))


def _layer_first_ignored(call: Call) -> Any:
    return layer_with(call, experts={"first": 0})


def _all_are_mine(call: Call) -> Any:
    ids = call.inputs.ids.flatten().long()
    return given(call, expert=torch.where(ids >= 0, 0, -1))


def _next_expert(call: Call) -> Any:
    expert, count = call.inputs.expert, call.case.local_experts
    return given(call, expert=torch.where(expert >= 0, (expert + 1) % count, -1))


def _compact(call: Call) -> Any:
    """Take the number of an expert among those that have a pair for its own."""
    expert = call.inputs.expert
    hit = expert[expert >= 0].unique()
    return given(call, expert=torch.where(expert >= 0, torch.searchsorted(hit, expert), -1))


def _block_for_everyone(call: Call) -> Any:
    made, (block, count) = right(call), (call.inputs.block, call.inputs.expert.numel())
    hit = set(made["experts"].tolist())
    names, slots = [], []
    for expert in range(call.inputs.experts):
        mine = made["experts"] == expert
        own = made["slots"].view(-1, block)[mine]
        if expert not in hit:
            own = torch.full((1, block), count, dtype=torch.int32)
        names += [expert] * len(own)
        slots.append(own.flatten())
    every = torch.cat(slots) if slots else made["slots"]
    return written(call, {"experts": torch.tensor(names, dtype=torch.int32), "slots": every})


def _at_most(count: int) -> Any:
    """Return inputs in which an expert has at most so many pairs."""

    def change(call: Call) -> Any:
        expert = call.inputs.expert.clone()
        for one in expert[expert >= 0].unique().tolist():
            expert[(expert == one).nonzero()[count:, 0]] = -1
        return given(call, expert=expert)

    return change


def _nothing_live(call: Call) -> Any:
    """Write nothing where no pair is the rank's."""
    made = right(call)
    nothing = bool((call.inputs.expert < 0).all())
    return written(call, made, dict.fromkeys(made, slice(None)) if nothing else None)


FAULTS = [
    fault("sum_duplicate_lost", "duplicates align-sort", "combine", wrong(given=_first_only),
          "duplicate_lost", "a token's second pair with an expert is not summed"),
    fault("permute_duplicate_lost", "duplicates", "permute", wrong(given=_first_only),
          "duplicate_lost", "a token's second pair with an expert is not copied"),
    fault("layer_duplicate_lost", "duplicates", "layer", wrong(given=_layer_first_only),
          "duplicate_lost", "a token's second pair with an expert is left out"),
    fault("align_minus_one_is_zero", "neg-id", "align", wrong(given=_minus_one_is_zero),
          "foreign_pair", "an id of -1 is placed with expert 0"),
    fault("sum_minus_one_summed", "neg-id pad-nan", "combine", wrong(given=_minus_one_is_zero),
          "foreign_pair", "the row of a pair whose id is -1 is summed"),
    fault("permute_past_the_end", "foreign-ids ep-remap", "permute", wrong(given=_past_is_last),
          "foreign_pair", "an id past the rank's experts is given to the last"),
    fault("align_past_the_end", "foreign-ids ep-remap", "align", wrong(given=_past_is_last),
          "foreign_pair", "an id past the rank's experts is given to the last"),
    fault("layer_ids_clamped", "neg-id foreign-ids ep-remap", "layer", wrong(given=_layer_clamps),
          "foreign_pair rank_ignored", "ids that nobody owns are clamped to the nearest expert"),
    fault("align_empty_expert", "empty-experts zero-token", "align", _block_for_everyone,
          "empty_expert", "an expert without a pair gets a block"),
    fault("gemm_empty_expert", "empty-experts", "fc1", wrong(given=_compact),
          "wrong_expert expert_order expert_of_neighbour",
          "experts are numbered without those that have no pair"),
    fault("permute_last_rank", "ranks ep-remap", "permute", wrong(RANKED, given=_global_is_local),
          "rank_ignored", "on the last rank global ids are taken for local ones"),
    fault("layer_last_rank", "ranks ep-remap", "layer", wrong(RANKED, given=_layer_first_ignored),
          "rank_ignored offset_ignored", "on the last rank global ids are taken for local ones"),
    fault("sum_middle_rank", "ranks ep-remap", "combine", wrong(MIDDLE, given=_all_are_mine),
          "foreign_pair", "on a rank in the middle the pairs of others are summed"),
    fault("gemm2_middle_rank", "ranks ep-remap", "fc2", wrong(MIDDLE, given=_next_expert),
          "wrong_expert expert_of_neighbour scale_of_another_expert",
          "on a rank in the middle each pair has the next expert's weights"),
    fault("align_full_expert", "one-expert align-sort", "align",
          wrong(case_is(lambda c: c.routing in (Routing.ONE, Routing.LAST)), given=_at_most(64)),
          "pair_lost", "an expert has room for 64 pairs"),
    fault("sum_full_expert", "one-expert", "combine",
          wrong(case_is(lambda c: c.routing in (Routing.ONE, Routing.LAST)), given=_at_most(64)),
          "pair_lost", "an expert has room for 64 pairs"),
    fault("sum_nobody_left", "nobody zero-token unwritten-rows", "combine", _nothing_live,
          "unwritten", "nothing is written where no pair is the rank's"),
    fault("permute_nobody_left", "nobody zero-token unwritten-rows", "permute", _nothing_live,
          "unwritten", "no count is written where no pair is the rank's"),
]  # fmt: skip
