"""Faults that only some sizes show: tokens, experts, experts of a token, groups, ragged ends."""

from __future__ import annotations

from typing import Any

import torch

from moe_parity.kernels import Call
from moe_parity.references.stages.quant.decisions import Apply
from moe_parity.suites.faulty.planting import (
    Outputs,
    case_is,
    fault,
    given,
    layer_with,
    right,
    unwritten,
    with_parts,
    written,
    wrong,
)


def _rows_before(call: Call, made: Outputs) -> Outputs:
    return {name: value.roll(1, 0) for name, value in made.items()}


def _halves_swapped(call: Call) -> Any:
    gate, up = call.inputs.rows.chunk(2, 1)
    return given(call, rows=torch.cat([up, gate], 1))


def _raises(call: Call) -> Any:
    if call.case.m == 0:
        raise ValueError("grid must not be empty")
    return written(call, right(call))


def _lost(keep: Any) -> Any:
    """Return inputs in which only some pairs are owned."""
    return lambda call: given(call, expert=torch.where(keep(call), call.inputs.expert, -1))


def _k_below(most: int) -> Any:
    def keep(call: Call) -> Any:
        return torch.arange(call.inputs.expert.numel()) % call.case.k < most

    return keep


def _ids_below(most: int) -> Any:
    return lambda call: call.inputs.expert < most


def _not_last(call: Call) -> Any:
    return call.inputs.expert != call.case.local_experts - 1


def _ids_modulo(number: int) -> Any:
    def change(call: Call) -> Any:
        expert = call.inputs.expert
        return given(call, expert=torch.where(expert >= 0, expert % number, -1))

    return change


def _power_below(call: Call) -> Any:
    most: int = 1 << (call.inputs.experts.bit_length() - 1)
    return _ids_modulo(most)(call)


def _layer_k_below(call: Call) -> Any:
    ids = call.inputs.batch.ids.clone()
    ids[:, 8:] = -1
    return layer_with(call, batch={"ids": ids})


def _layer_weightless(call: Call) -> Any:
    return layer_with(call, batch={"weights": None})


def _last_scale_before(call: Call, made: Outputs) -> Outputs:
    scales = made["scales"].clone()
    scales[:, -1:] = scales[:, -2:-1]
    return made | {"scales": scales}


def _short_k(call: Call) -> Any:
    a = call.inputs.a.clone()
    a[:, -128:] = 0
    return given(call, a=a)


def _last_columns_zero(count: int) -> Any:
    def change(call: Call, made: Outputs) -> Outputs:
        done = {name: value.clone() for name, value in made.items()}
        for value in done.values():
            value[:, -count:] = 0
        return done

    return change


