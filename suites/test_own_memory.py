"""Memory that a kernel takes from torch itself: poisoned anew in every call, guarded, judged.

Faults are planted in kernels of several stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_parity.harness.calling.poison import GUARD, POISONS
from moe_parity.harness.calling.run import run
from moe_parity.harness.checks.flow import check
from moe_parity.harness.checks.verdict import Verdict
from moe_parity.kernels import Call
from moe_parity.references.language import Case, Check
from moe_parity.references.recipes.ours import NO_ROUNDING, OURS
from moe_parity.references.stages import STAGES
from moe_parity.suites.planted import Run, kernel_of

CASES = {
    "act_quant": Case(m=5, h=256),
    "align": Case(m=5, e=4, k=2),
    "fc1": Case(m=3, e=4, k=2, h=256, i=64),
    "swiglu": Case(m=6, i=128),
    "combine": Case(m=5, e=4, k=2, h=128),
    "layer": Case(m=3, e=4, k=2, h=128, i=128),
}

# --- kernels that are right, and make one mistake each -------------------------------------------


def made(call: Call) -> dict[str, Tensor]:
    recipe = NO_ROUNDING if call.stage.name == "align" else OURS
    return dict(call.stage.reference(call.case, call.inputs, recipe))


def owned(call: Call) -> dict[str, Tensor]:
    """Return what is right in memory from torch.empty."""
    return {name: torch.empty_like(value).copy_(value) for name, value in made(call).items()}


def last_row(call: Call, out: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Return the last output and its last row that somebody owns."""
    name, value = list(out.items())[-1]
    live = call.stage.live(call.case, call.inputs).get(name)
    return value, len(value) - 1 if live is None else int(live.nonzero()[-1])


def accumulates(call: Call) -> dict[str, Tensor]:
    """Add to scratch that is not zeroed."""
    out = owned(call)
    value, row = last_row(call, out)
    total = torch.empty(value[row].shape, dtype=torch.float32)
    value[row] += total.add_(1.0).sub_(1.0).to(value.dtype)
    return out


def flagged(dtype: torch.dtype, test: Callable[[Tensor], bool]) -> Run:
    """Return a kernel that lets a flag which nobody has set decide about one number."""

    def decides(call: Call) -> dict[str, Tensor]:
        out = owned(call)
        value, row = last_row(call, out)
        flag = torch.empty(1, dtype=dtype)
        if test(flag):
            value[row] = 3
        return out

    return decides


def indexes(call: Call) -> dict[str, Tensor]:
    """Read at an index that nobody has written; -1, under the first poison, is one that works."""
    out = owned(call)
    value, _ = last_row(call, out)
    value.view(-1)[torch.empty(1, dtype=torch.int64)]
    return out


def forgets_its_last_row(call: Call) -> dict[str, Tensor]:
    right = made(call)
    _, row = last_row(call, right)
    out = {name: torch.empty_like(value) for name, value in right.items()}
    for name, value in right.items():
        keep = row if name == list(right)[-1] else len(value)
        out[name][:keep] = value[:keep]
        out[name][keep + 1 :] = value[keep + 1 :]
    return out


def strays(behind: bool) -> Run:
    def writes(call: Call) -> dict[str, Tensor]:
        out = owned(call)
        scratch = torch.empty(8, 4)
        at = scratch.storage_offset() + (32 if behind else -1)
        scratch.as_strided((1,), (1,), at).zero_()
        return out

    return writes


def writes_nan(call: Call) -> dict[str, Tensor]:
    """Write, as NaN, the very bits of the first poison."""
    out = owned(call)
    value, row = last_row(call, out)
    value[row].view(torch.uint8).fill_(POISONS[0])
    return out


def writes_another(call: Call) -> dict[str, Tensor]:
    out = owned(call)
    value, row = last_row(call, out)
    value[row, ::3] = value[row, ::3] * 1.75 + 3
    return out


def judged(stage: str, fault: Run) -> dict[str, Verdict]:
    return {v.check: v for v in check(kernel_of(stage, fault), CASES[stage], "cpu") if v.failed}


