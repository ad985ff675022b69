"""Faults put into the kernels of batched experts: each is red, and named where it has a name."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from moe_parity.harness.checks.flow import check
from moe_parity.kernels import find
from moe_parity.references.language import (
    Case,
    Check,
    Contract,
    ScaleFormat,
    ScaleLayout,
    Values,
)
from moe_parity.suites.test_batched import (
    every_amax,
    exponents,
    gemm_differs,
    right_power,
    swiglu_differs,
    visits,
)

batched = pytest.importorskip("moe_parity.kernels.ours.batched", reason="needs Triton")
virtual_gpu = pytest.importorskip("moe_parity.kernels.virtual_gpu", reason="needs Triton")

SWIGLU, FC1 = "ours_swiglu_quant_batched", "ours_fc1_batched"
CASES = {
    SWIGLU: Case(m=20, e=4, i=256, values=Values.AIMED),
    FC1: Case(m=6, e=3, k=2, h=256, i=64, values=Values.AIMED),
}
JUDGED = Contract(checks=frozenset({Check.EXACT, Check.WRITE_SET}))
PACKED = {"scale": ScaleFormat.UE8M0_PACKED, "i": 640}
SCALE_PLACE = "to += row.to(tl.int64) * scales_row + column.to(tl.int64) * scales_column"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One line of a kernel's source, changed, and what the check of the kernel says of it."""

    kernel: str
    old: str
    new: str
    check: str
    """The first check that is red."""
    cause: str
    words: str
    changes: dict[str, Any] = field(default_factory=dict)
    """What is asked for beside the case of the kernel."""


FAULTS = {
    "rows_past_a_count_written": Fault(
        kernel=SWIGLU, old="live = row < live_count", new="live = row < tokens",
        check="write_set", cause="beside", words="writes codes[0, 6, 0], declared untouched",
    ),
    "tiles_past_a_count_visited": Fault(
        kernel=SWIGLU, old="return tl.minimum(tl.maximum(count, 0), tokens)",
        new="return 0 * count + tokens",
        check="exact", cause="out_of_bounds", words="past the end of rows_ptr",
    ),
    "count_of_the_neighbour": Fault(
        kernel=SWIGLU, old="live = tl.sum(tl.where(own, count, 0), 0)",
        new="live = tl.sum(tl.where(tl.arange(0, EXPERTS) == expert + 1, count, 0), 0)",
        check="exact", cause="unwritten", words="leaves codes[2, 0, 0] unwritten, which is live",
    ),
    "room_of_rows_as_the_pitch_of_scales": Fault(
        kernel=SWIGLU, old="to = scales_ptr + expert.to(tl.int64) * scales_expert",
        new="to = scales_ptr + expert.to(tl.int64) * tokens",
        check="exact", cause="unwritten", words="leaves scales[2, 0, 0] unwritten, which is live",
    ),
    "rows_of_a_tile_as_the_room": Fault(
        kernel=SWIGLU, old="wide = expert.to(tl.int64) * tokens + row",
        new="wide = expert.to(tl.int64) * ROWS + row",
        check="exact", cause="unwritten", words="leaves codes[1, 0, 0] unwritten, which is live",
    ),
    "scales_by_row_where_columns_are_asked_for": Fault(
        kernel=SWIGLU, old=SCALE_PLACE, new="to += row.to(tl.int64) * across + column",
        changes={"layout": ScaleLayout.COLUMN},
        check="exact", cause="unwritten", words="leaves scales[0, 0, 1] unwritten, which is live",
    ),
    "words_by_row": Fault(
        kernel=SWIGLU, old=SCALE_PLACE, new="to += row.to(tl.int64) * across + column",
        changes=PACKED,
        check="exact", cause="unwritten", words="leaves scales[0, 0, 1] unwritten",
    ),
    "a_byte_for_a_group_that_does_not_exist": Fault(
        kernel=SWIGLU, old="tl.where(group < groups, byte, 0)", new="byte", changes=PACKED,
        check="exact", cause="bad_output", words="packs exponents of groups that do not exist",
    ),
    "format_lost": Fault(
        kernel=SWIGLU, old="tl.max(tl.abs(y), 1), POWER_OF_TWO)",
        new="tl.max(tl.abs(y), 1), False)", changes={"scale": ScaleFormat.UE8M0},
        check="exact", cause="power_lost", words="Fp32 scales where powers of two are asked for",
    ),
    "gemm_past_a_count": Fault(
        kernel=FC1, old="count = live_rows(counts_ptr, expert, True, tokens)",
        new="count = tokens",
        check="write_set", cause="beside", words="writes out[0, 6, 0], declared untouched",
    ),
    "gemm_by_the_count_of_the_neighbour": Fault(
        kernel=FC1, old="live_rows(counts_ptr, expert, True, tokens)",
        new="live_rows(counts_ptr, (expert + 1) % (tl.num_programs(0) // tiles), True, tokens)",
        check="exact", cause="unwritten", words="leaves out[1, 0, 0] unwritten, which is live",
    ),
    "gemm_with_one_expert_s_weights": Fault(
        kernel=FC1, old="w_tile = w_ptr + expert * w_expert",
        new="w_tile = w_ptr + 0 * expert * w_expert",
        check="exact", cause="wrong_expert", words="The codes of the previous expert's weights",
    ),
}  # fmt: skip


