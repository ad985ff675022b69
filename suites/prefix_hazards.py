"""The table of hazards: which fault in which of our prefix-sum kernels, and what is said of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moe_parity.references.language import Case, Check, Contract, Values
from moe_parity.suites import prefix_faults as faults
from moe_parity.suites.prefix_faults import GEMM, QUANT, Plant

COPIES, FC1, FC2 = "ours_permute", "ours_fc1_prefix", "ours_fc2_prefix"
CODES, SUM, LAYER = "ours_swiglu_quant_prefix", "ours_combine_prefix", "ours_prefix_sum"
CASES = {
    COPIES: Case(m=5, e=3, k=2, h=128, values=Values.AIMED),
    FC1: Case(m=5, e=3, k=2, h=128, i=64, values=Values.AIMED),
    FC2: Case(m=5, e=3, k=2, h=128, i=128, values=Values.AIMED),
    CODES: Case(m=6, e=3, i=128, values=Values.AIMED),
    SUM: Case(m=5, e=3, k=2, h=128),
    LAYER: Case(m=2, e=2, k=1, h=128, i=128),
}
BITS = Contract(checks=frozenset({Check.EXACT}))
JUDGED = Contract(checks=frozenset({Check.EXACT, Check.WRITE_SET, Check.RERUN}))
SERVED = Contract().promising(Check.NO_SYNC)
FULL_TILE = Case(m=16, e=2, k=2, h=128, i=64, values=Values.AIMED)
ONE_EXPERT = Case(m=32, e=1, i=128, values=Values.AIMED)
BOTH = "cpu", "cuda"


@dataclass(frozen=True, kw_only=True)
class Hazard:
    """A fault in a kernel, and what is said of it."""

    kernel: str
    plant: Plant
    check: str
    """The first check that is red."""
    cause: str
    words: str
    """On a CPU; another machine may see another row first."""
    look: str = "check"
    case: Case | None = None
    contract: Contract = JUDGED
    configs: Callable[[Case, str], dict[str, Any]] | None = None
    devices: tuple[str, ...] = BOTH
    on_gpu: tuple[str, ...] = ()
    """The causes that a GPU may give instead."""


def of_16(case: Case, device: str) -> dict[str, Any]:
    return {"align16": 16}


def of_64(case: Case, device: str) -> dict[str, Any]:
    return {"align64": 64}


def by_rows(case: Case, device: str) -> dict[str, Any]:
    """Return another alignment for an odd number of rows."""
    return {"odd": 16} if case.m % 2 else {"even": 128}


def table() -> dict[str, Hazard]:
    """Return the hazards by name; the number is that of the docs' table."""

    def made(kernel: str, plant: Plant, check: str, cause: str, words: str, **more: Any) -> Hazard:
        return Hazard(kernel=kernel, plant=plant, check=check, cause=cause, words=words, **more)

    unread = ("poison_read", "unwritten", "bad_output")
    return {
        "1_stale_ends_of_rows": made(
            COPIES, faults.stale_ends_of_rows, "sequence", "leaks_state",
            "of counts got", look="sequence",
        ),
        "1_stale_ends_of_a_gemm": made(
            FC1, faults.stale_ends(GEMM), "sequence", "leaks_state", "; alone it is right",
            look="sequence",
        ),
        "1_stale_ends_of_codes": made(
            CODES, faults.stale_ends(QUANT), "sequence", "leaks_state", "; alone it is right",
            look="sequence",
        ),
        "1_stale_ends_of_rows_in_a_graph": made(
            COPIES, faults.stale_ends_of_rows, "replay", "stale_output",
            "leaves counts as it was before", look="replay",
        ),
        "1_stale_ends_of_a_gemm_in_a_graph": made(
            FC1, faults.stale_ends(GEMM), "replay", "stale_output",
            "; an eager call is wrong as well: it keeps a state", look="replay",
        ),
        "2_gap_of_rows": made(
            COPIES, faults.zeroed_padding, "write_set", "beside",
            "writes codes[383, 0], declared untouched",
        ),
        "2_gap_of_a_gemm": made(
            FC1, faults.gap_of_gemm, "write_set", "beside", "writes out[5, 0], declared untouched",
        ),
        "2_gap_of_the_second_gemm": made(
            FC2, faults.gap_of_gemm, "write_set", "beside", "writes out[5, 0], declared untouched",
        ),
        "2_gap_of_codes": made(
            CODES, faults.gap_of_quant, "write_set", "beside",
            "writes scales[3, 0], declared untouched",
        ),
        "3_row_of_rows_left": made(
            COPIES, faults.left_by_copy, "exact", "unwritten", "leaves codes[1, 0] unwritten",
        ),
        "3_row_of_a_gemm_left": made(
            FC1, faults.left_by_gemm, "exact", "unwritten", "leaves out[4, 0] unwritten",
        ),
        "3_row_of_scales_left": made(
            CODES, faults.left_by_quant, "exact", "unwritten", "leaves scales[2, 0] unwritten",
        ),
        "3_row_of_a_sum_left": made(
            SUM, faults.left_by_sum, "exact", "unwritten",
            "leaves token 1, column 0 of out unwritten",
        ),
        "4_workspace_grown": made(
            LAYER, faults.grown_workspace, "replay", "freed_memory",
            "keeps the address of memory that it freed", look="replay",
        ),
        "4_workspace_in_the_graph": made(
            FC1, faults.zeroed_once, "replay", "poison_read", "nothing in its graph has written",
            look="replay", on_gpu=("replay_differs", "stale_output"),
        ),
        "4_workspace_zeroed_once": made(
            FC1, faults.zeroed_once, "rerun", "unwritten_read", "bias_ptr (float32 [3, 128])",
            devices=("cpu",),
        ),
        "5_codes_over_rows": made(
            CODES, faults.codes_over_rows(), "exact", "race", "of rows_ptr (bfloat16 [32, 256])",
            case=ONE_EXPERT, configs=of_16, contract=BITS, devices=("cpu",),
        ),
        "5_codes_over_rows_in_one_program": made(
            CODES, faults.codes_over_rows(1), "exact", "unknown", "in rows 24 to",
            case=ONE_EXPERT, configs=of_16, contract=BITS, on_gpu=(*unread, "poison"),
        ),
        "5_rows_over_rows_that_are_returned": made(
            LAYER, faults.overlaid, "exact_fc1", "unknown", "in fc1 of ours_prefix_sum",
            contract=BITS, case=Case(m=1, h=128, i=128),
        ),
        "6_flag_that_survives": made(
            COPIES, faults.surviving_flag, "replay", "stale_output",
            "; an eager call is wrong as well: it keeps a state", look="replay",
        ),
        "7_rows_at_16_of_128": made(
            COPIES, faults.alignment_of(16), "exact", "unwritten", "leaves codes[128, 0] unwritten",
        ),
        "7_gemm_at_16_of_128": made(
            FC1, faults.alignment_of(16), "write_set", "beside", "writes out[64, 0], declared",
        ),
        "7_gemm_at_128_of_64": made(
            FC1, faults.alignment_of(128), "exact", "unwritten", "leaves out[64, 0] unwritten",
            configs=of_64,
        ),
        "7_codes_at_16_of_128": made(
            CODES, faults.alignment_of(16), "write_set", "beside", "writes codes[16, 0], declared",
        ),
        "7_codes_at_128_of_64": made(
            CODES, faults.alignment_of(128), "exact", "unwritten", "leaves codes[64, 0] unwritten",
            configs=of_64,
        ),
        "7_process_wide": made(
            FC1, faults.process_wide_alignment, "sequence", "leaks_state", "; alone it is right",
            look="sequence", configs=by_rows, case=dataclasses.replace(CASES[FC1], m=6),
        ),
        "8_count_read_in_a_capture": made(
            FC1, faults.host_count, "replay", "waits_for_gpu", "waits for the GPU at line",
            look="replay", contract=SERVED,
        ),
        "8_count_read": made(
            FC1, faults.host_count, "no_sync", "waits_for_gpu", "of prefix_faults.py (",
            look="no_sync", contract=SERVED,
        ),
        "8_count_read_as_memory": made(
            FC1, faults.mirrored_count, "replay", "frozen_scalar",
            "keeps grid = [4, 1] of prefix_gemm_kernel", look="replay", devices=("cpu",),
        ),
        "9_end_of_a_gemm_too_few": made(
            FC1, faults.ends_moved(GEMM, -1), "exact", "unwritten", "leaves out[4, 0] unwritten",
        ),
        "9_end_of_a_gemm_too_many": made(
            FC1, faults.ends_moved(GEMM, 1), "write_set", "beside",
            "writes out[5, 0], declared untouched",
        ),
        "9_end_of_a_full_tile_too_many": made(
            FC1, faults.ends_moved(GEMM, 1), "exact", "unwritten", "leaves out[17, 0] unwritten",
            case=FULL_TILE, configs=of_16,
        ),
        "9_end_of_codes_too_few": made(
            CODES, faults.ends_moved(QUANT, -1), "exact", "unwritten", "codes[2, 0] unwritten",
        ),
        "9_end_of_codes_too_many": made(
            CODES, faults.ends_moved(QUANT, 1), "write_set", "beside", "writes codes[3, 0]",
        ),
        "9_end_of_rows_too_few": made(
            COPIES, faults.ends_of_rows_moved(-1), "exact", "off_by_one",
            "expert 0 is said to have 4 rows, expected 5",
        ),
        "9_end_of_rows_too_many": made(
            COPIES, faults.ends_of_rows_moved(1), "exact", "off_by_one",
            "expert 0 is said to have 6 rows, expected 5",
        ),
        "9_end_in_the_layer_too_few": made(
            LAYER, faults.ends_of_rows_moved(-1), "exact", "unwritten_read",
            "prefix_combine_kernel", on_gpu=(*unread, "poison", "unknown"),
        ),
        "9_end_in_the_layer_too_many": made(
            LAYER, faults.ends_of_rows_moved(1), "exact", "unwritten_read", "of a_ptr (uint8",
            devices=("cpu",),
        ),
        "10_rows_that_lean_on_their_tile": made(
            FC1, faults.leaning_rows, "invariance", "depends_on_other_rows",
            "token 0, k 0, column 1 (expert 0) has other bits alone", look="invariance",
        ),
        "10_codes_that_lean_on_their_tile": made(
            CODES, faults.flushed_rows, "invariance", "depends_on_other_rows",
            "(expert 1) has other bits alone", look="invariance",
        ),
    }  # fmt: skip
