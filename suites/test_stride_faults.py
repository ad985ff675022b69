"""Strides that are wrong and stay inside their tensor: red, and named, in kernels of pointers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from moe_parity.harness.checks.flow import check
from moe_parity.harness.checks.verdict import Verdict
from moe_parity.kernels import find
from moe_parity.references.arithmetic.formats import ScaleFormat, ScaleLayout
from moe_parity.references.language import Case, Check, Contract, Hazard, Values
from moe_parity.suites.mistaken import settings

steps = pytest.importorskip("moe_parity.kernels.ours.steps", reason="needs Triton")
activation = pytest.importorskip("moe_parity.kernels.ours.activation", reason="needs Triton")

JUDGED = Contract(checks=frozenset({Check.EXACT, Check.WRITE_SET}))
FC1 = Case(m=6, e=3, k=2, h=384, i=128, values=Values.AIMED)
FC2 = Case(m=6, e=3, k=2, h=128, i=384, values=Values.AIMED)
GATE = Case(m=6, i=512, values=Values.AIMED)
Strides = Callable[[list[int]], list[int]]
"""The strides that a launch is given -> those that it gets."""


def launched(module: Any, kernel: str, first: int, count: int, change: Strides, patch: Any) -> None:
    """Let a kernel's launches get other strides: ``count`` arguments from ``first`` on."""
    plain = module.dispatch

    def dispatch(launch: Any, grid: Any, *args: Any, **options: Any) -> Any:
        if launch.__name__ == kernel:
            given = list(args)
            at = slice(first % len(args), first % len(args) + count)
            given[at] = change(given[at])
            args = tuple(given)
        return plain(launch, grid, *args, **options)

    patch.setattr(module, "dispatch", dispatch)


def judged(name: str, case: Case) -> Verdict:
    """Return what the first check says that is red, or the last one."""
    kernel = dataclasses.replace(find(name), contract=JUDGED)
    verdicts = list(check(kernel, case, "cpu"))
    return next((verdict for verdict in verdicts if verdict.failed), verdicts[-1])


def at(place: int, change: Callable[[int], int]) -> Strides:
    return lambda s: [change(one) if n == place else one for n, one in enumerate(s)]


