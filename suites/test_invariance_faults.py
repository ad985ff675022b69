"""What batches catch: kernels whose rows depend on the other rows, and what is said of it."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_parity.harness.cases.sequences import base_of, batched
from moe_parity.harness.checks.calls import Player
from moe_parity.harness.checks.compare import comparable
from moe_parity.harness.checks.expect import repro
from moe_parity.harness.checks.invariance import batches, invariance
from moe_parity.harness.checks.verdict import Verdict
from moe_parity.harness.cli import commands
from moe_parity.kernels import Call, Kernel, load_file, registry
from moe_parity.references.language import Case, Check, Values
from moe_parity.references.recipes.ours import OURS
from moe_parity.references.stages import STAGES
from moe_parity.suites.planted import Run, kernel_of, right


def judged(stage: str, fault: Run) -> tuple[Kernel, Case, Verdict]:
    """Hold a kernel to its batches."""
    kernel = kernel_of(stage, fault)
    base = base_of(kernel, "cpu")
    assert base is not None
    case = batched(kernel, base, "cpu")
    assert case is not None
    (verdict,) = invariance(kernel, case, "cpu")
    return kernel, case, verdict


def changed(out: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Change the first bit of some rows of the last output that has rows."""
    last = [value for value in out.values() if value.dim() > 1][-1]
    last.view(torch.uint8)[rows, 0] ^= 1
    return out


# --- faults -------------------------------------------------------------------------------------


def one_scale_for_all(call: Call) -> dict[str, Tensor]:
    """Quantize with the largest absolute value of all rows."""
    out = right(call)
    out["scales"].copy_(out["scales"].nan_to_num(0.0).amax().expand_as(out["scales"]))
    return out


def the_place_in_a_tile(call: Call) -> dict[str, Tensor]:
    """Round the last row of every tile of 16 differently."""
    out = right(call)
    rows = torch.arange(len(list(out.values())[-1]))
    return changed(out, rows[rows % 16 == 15])


def the_first_row(call: Call) -> dict[str, Tensor]:
    return changed(right(call), torch.arange(1))


def a_nan_beside(call: Call) -> dict[str, Tensor]:
    """Multiply the rows of others by zero, where leaving them out was meant."""
    out = right(call)
    for name, value in out.items():
        if value.dtype.is_floating_point:
            live = call.stage.live(call.case, call.inputs).get(name)
            seen = value if live is None else value[live]
            out[name] = value.copy_(value + 0 * seen.float().sum().to(value.dtype))
    return out


def a_large_value_beside(call: Call) -> dict[str, Tensor]:
    """Flush what is small beside the largest of all rows."""
    out = right(call)
    last = list(out.values())[-1]
    most = last.float().nan_to_num(0.0, 1e38, 1e38).abs().max()
    last[last.float().abs() * 1e10 < most] = 0
    return out


def how_many_rows_an_expert_has(call: Call) -> dict[str, Tensor]:
    """Take another path for an expert with more than 16 rows."""
    out = right(call)
    expert = call.inputs.expert
    many = torch.bincount(expert[expert >= 0], minlength=1) > 16
    crowded = many[expert.clamp(min=0)] & (expert >= 0)
    last = list(out.values())[-1]
    crowded = crowded.view(len(last), -1).any(1)
    return changed(out, crowded.nonzero()[:, 0])


def a_crowded_expert(call: Call) -> dict[str, Tensor]:
    """Run out of rows where more than 200 tokens take one expert."""
    out = right(call)
    expert = call.inputs.expert
    full = int(torch.bincount(expert[expert >= 0], minlength=1).max()) > 200
    return changed(out, torch.arange(1 if full else 0))


def one_size(call: Call) -> dict[str, Tensor]:
    """Have a bucket whose last row is wrong."""
    return changed(right(call), torch.tensor([64] if call.case.m == 65 else [], dtype=torch.int64))


def the_order(call: Call) -> dict[str, Tensor]:
    """Let a row lean on the one before it."""
    out = right(call)
    last = list(out.values())[-1]
    before = last.view(torch.uint8)[:, 0].clone()
    rows = (torch.arange(1, len(last)))[before[:-1].int() % 2 == 1]
    return changed(out, rows)


FAULTS: tuple[tuple[str, Callable[[Call], dict[str, Tensor]], str], ...] = (
    ("act_quant", one_scale_for_all, "alone"),
    ("swiglu_quant", one_scale_for_all, "alone"),
    ("act_quant", the_place_in_a_tile, ""),
    ("fc1", the_place_in_a_tile, ""),
    ("layer", the_place_in_a_tile, ""),
    ("swiglu", the_first_row, "alone"),
    ("weight_quant", the_first_row, "alone"),
    ("combine", a_nan_beside, "beside rows of NaN"),
    ("fc2", a_nan_beside, "beside rows of NaN"),
    ("layer", a_nan_beside, "beside rows of NaN"),
    ("combine", a_large_value_beside, "beside rows of infinities"),
    ("fc1", how_many_rows_an_expert_has, ""),
    ("layer", how_many_rows_an_expert_has, ""),
    ("permute", the_first_row, "alone"),
    ("fc1", a_crowded_expert, "in a batch of 257 copies"),
    ("layer", a_crowded_expert, "in a batch of 257 copies"),
    ("act_quant", one_size, "in a batch of 65, unit 128 "),
    ("combine", one_size, "in a batch of 65, unit 128 "),
    ("swiglu_quant", the_order, ""),
)
"""Stage, fault, and the batch that shows it first, where only one can."""


