"""Hazards of the prefix-sum path: each fault put into our kernels is caught, with its sentence.

Where a GPU shows another cause than the virtual one, or none, ``on_gpu`` says so, and
docs/dispatch.md why.  The clean cases are drawn once and go through the checks that catch the
faults: each hazard is counted by the cases of its own check.  A case of ``check`` is a call with
its second call and its rows alone, one of ``replay`` a replay on changed inputs, one of
``invariance`` a batch, one of ``sequence`` a call after all others, one of ``no_sync`` a call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs Triton")

from moe_parity.harness.checks.calls import Player
from moe_parity.harness.checks.flow import check
from moe_parity.harness.checks.invariance import batches, invariance
from moe_parity.harness.checks.promises import no_sync
from moe_parity.harness.checks.replay import changes, replay
from moe_parity.harness.checks.sequence import sequence
from moe_parity.harness.checks.verdict import Verdict
from moe_parity.kernels import Kernel, find
from moe_parity.references.arithmetic import random_bits
from moe_parity.references.language import Case, Check, Contract, Routing, ScaleFormat, Values
from moe_parity.suites import prefix_faults as faults
from moe_parity.suites.prefix_faults import GEMM, QUANT, Plant, Planting

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
ONE_EXPERT = Case(m=64, e=1, i=128, values=Values.AIMED)
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
            FC1, faults.stale_ends(GEMM), "replay", "stale_output", "leaves rows as it was before",
            look="replay",
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
            "keeps the address of memory that it freed", look="replay", devices=("cpu",),
        ),
        "4_workspace_in_the_graph": made(
            FC1, faults.zeroed_once, "replay", "stale_output", "replayed on the inputs it was",
            look="replay", on_gpu=("replay_differs",),
        ),
        "4_workspace_zeroed_once": made(
            FC1, faults.zeroed_once, "rerun", "unwritten_read", "bias_ptr (float32 [3, 128])",
            on_gpu=unread,
        ),
        "5_codes_over_rows": made(
            CODES, faults.codes_over_rows(), "exact", "race", "of rows_ptr (bfloat16 [64, 256])",
            case=ONE_EXPERT, configs=of_16, contract=BITS, devices=("cpu",),
        ),
        "5_codes_over_rows_in_one_program": made(
            CODES, faults.codes_over_rows(1), "exact", "unknown", "in rows 48 to",
            case=ONE_EXPERT, configs=of_16, contract=BITS, on_gpu=("unknown", "race", "bad_output"),
        ),
        "5_rows_over_rows_that_are_returned": made(
            LAYER, faults.overlaid, "exact_fc1", "unknown", "in fc1 of ours_prefix_sum",
            contract=BITS,
        ),
        "6_flag_that_survives": made(
            COPIES, faults.surviving_flag, "replay", "stale_output",
            "leaves counts as it was before", look="replay",
        ),
        "7_rows_at_16_of_128": made(
            COPIES, faults.alignment_of(16), "exact", "unwritten", "leaves codes[128, 0] unwritten",
        ),
        "7_gemm_at_16_of_128": made(
            FC1, faults.alignment_of(16), "write_set", "beside", "writes out[64, 0], declared",
        ),
        "7_gemm_at_256_of_128": made(
            FC1, faults.alignment_of(256), "exact", "unwritten", "leaves out[128, 0] unwritten",
        ),
        "7_codes_at_16_of_128": made(
            CODES, faults.alignment_of(16), "write_set", "beside", "writes codes[16, 0], declared",
        ),
        "7_codes_at_256_of_128": made(
            CODES, faults.alignment_of(256), "exact", "unwritten", "leaves codes[128, 0] unwritten",
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
            "prefix_combine_kernel", devices=("cpu",),
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


HAZARDS = table()


def others(case: Case) -> list[Case]:
    """Return a case, others of its shapes and not, and the case again."""
    other = dataclasses.replace(case, seed=1, values=Values.NORMAL)
    return [case, other, dataclasses.replace(case, m=case.m + 1), case]


def looked(
    look: str, kernel: Kernel, case: Case, device: str, kept: dict[Any, Any]
) -> Iterator[Verdict]:
    def fresh(every: Sequence[Sequence[Case]]) -> list[int]:
        numbers = []
        for cases in every:
            kept.clear()
            numbers.append(Player(kernel, device).play(cases))
        return numbers

    if look == "check":
        yield from check(kernel, case, device)
    elif look == "sequence":
        yield from sequence(kernel, others(case), device, fresh=fresh)
    elif look == "invariance":
        yield from invariance(kernel, case, device, fresh=fresh)
    else:
        yield (replay if look == "replay" else no_sync)(kernel, case, device)


@pytest.mark.parametrize("name", HAZARDS)
def test_a_prefix_hazard_is_red_and_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parity_device: str
):
    hazard = HAZARDS[name]
    if parity_device not in hazard.devices:
        pytest.skip("docs/dispatch.md says why a GPU does not show it")
    planting = Planting(patch=monkeypatch, folder=tmp_path)
    hazard.plant(planting)
    kernel = dataclasses.replace(
        find(hazard.kernel), contract=hazard.contract, source=Path(faults.__file__)
    )
    if hazard.configs is not None:
        kernel = dataclasses.replace(kernel, configs=hazard.configs)
    case = hazard.case or CASES[hazard.kernel]
    every = list(looked(hazard.look, kernel, case, parity_device, planting.kept))
    red = next((v for v in every if v.failed), None)
    assert red is not None, [v.reason for v in every]
    if parity_device == "cuda" and hazard.on_gpu:
        assert red.cause in (hazard.cause, *hazard.on_gpu), red.message
        return
    assert (str(red.check), red.cause) == (hazard.check, hazard.cause), red.message
    assert hazard.words in red.message or parity_device == "cuda"


def test_the_output_over_an_intermediate_is_no_hazard(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parity_device: str
):
    """What is written over has been read for the last time, where nobody returns it."""
    faults.overlaid(Planting(patch=monkeypatch, folder=tmp_path))
    right = find(LAYER)
    kernel = dataclasses.replace(right, run=lambda call: {"out": right.run(call)["out"]})
    case = dataclasses.replace(CASES[LAYER], m=3)
    for look in ("check", "replay"):
        wrong = [v.message for v in looked(look, kernel, case, parity_device, {}) if v.failed]
        assert not wrong, wrong


# --- clean cases ----------------------------------------------------------------------------------


def clean(name: str, count: int) -> Iterator[tuple[Kernel, Case]]:
    """Draw cases of a kernel: sizes, routings, ends, ranks, formats, alignments."""
    kernel = find(name)
    stage = kernel.stage

    def pick(n: int, what: str, below: int) -> int:
        return int(random_bits.integers(n, f"hazard/{name}/{what}", 1, 1, below=below))

    for n in range(count):
        ranks = 2 if pick(n, "ranks", 4) == 0 else 1
        words: dict[str, Any] = {
            "m": 1 + pick(n, "m", 6), "e": ranks * (1 + pick(n, "e", 4 // ranks)),
            "k": 1 + pick(n, "k", 2), "h": 128, "i": 64 if name == FC1 else 128, "seed": n,
            "routing": list(Routing)[pick(n, "routing", len(Routing))], "ep_size": ranks,
            "ep_rank": pick(n, "rank", ranks),
            "values": (Values.NORMAL, Values.AIMED)[pick(n, "values", 2)],
            "scale": (ScaleFormat.FP32, ScaleFormat.UE8M0)[pick(n, "scale", 2)],
        }  # fmt: skip
        known = {*stage.sizes, *stage.reads, "seed"}
        if "routing" in known:
            known |= {"ep_size", "ep_rank"}
        case = Case(**{word: value for word, value in words.items() if word in known})
        aligned = list(kernel.configs(case, "cpu").items()) or [("", None)]
        chosen = dict([aligned[pick(n, "alignment", len(aligned))]])
        picked = dataclasses.replace(kernel, configs=lambda c, d, chosen=chosen: chosen)
        refusal = picked.declines(case, "cpu")
        if refusal is None:
            yield picked if aligned[0][0] else kernel, case


STAGES = COPIES, FC1, FC2, CODES, SUM
"""The layer is dear: the checks of every kernel hold it to the same."""


def test_clean_prefix_kernels_are_accused_of_no_hazard(parity_device: str):
    wanted = 500 if parity_device == "cuda" else 50
    counted = dict.fromkeys(("check", "sequence", "replay", "invariance", "no_sync"), 0)
    for name in STAGES:
        drawn = list(clean(name, 2 * wanted // len(STAGES)))
        for kernel, case in drawn:
            for look, cases in counted.items():
                share = wanted // len(STAGES) * (1 + STAGES.index(name))
                if cases >= share or look == "sequence":
                    continue
                wrong = [v for v in looked(look, kernel, case, parity_device, {}) if v.failed]
                assert not wrong, (name, case.id, wrong[0].message)
                counted[look] += weight(look, kernel, case, parity_device)
        cases = [case for _, case in drawn][: wanted // len(STAGES)]
        played = [v for v in sequence(find(name), cases, parity_device) if v.failed]
        assert not played, (name, played[0].message)
        counted["sequence"] += len(cases)
    assert min(counted.values()) >= wanted, counted


def weight(look: str, kernel: Kernel, case: Case, device: str) -> int:
    """Return how many cases a look at one is: see above."""
    made = kernel.stage.inputs(case, device)
    if look == "replay":
        return sum(1 for _ in changes(kernel, case, device, made))
    if look == "invariance":
        return sum(1 for _ in batches(kernel, case, made)) if kernel.stage.units(made) > 1 else 0
    return 1