A_ROW, A_SCALE_ROW, A_SCALE_COLUMN, W_EXPERT, W_ROW, W_SCALE_EXPERT, W_SCALE_ROW = range(7)
"""The strides of ``gemm_kernel``, from its argument 9 on."""
GEMMS = {
    "half of a's": ("fc1", A_ROW, lambda s: s // 2, "row", "half their row stride (192"),
    "a's one group short": ("fc2", A_ROW, lambda s: s - 128, "row", "row stride that is 128 too"),
    "the output's for a's": ("fc2", A_ROW, lambda _: 128, "row", "a row stride of N (128 instead"),
    "one too few of a's scales": ("fc2", A_SCALE_ROW, lambda s: s - 1, "scale", "is 1 too small"),
    "half of a's scales": ("fc1", A_SCALE_ROW, lambda s: s // 2, "scale", "half their row stride"),
    "columns of a's scales": (
        "fc1", A_SCALE_COLUMN, lambda s: s - 1, "scale", "column stride that is 1 too small"
    ),
    "half of w's": ("fc1", W_ROW, lambda s: s // 2, "weight", "half their row stride (192"),
    "half an expert": ("fc2", W_EXPERT, lambda s: s // 2, "weight", "half their expert stride"),
    "half an expert's scales": (
        "fc1", W_SCALE_EXPERT, lambda s: s // 2, "scale", "half their expert stride (3 instead"
    ),
    "rows of w's scales": (
        "fc1", W_SCALE_ROW, lambda s: s - 1, "scale", "a row stride that is 1 too small (2 instead"
    ),
}  # fmt: skip
"""Which stride is wrong: stage, argument, change, the name's first word, some of its words."""


@pytest.mark.parametrize("wrong", GEMMS)
def test_a_gemm_of_pointers_that_reads_at_another_stride_is_red_and_named(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, place, change, kind, said = GEMMS[wrong]
    launched(steps, "gemm_kernel", 9, 7, at(place, change), monkeypatch)
    layout = ScaleLayout.COLUMN if place == A_SCALE_COLUMN else ScaleLayout.ROW
    case = dataclasses.replace(FC1 if stage == "fc1" else FC2, layout=layout)
    red = judged(f"ours_{stage}_decode", case)
    assert f"{kind}_stride" in red.causes, red.message
    assert said in red.message


def test_a_gemm_of_pointers_shows_no_stride_of_its_own() -> None:
    for case in (FC1, dataclasses.replace(FC1, hazard=Hazard.GAPS, layout=ScaleLayout.TMA)):
        assert judged("ours_fc1_decode", case).verdict == "pass"


@pytest.mark.parametrize("name", ["ours_swiglu_quant", "ours_swiglu_quant_scalar"])
@pytest.mark.parametrize(
    ("stride", "said"),
    [(512, "half their row stride"), (896, "a row stride that is 128 too small")],
)
def test_an_activation_that_reads_rows_at_another_stride_is_red_and_named(
    name: str, stride: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = f"rows read at {said} ({stride} instead of 1024)"
    launched(activation, "swiglu_quant_kernel", -5, 1, lambda _: [stride], monkeypatch)
    red = judged(name, GATE)
    assert "row_stride" in red.causes, red.message
    assert said in red.message.lower()


@pytest.mark.parametrize("stage", ["fc2", "swiglu_quant", "combine"])
def test_a_stride_is_named_from_the_output_of_a_layer_alone(stage: str) -> None:
    (setting,) = settings()["layer"]
    key = next(
        key
        for key, mistake in setting.mistakes.items()
        if mistake.late and key[1].endswith(f"stride (its {stage})")
    )
    red = setting.verdict(setting.mistakes[key].outputs())
    assert red.failed
    assert key[0] in red.causes, red.message
    assert " instead of " in red.message


# --- stores ---------------------------------------------------------------------------------------

TMA = dataclasses.replace(GATE, m=30, layout=ScaleLayout.TMA)
STORED = {
    "rows not rounded up": (TMA, lambda s: s - 2, "30 instead of 32"),
    "one too small": (TMA, lambda s: s - 1, "31 instead of 32"),
    "packed, rows not rounded up": (
        dataclasses.replace(TMA, i=1024, scale=ScaleFormat.UE8M0_PACKED), lambda s: s - 2,
        "30 instead of 32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", STORED)
def test_scales_that_are_stored_at_a_smaller_stride_are_unwritten_and_named(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, change, said = STORED[wrong]
    launched(activation, "swiglu_quant_kernel", -1, 1, lambda s: [change(s[0])], monkeypatch)
    red = judged("ours_swiglu_quant", case)
    assert {"unwritten", "scale_stride"} <= set(red.causes), red.message
    assert f": scales stored at a column stride of {said}" in red.message


@pytest.mark.parametrize("layout", [ScaleLayout.ROW, ScaleLayout.COLUMN])
def test_scales_that_are_stored_over_one_another_are_a_race(
    layout: ScaleLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = 0 if layout is ScaleLayout.ROW else 1
    half = at(place, lambda s: s // 2)
    launched(activation, "swiglu_quant_kernel", -2, 2, half, monkeypatch)
    red = judged("ours_swiglu_quant", dataclasses.replace(GATE, layout=layout))
    assert red.cause == "race", red.message
    assert "of scales_ptr" in red.message


def test_a_scale_that_is_left_unwritten_for_another_reason_has_no_stride(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fewer programs than rows: what is stored lies where it should."""
    plain = activation.dispatch

    def dispatch(launch: Any, grid: Any, *args: Any, **options: Any) -> Any:
        return plain(launch, (grid[0] - 1, grid[1]), *args, **options)

    monkeypatch.setattr(activation, "dispatch", dispatch)
    red = judged("ours_swiglu_quant", TMA)
    assert red.causes == ("unwritten",), red.message
