"""A failure is made small: how far, for which reason, in how many cases."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from moe_parity.harness.diagnosis.cause import CauseKind
from moe_parity.harness.fuzz.reason import Failure, Reason, judge
from moe_parity.harness.fuzz.shrink import Shrinking
from moe_parity.kernels import Call
from moe_parity.references.language import Case, Hazard, ScaleFormat, Values
from moe_parity.references.recipes.ours import OURS
from moe_parity.references.stages import STAGES
from moe_parity.suites.planted import Run, following, kernel_of, right

REASON = Reason("exact", "fc1", "k_tail")


def changed(change: Callable[[Call, dict[str, Any]], None]) -> Run:
    """Return a kernel that is right but for what ``change`` does to its outputs."""

    def run(call: Call) -> Any:
        out = right(call)
        change(call, out)
        return out

    return run


def decided(stage: str, label: str) -> Run:
    """Return a kernel of our recipe with one decision changed."""
    return following(dict(STAGES[stage].neighbours(OURS))[label])


def row(name: str, number: int, value: int = 0) -> Run:
    def change(call: Call, out: dict[str, Any]) -> None:
        if out[name].shape[0] > number:
            out[name][number] = value

    return changed(change)


def second_group(call: Call, out: dict[str, Any]) -> None:
    if out["codes"].shape[1] > 128:
        out["codes"][:, 128:256] = out["codes"][:, :128]


def shifted(call: Call, out: dict[str, Any]) -> None:
    first = next(iter(out.values())).view(-1)
    if first.numel() > 1:
        first[1] += 1


def other_token(call: Call, out: dict[str, Any]) -> None:
    last = list(out.values())[-1]
    if last.shape[0] > 1:
        last[1] = last[0]


LARGE = Case(m=17, e=6, k=3, h=512, i=384, ep_size=2, clamp=9.97, hazard=Hazard.STRIDED, seed=5)
AIMED = {"values": Values.AIMED}
POWERS = {"scale": ScaleFormat.UE8M0}
SUM = {"values": Values.AIMED, "e": 28, "k": 7, "h": 768, "m": 14}
FAULTS = {
    "act_quant divides": ("act_quant", decided("act_quant", "quant.apply=divide"), AIMED),
    "act_quant repeats a group": ("act_quant", changed(second_group), POWERS),
    "act_quant loses token 1": ("act_quant", row("codes", 1), {}),
    "weight_quant rounds down": (
        "weight_quant", decided("weight_quant", "quant.power_of_two=truncate"), AIMED | POWERS
    ),
    "align shifts": ("align", changed(shifted), {}),
    "permute repeats a token": ("permute", changed(other_token), POWERS),
    "fc1 adds in halves": ("fc1", decided("fc1", "gemm.unit=mma_f16"), {}),
    "swiglu clamps late": ("swiglu", decided("swiglu", "swiglu.clamp_order=after"), AIMED),
    "swiglu_quant repeats a group": ("swiglu_quant", changed(second_group), AIMED),
    "fc2 scales the other way": ("fc2", decided("fc2", "gemm.scale_order=b_then_a"), {}),
    "combine adds backwards": ("combine", decided("combine", "combine.order=descending"), SUM),
    "layer weighs early": ("layer", decided("layer", "combine.weights_at=epilogue"), POWERS),
}  # fmt: skip
"""Name -> stage, kernel, and the words of a case in which it shows, beside those of LARGE."""

NEEDS = {"combine adds backwards": {"e": 3, "k": 3}}
"""What a fault cannot do without: two summands have one order."""


def started(stage: str, words: dict[str, Any]) -> Case:
    """Return a case as large and as busy as one that is drawn."""
    reads = STAGES[stage].reads
    known = {f.name: getattr(LARGE, f.name) for f in dataclasses.fields(Case) if f.name in reads}
    taken = {name: v for name, v in known.items() if reads[name] is None or v in reads[name]}
    return Case(**taken | words, seed=LARGE.seed)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_made_small(name):
    """At most 2 tokens, 2 experts and 2 groups, or what the fault itself needs, and few cases."""
    stage, run, words = FAULTS[name]
    kernel = kernel_of(stage, run)
    large = judge(kernel, started(stage, words), "cpu")[0]
    shrinking = Shrinking(
        large,
        kernel.stage.sizes,
        lambda case: judge(kernel, case, "cpu"),
        lambda case: kernel.declines(case, "cpu") is None,
    )
    small = shrinking.run()
    most = {"m": 2, "e": 2, "k": 2, "h": 256, "i": 256} | NEEDS.get(name, {})
    assert not {n: v for n, v in most.items() if getattr(small.case, n) > v}
    assert shrinking.cases <= 150
    assert small.reason in {failure.reason for failure in judge(kernel, small.case, "cpu")}
    assert small.case.hazard is Hazard.NONE
    assert small.case.ep_size == 1
    if large.kind != CauseKind.PATTERN:
        assert small.reason == large.reason


def test_a_seed_stays_where_the_rows_show_the_fault():
    """The rows of a smaller case keep their bits, so that the first one still fails."""
    kernel = kernel_of("align", changed(shifted))
    start = started("align", {})
    large = judge(kernel, start, "cpu")[0]
    small = Shrinking(
        large, kernel.stage.sizes, lambda case: judge(kernel, case, "cpu"), lambda case: True
    ).run()
    assert small.case.seed == start.seed


def pretending(
    fails: Callable[[Case], str], start: Case, **options: Any
) -> tuple[Failure, Shrinking]:
    """Shrink a case of fc1 that fails, for a cause, where a function says so."""

    def judged(case: Case) -> tuple[Failure, ...]:
        cause = fails(case)
        found = Failure(case=case, reason=dataclasses.replace(REASON, cause=cause), sentence=cause)
        return (found,) if cause else ()

    sizes = STAGES["fc1"].sizes
    shrinking = Shrinking(judged(start)[0], sizes, judged, lambda case: True, **options)
    return shrinking.run(), shrinking


def test_a_size_shrinks_to_the_first_that_fails():
    start = Case(m=100, e=64, k=6, h=2048, i=1024, seed=3)
    small, _ = pretending(lambda c: "k_tail" if c.m >= 33 and c.h >= 640 else "", start)
    assert small.case == Case(m=33, h=640, i=1, seed=3)


def test_a_reason_is_kept():
    """Smaller cases that fail for another one are left alone."""
    start = Case(m=40, e=8, k=2, seed=3)
    small, _ = pretending(lambda c: "k_tail" if c.m >= 5 else "unwritten", start)
    assert small.case.m == 5
    assert small.reason == REASON


def test_a_budget_is_kept():
    start = Case(m=4000, e=512, k=8, h=7168, i=4096)
    _, shrinking = pretending(
        lambda c: "k_tail" if c.m > 3210 and c.h > 4321 else "", start, budget=10
    )
    assert shrinking.cases == 10


def test_every_step_is_told():
    """So that an interrupt keeps the smallest case so far."""
    told: list[Failure] = []
    start = Case(m=40, e=8, k=2)
    small, _ = pretending(lambda c: "k_tail" if c.m > 4 else "", start, better=told.append)
    assert told[-1] == small
    assert [f.case.m for f in told] == sorted((f.case.m for f in told), reverse=True)