def _blocks(word: str) -> Any:
    return lambda call: -(-int(getattr(call.case, word)) // call.case.group)


DIVIDES = with_parts(act_quant={"apply": Apply.DIVIDE})
FAULTS = [
    # --- tokens ---
    fault("quant_m3_row_before", "m-bucket tactic-wrong", "act_quant",
          wrong(case_is(lambda c: c.m in (3, 4)), edit=_rows_before),
          "row_shifted row_of_neighbour rows_permuted batch",
          "for 3 or 4 tokens each row is the one before"),
    fault("sum_m3_weightless", "m-bucket tactic-wrong", "combine",
          wrong(case_is(lambda c: c.m in (3, 4)), given=lambda c: given(c, weights=None)),
          "weights_lost", "for 3 or 4 tokens the routing weights are left out"),
    fault("layer_m3_weightless", "m-bucket route-scale", "layer",
          wrong(case_is(lambda c: c.m in (3, 4)), given=_layer_weightless),
          "weights_lost", "for 3 or 4 tokens the routing weights are left out"),
    fault("quant_above_128_divides", "m-bucket tune-key", "act_quant",
          wrong(case_is(lambda c: c.m > 128), recipe=DIVIDES),
          "quant.apply=divide", "above 128 tokens it divides where it multiplied"),
    fault("gemm_tokens_not_8", "m-bucket unwritten-rows", "fc1",
          unwritten(case_is(lambda c: c.m % 8 > 0), lambda c, n: slice(n // 8 * 8, n)),
          "unwritten", "pairs past the last whole eight are not written"),
    fault("gate_m17_swapped", "m-bucket weight-layout", "swiglu",
          wrong(case_is(lambda c: c.m == 17), given=_halves_swapped),
          "gate_up_swapped", "for 17 tokens gate and up are swapped"),
    fault("gate_quant_m5_unlimited", "m-bucket clamp-lost", "swiglu_quant",
          wrong(case_is(lambda c: 5 <= c.m <= 8), given=lambda c: given(c, limit=None)),
          "clamp.order=ignored swiglu.clamp_order=ignored",
          "for 5 to 8 tokens the limit is lost"),
    fault("permute_m129_row_left", "m-bucket unwritten-rows", "permute",
          wrong(case_is(lambda c: c.m % 128 == 1), edit=lambda c, made: made | {
              name: torch.cat([made[name][:-1], made[name][-1:] * 0])
              for name in ("codes", "scales")}),
          "last_row_lost pair_lost pattern", "one row past a tile of 128 is left at zero"),
    fault("quant_rows_past_1024", "m-bucket unwritten-rows", "act_quant",
          unwritten(case_is(lambda c: c.m > 1024), lambda c, n: slice(1024, n)),
          "unwritten", "rows from 1024 on are not written"),
    fault("quant_no_tokens_raises", "m-bucket zero-token", "act_quant", _raises,
          "raised ValueError", "it raises where there is no token"),
    fault("layer_no_tokens_raises", "zero-token", "layer", _raises,
          "raised ValueError", "it raises where there is no token"),
    # --- experts ---
    fault("align_power_of_two", "expert-count", "align",
          wrong(given=_power_below), "expert_cut",
          "experts are taken modulo the power of two below"),
    fault("align_257_last_lost", "expert-count align-sort", "align",
          wrong(case_is(lambda c: c.local_experts == 257), given=_lost(_not_last)),
          "last_expert_lost expert_lost", "of 257 experts the last is lost"),
    fault("permute_257_last_lost", "expert-count", "permute",
          wrong(case_is(lambda c: c.local_experts == 257), given=_lost(_not_last)),
          "last_expert_lost expert_lost", "of 257 experts the last is lost"),
    fault("align_1024_cut", "expert-count", "align",
          wrong(case_is(lambda c: c.local_experts > 1023), given=_lost(_ids_below(1023))),
          "last_expert_lost expert_lost experts_lost",
          "experts from 1023 on, of 1024 or more, are lost"),
    fault("gemm_expert_byte", "expert-count", "fc1",
          wrong(case_is(lambda c: c.local_experts > 256), given=_ids_modulo(256)),
          "expert_cut wrong_expert one_expert", "the number of an expert is held in a byte"),
    fault("sum_expert_byte", "expert-count", "combine",
          wrong(case_is(lambda c: c.local_experts > 256), given=_lost(_ids_below(256))),
          "pair_lost expert_lost last_expert_lost experts_lost",
          "pairs of experts from 256 on are left out"),
    # --- experts of a token ---
    fault("sum_k_above_8", "top-k topk-sum", "combine",
          wrong(case_is(lambda c: c.k > 8), given=_lost(_k_below(8))),
          "pair_lost", "of more than 8 experts a token only 8 are summed"),
    fault("align_k_22", "top-k align-sort", "align",
          wrong(case_is(lambda c: c.k > 16), given=_lost(_k_below(16))),
          "pair_lost", "of more than 16 experts a token only 16 are placed"),
    fault("layer_k_above_8", "top-k", "layer",
          wrong(case_is(lambda c: c.k > 8), given=_layer_k_below),
          "pair_lost", "of more than 8 experts a token only 8 are computed"),
    # --- groups and ragged ends ---
    fault("quant_odd_groups", "group-count tail-block", "act_quant",
          wrong(lambda c: _blocks("h")(c) % 2 == 1 and _blocks("h")(c) > 1,
                edit=_last_scale_before),
          "scale_of_neighbour scale_not_stored amax_of_neighbour payload",
          "of an odd number of groups the last has the scale of the one before"),
    fault("gate_quant_groups_not_8", "group-count tail-block", "swiglu_quant",
          wrong(lambda c: _blocks("i")(c) % 8 > 0 and _blocks("i")(c) > 8,
                edit=_last_scale_before),
          "scale_of_neighbour scale_not_stored amax_of_neighbour payload",
          "of groups past a multiple of 8 the last has the scale of the one before"),
    fault("gemm2_odd_blocks_of_k", "group-count tail-block", "fc2",
          wrong(lambda c: _blocks("i")(c) % 2 == 1 and _blocks("i")(c) > 1, given=_short_k),
          "k_tail", "of an odd number of blocks of K the last is left out"),
    fault("gemm_blocks_not_4", "group-count tail-block", "fc1",
          wrong(lambda c: _blocks("h")(c) % 4 > 0 and _blocks("h")(c) > 4, given=_short_k),
          "k_tail", "of blocks of K past a multiple of 4 the last is left out"),
    fault("gemm2_ragged_columns", "tail-block ragged", "fc2",
          wrong(case_is(lambda c: c.h % 16 > 0), edit=lambda c, m: _last_columns_zero(
              c.case.h % 16)(c, m)),
          "last_columns_lost last_column_lost edge_lost pattern",
          "columns past the last whole 16 are left at zero"),
    fault("weight_ragged_tile", "tail-block ragged", "weight_quant",
          wrong(case_is(lambda c: c.h % 128 > 0 and c.h > 128), edit=_last_scale_before),
          "scale_of_neighbour scale_not_stored amax_of_neighbour payload",
          "the last tile of columns, not whole, has the scale of the one before"),
]  # fmt: skip