def plant(patch: pytest.MonkeyPatch, old: str, new: str, folder: Path) -> None:
    """Let a copy of the kernels be launched in which one line is changed."""
    source = Path(batched.batched_kernels.__file__).read_text()
    assert source.count(old) == 1, f"the line has changed, mend the fault: {old}"
    path = folder / "planted_batched.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    patch.setattr(batched, "batched_kernels", copy)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_batched_kernel_is_red_and_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fault = FAULTS[name]
    plant(monkeypatch, fault.old, fault.new, tmp_path)
    case = dataclasses.replace(CASES[fault.kernel], **fault.changes)
    kernel = dataclasses.replace(find(fault.kernel), contract=JUDGED)
    red = next(v for v in check(kernel, case, "cpu") if v.failed)
    assert (str(red.check), red.cause) == (fault.check, fault.cause), red.message
    assert fault.words in red.message


def lost_powers() -> str:
    """Return how many of some maxima have another exponent than they should have, or nothing."""
    amax = every_amax()[: 16 * 128]
    wrong = int((exponents(amax, "cpu") != right_power(amax)).sum())
    return f"{wrong} exponents" if wrong else ""


UNSEEN: dict[str, tuple[str, str, Callable[[], str], str]] = {
    "limit_of_another_expert": (
        "owner = tl.where(live, expert, -1)",
        "owner = tl.where(live, (expert + 1) % experts, -1)",
        lambda: swiglu_differs("limits", ScaleFormat.FP32, "cpu"),
        "other codes",
    ),
    "one_tile_for_each_program": (
        "in range(tl.program_id(0), tiles * across, tl.num_programs(0)):",
        "in range(tl.program_id(0), tl.program_id(0) + 1):",
        lambda: swiglu_differs("plain", ScaleFormat.FP32, "cpu"),
        "other codes",
    ),
    "count_above_the_room": (
        "return tl.minimum(tl.maximum(count, 0), tokens)",
        "return tl.maximum(count, 0)",
        lambda: gemm_differs(64, "cpu"),
        "OutOfBounds",
    ),
    "rows_past_a_count_read": (
        "y = tl.load(place, mask=inside, other=0.0).to(tl.float32)",
        "y = tl.load(place, mask=(row < tokens)[:, None], other=0.0).to(tl.float32)",
        lambda: visits(gated=False),
        "bytes, not",
    ),
    "a_maximum_that_is_too_small": (
        "scale_and_multiplier(tl.max(tl.abs(y), 1), POWER_OF_TWO)",
        "scale_and_multiplier(tl.max(tl.abs(y), 1) * 0.995, POWER_OF_TWO)",
        lost_powers,
        "exponents",
    ),
    "scales_of_rows_at_another_pitch": (
        "a_scales = a_scale_ptr + expert * a_scale_expert",
        "a_scales = a_scale_ptr + expert * tokens",
        lambda: gemm_differs(16, "cpu"),
        "other rows",
    ),
    "bias_of_the_first_expert": (
        "bias_ptr + expert * N + n",
        "bias_ptr + n",
        lambda: gemm_differs(16, "cpu"),
        "other rows",
    ),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_a_fault_is_told_by_comparing_batched_and_routed_rows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What no case asks for: limits that differ, few programs, counts above the room."""
    old, new, differs, words = UNSEEN[name]
    plant(monkeypatch, old, new, tmp_path)
    if words == "OutOfBounds":
        with pytest.raises(virtual_gpu.OutOfBounds, match="outside the tensors handed over"):
            differs()
    else:
        assert words in differs()