FAULTS: tuple[tuple[str, Run, Check, str, str], ...] = (
    ("accumulator", accumulates, Check.RERUN, "poison_read", "reads memory that nobody has"),
    (
        "flag-not-zero", flagged(torch.uint8, lambda flag: bool(flag != 0)),
        Check.RERUN, "poison_read", "with other contents it gives other bits",
    ),
    (
        "flag-zero", flagged(torch.int32, lambda flag: int(flag) == 0),
        Check.RERUN, "poison_read", "with other contents it gives other bits",
    ),
    (
        "flag-positive", flagged(torch.float32, lambda flag: bool(flag > 0)),
        Check.RERUN, "poison_read", "with other contents it gives other bits",
    ),
    (
        "flag-bool", flagged(torch.bool, bool),
        Check.RERUN, "poison_read", "with other contents it gives other bits",
    ),
    (
        "index", indexes, Check.RERUN, "poison_read",
        "It reads memory that nobody has written, and fails on what it holds; on other contents",
    ),
    ("forgotten", forgets_its_last_row, Check.WRITE_SET, "unwritten", "unwritten, which is live"),
    (
        "behind", strays(behind=True), Check.WRITE_SET, "beside",
        "writes beside memory of its own: 4 bytes behind the end of its fp32 [8, 4] from "
        "torch.empty.",
    ),
    (
        "before", strays(behind=False), Check.WRITE_SET, "beside",
        "4 bytes before the start of its fp32 [8, 4] from torch.empty.",
    ),
)  # fmt: skip


@pytest.mark.parametrize("stage", CASES)
@pytest.mark.parametrize(
    ("fault", "name", "cause", "words"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS]
)
def test_a_fault_in_memory_of_its_own_is_red(
    stage: str, fault: Run, name: Check, cause: str, words: str
):
    found = judged(stage, fault)
    assert name in found, {v.check: v.message for v in found.values()}
    assert (found[name].cause_kind, found[name].cause) == ("memory", cause)
    assert words in found[name].message
    assert {v.cause for v in found.values()} == {cause}  # one cause, whatever the check


@pytest.mark.parametrize("stage", CASES)
def test_the_kernel_without_a_fault_is_green_and_its_write_set_is_looked_at(stage: str):
    verdicts = {v.check: v for v in check(kernel_of(stage, owned), CASES[stage], "cpu")}
    assert {v.verdict for v in verdicts.values()} <= {"pass", "skip"}
    assert verdicts["write_set"].verdict == "pass"
    assert verdicts["write_set"].compared >= 2 * GUARD


@pytest.mark.parametrize("stage", [name for name in CASES if name not in ("align", "layer")])
def test_what_the_kernel_wrote_is_told_from_what_it_left(stage: str):
    """A NaN with the bits of the poison, and a wrong number, are no matter of memory."""
    wrote = judged(stage, writes_nan)["exact"]
    assert (wrote.cause_kind, wrote.cause) == ("pattern", "nan")
    assert "written with NaN" in wrote.message
    other = judged(stage, writes_another)["exact"]
    assert other.cause_kind == "pattern"
    assert "written differently" in other.message
    left = judged(stage, forgets_its_last_row)["exact"]
    assert "unwritten" in left.message
    assert "written with NaN" not in left.message


def test_a_number_that_is_the_poison_by_chance_is_not_called_unwritten():
    """Every number depends on memory, and some have the bytes of the fill under both poisons."""

    def adds(call: Call) -> Tensor:
        out, total = owned(call)["out"], torch.empty(1, dtype=torch.float32)
        # the fills of the two allocations under the second poison, in their order
        out.view(torch.int16)[0, 0] = -1 if bool(total.isnan()) else 0x3B3B
        out[1:] += total.to(out.dtype)
        if float(total) == 0:
            out.copy_(made(call)["out"])
        return out

    assert judged("combine", adds)["exact"].cause == "poison_read"


def test_a_kernel_that_takes_nothing_is_not_called_on_zeros():
    """And one that does is called once more."""
    calls: list[str] = []

    def takes_nothing(call: Call) -> dict[str, Tensor]:
        calls.append(call.case.id)
        return {name: value.clone() for name, value in made(call).items()}

    def takes(call: Call) -> dict[str, Tensor]:
        calls.append(call.case.id)
        return owned(call)

    counts = []
    for kernel in (takes_nothing, takes):
        calls.clear()
        assert not judged("swiglu", kernel)
        counts.append(calls.count(CASES["swiglu"].id))
    assert counts == [2, 3]
    found = {v.check: v for v in check(kernel_of("swiglu", takes_nothing), CASES["swiglu"], "cpu")}
    assert found["write_set"].verdict == "skip"


def test_an_error_of_its_own_is_no_matter_of_memory():
    def breaks(call: Call) -> Any:
        raise ValueError("in every call")

    assert judged("combine", breaks)["exact"].cause == "ValueError"


def test_settings_are_what_the_user_set():
    seen = []

    def looks(call: Call) -> dict[str, Tensor]:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return owned(call)

    kernel, case = kernel_of("combine", looks), CASES["combine"]
    try:
        for setting in (False, True):
            torch.use_deterministic_algorithms(setting)
            run(kernel, case, STAGES["combine"].inputs(case))
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [False, True]