@pytest.mark.parametrize(("stage", "fault", "batch"), FAULTS)
def test_a_row_that_depends_on_others_is_named(stage: str, fault: Run, batch: str):
    kernel, case, verdict = judged(stage, fault)
    assert (verdict.check, verdict.verdict) == (Check.INVARIANCE, "fail")
    assert (verdict.cause_kind, verdict.cause) == ("batch", "depends_on_other_rows")
    assert f" has other bits {batch}" in verdict.message
    assert f", among all of {case.id} " in verdict.message
    assert 0 < verdict.differing < verdict.compared
    line = repro(kernel, case, verdict)
    assert f"'faulty-{case.id}' --seed 0 --check invariance" in line


@pytest.mark.parametrize("stage", STAGES)
def test_rows_of_their_own_are_green(stage: str):
    verdict = judged(stage, right)[2]
    assert verdict.verdict == ("skip" if stage == "align" else "pass"), verdict.message
    assert verdict.compared > 0 or "no rows that can be called alone" in verdict.reason


def test_bits_that_change_by_themselves_are_charged_to_no_row():
    """A kernel that draws lots has other bits each time: the other rows are innocent."""
    drawn = torch.Generator().manual_seed(0)

    def draws(call: Call) -> dict[str, Tensor]:
        rows = torch.rand(call.case.m, generator=drawn) < 0.5
        return changed(right(call), rows.nonzero()[:, 0])

    verdict = judged("act_quant", draws)[2]
    assert (verdict.cause_kind, verdict.cause) == ("memory", "not_repeatable")


def test_what_an_earlier_call_left_is_charged_to_no_row():
    """A kernel that keeps its first rows of each shape gives those, in whichever order it gets."""
    kept: dict[tuple[int, int], Tensor] = {}

    def keeps(call: Call) -> dict[str, Tensor]:
        x = kept.setdefault(tuple(call.inputs.x.shape), call.inputs.x.clone())
        return right(dataclasses.replace(call, inputs=dataclasses.replace(call.inputs, x=x)))

    def fresh(every: Sequence[Sequence[Case]]) -> list[int]:
        numbers = []
        for cases in every:
            kept.clear()
            numbers.append(Player(kernel, "cpu").play(cases))
        return numbers

    kernel = kernel_of("act_quant", keeps)
    (verdict,) = invariance(kernel, Case(m=17), "cpu", fresh=fresh)
    assert (verdict.cause_kind, verdict.cause) == ("state", "leaks_state"), verdict.message
    assert verdict.sequence == ("faulty-fp32-m17-h128@0", "faulty-fp32-m17-h128@1")


def test_a_kernel_that_raises_on_some_rows_is_red():
    def raises(call: Call) -> dict[str, Tensor]:
        if call.case.m == 1:
            raise ValueError("one row")
        return right(call)

    verdict = judged("act_quant", raises)[2]
    assert (verdict.verdict, verdict.cause) == ("fail", "ValueError")


def test_rows_are_compared_where_the_recipe_is_the_same():
    """A kernel whose recipe depends on the number of rows is left alone where it changes."""
    divides = dict(STAGES["act_quant"].neighbours(OURS))
    other = divides["quant.apply=mul_recip"]

    def follows(call: Call) -> dict[str, Tensor]:
        made = call.stage.reference(call.case, call.inputs, OURS if call.case.m > 9 else other)
        return {name: call.new(name).copy_(value) for name, value in made.items()}

    registry.register(
        "faulty", stage="act_quant", recipes=lambda case, _: (OURS if case.m > 9 else other,)
    )(follows)
    kernel = registry._KERNELS.pop("faulty")
    case = Case(m=40, h=512, values=Values.AIMED)
    (verdict,) = invariance(kernel, case, "cpu")
    assert verdict.verdict == "pass", verdict.message
    (verdict,) = invariance(kernel_of("act_quant", follows), case, "cpu")
    assert verdict.verdict == "fail"


@pytest.mark.parametrize("stage", [name for name in STAGES if name != "align"])
def test_a_batch_has_the_rows_that_it_says(stage: str):
    """What a recipe gives for a batch is what it gives for the same rows of the whole case."""
    kernel = kernel_of(stage, right)
    own = STAGES[stage]
    case = batched(kernel, base_of(kernel, "cpu"), "cpu")
    made = own.inputs(case)
    recipe = kernel.recipes(case, "cpu")[0]
    whole = own.reference(case, made, recipe)
    sizes, orders = set(), set()
    for batch in batches(kernel, case, made):
        units = own.units(batch.part.inputs)
        sizes.add(units)
        name, rows = next(iter(batch.part.rows.items()))
        orders.add(tuple(rows.tolist()))
        if stage.startswith("swiglu"):  # rows lie sorted by expert, whatever is asked for
            assert bool((batch.part.inputs.expert.diff() >= 0).all())
        if batch.clean is None:
            got = own.reference(batch.part.case, batch.part.inputs, recipe)[name]
            assert torch.equal(comparable(got), comparable(whole[name][rows])), batch.words
    assert len(orders) > 5 or stage == "weight_quant"
    assert {1, own.units(made)} <= sizes


def test_the_line_reproduces_it(tmp_path: Path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\nfrom moe_parity.kernels import register\n"
        '@register("mine", stage="combine", recipes="ours")\n'
        "def mine(call):\n"
        "    from moe_parity.suites.planted import right\n"
        '    out = right(call)["out"]\n'
        "    return out.copy_(out + 0 * out.float().sum().to(out.dtype))\n"
    )
    (kernel,) = load_file(path)
    try:
        case = batched(kernel, base_of(kernel, "cpu"), "cpu")
        (verdict,) = invariance(kernel, case, "cpu")
        line = shlex.split(repro(kernel, case, verdict))
        assert commands.main(line[1:]) == commands.FAILED
        assert "has other bits beside rows of NaN" in capsys.readouterr().out
    finally:
        registry._KERNELS.pop("mine")
