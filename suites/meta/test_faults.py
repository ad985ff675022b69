"""Planted faults of every kind: each is red and named, and the table of kinds is what exists.

A few are held to the drawn cases here; what the whole default check says of all of them is
measured by ``python -m moe_parity.suites.faulty`` (docs/measurements/planted-faults.md).
"""

from __future__ import annotations

import ast
import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from moe_parity.harness.cases.sweep import swept
from moe_parity.harness.checks.expect import Recorder, claim
from moe_parity.harness.checks.flow import bits, check
from moe_parity.references.language import Case, Routing, Skip, Why
from moe_parity.references.recipes.ours import NO_ROUNDING, OURS
from moe_parity.references.stages import STAGES
from moe_parity.reports.records import Record
from moe_parity.suites.faulty.commanded import commanded, told
from moe_parity.suites.faulty.kinds import AXES, KINDS, Kind
from moe_parity.suites.faulty.measuring import measured
from moe_parity.suites.faulty.planting import Fault
from moe_parity.suites.faulty.table import FAULTS
from moe_parity.suites.planted import CASES, kernel_of, right

SUITES = Path(__file__).resolve().parents[1]
BY_NAME = {fault.name: fault for fault in FAULTS}
QUICK = (
    "sum_m3_weightless", "gemm_tokens_not_8", "permute_m129_row_left", "quant_no_tokens_raises",
    "align_power_of_two", "align_past_the_end", "sum_k_above_8", "sum_duplicate_lost",
    "align_empty_expert", "permute_last_rank", "quant_scale_divided", "quant_scales_left",
    "layer_k_above_8",
)  # fmt: skip
"""Those that drawn cases show soonest, of every stage's neighbourhood."""


@pytest.mark.parametrize("fault", [BY_NAME[name] for name in QUICK], ids=lambda f: f.name)
def test_drawn_cases_show_a_fault_and_its_cause(fault: Fault, parity_recorder: Recorder):
    found = measured(fault, drawn_only=True)
    text = f"{fault.name}, which {fault.words}: red in {found.suite or 'none'}, {found.causes}."
    claim(
        parity_recorder, "fault_named", "" if found.named else text, stage=fault.stage,
        device="reference", compared=found.cases,
    )  # fmt: skip


def test_the_command_shows_a_fault_and_its_cause():
    """Under a seed, among the tests that a word of -k takes."""
    (line,) = commanded([BY_NAME["sum_workspace"]], 3, ["test_sequences"], 0)
    assert (line["suite"], line["suites"]) == ("test_sequences", ["test_sequences.py"])
    assert (line["named"], line["causes"], line["seed"]) == (True, ["returns_workspace"], 3)
    assert (line["red"], line["records"]) == (1, 1)


def test_what_the_command_says_of_a_fault_is_what_its_own_red_records_say():
    def record(check: str, verdict: Any, kernel: str, cause: str = "", **more: Any) -> Record:
        where = f"suites/test_drawn.py::test_drawn[{kernel}]"
        return Record(id=f"{where}:{check}", check=check, verdict=verdict, nodeid=where,
                      suite="drawn", kernel=kernel, cause=cause, **more)  # fmt: skip

    name = "sum_m3_weightless"
    red = {"cause_kind": "mistake"}
    records = [
        record("exact", "fail", "another", "weights_lost", **red),
        record("rerun", "pass", name),
        record("mutants", "fail", name, "weights_lost"),  # a mutant, and no reason
        record("exact", "fail", name, "unknown", **red),
        record("test", "fail", name),
    ]
    found, tests = told(BY_NAME[name], records)
    assert (found.suite, found.named, found.causes, found.cases) == (
        "test_drawn", False, ["unknown"], 3,
    )  # fmt: skip
    assert tests == [f"suites/test_drawn.py::test_drawn[{name}]"]
    also = record("finite", "fail", name, "mean", alternatives=("weights_lost",), **red)
    found, _ = told(BY_NAME[name], [*records, also])
    assert (found.named, found.causes) == (True, ["unknown", "mean"])
    found, tests = told(BY_NAME[name], records[:2])
    assert (found.suite, tests, found.cases) == ("", [], 1)


def test_a_kernel_without_a_fault_is_accused_of_nothing():
    """The way in which faults are planted is none itself."""
    for stage in ("align", "permute", "combine"):
        case, kernel = CASES[stage], kernel_of(stage, right)
        wrong = [v.message for v in check(kernel, dataclasses.replace(case, seed=5), "cpu")
                 if v.failed]  # fmt: skip
        assert not wrong, wrong


def test_rows_alone_say_why_they_differ():
    """A bucket that only the rows alone fall into is named there, not called a batch's fault."""
    fault = BY_NAME["sum_m3_weightless"]
    case = dataclasses.replace(CASES["combine"], m=7)
    (red,) = (v for v in check(fault.kernel, case, "cpu") if v.failed)
    assert red.check == "row_subset"
    assert (red.cause_kind, red.cause) == ("mistake", "weights_lost")
    assert "the rows alone give other bits" in red.message
    changed = dataclasses.replace(case, routing=Routing.NOBODY)
    assert not any(v.failed for v in check(kernel_of("combine", right), changed, "cpu"))


@pytest.mark.parametrize("name", ["permute_257_last_lost", "align_257_last_lost"])
def test_the_last_of_257_experts_is_hit_whatever_the_seed(name: str):
    """Among every size: few tokens hit it by chance."""
    kernel = BY_NAME[name].kernel
    for seed in range(3):
        met = [case for case in swept(kernel, "cpu", 40, seed) if case.e == 257]
        red = next(found for case in met if (found := bits(kernel, case, "cpu")).failed)
        assert "last_expert_lost" in red.causes
    # a kernel that takes no such routing has its sizes all the same
    others = swept(dataclasses.replace(kernel, supports=_alone), "cpu", 40)
    assert len([case for case in others if case.e == 257]) == len(met)


def _alone(case: Case, device: str) -> Skip | None:
    return Skip(Why.UNSUPPORTED, "other experts") if case.routing is Routing.LAST else None


@pytest.mark.parametrize("stage", ["align", "permute", "combine"])
def test_mistakes_are_made_of_no_token(stage: str):
    """A wrong number of blocks or counts is red without a token too, and has to have a cause."""
    case, owner = dataclasses.replace(CASES[stage], m=0), STAGES[stage]
    inputs = owner.inputs(case)
    recipe = OURS if stage == "combine" else NO_ROUNDING
    made = [mistake.outputs() for mistake in owner.mistakes(case, inputs, recipe)]
    assert made


def test_a_block_for_no_token_has_its_cause():
    case = dataclasses.replace(CASES["align"], m=0)
    (red,) = (v for v in check(BY_NAME["align_empty_expert"].kernel, case, "cpu") if v.failed)
    assert "empty_expert" in red.causes


# --- the table ------------------------------------------------------------------------------------


@cache
def names_in(file: str) -> frozenset[str]:
    """Return the tests of a file below the suites."""
    body = ast.parse((SUITES / file).read_text()).body
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_a_kind_is_planted_or_says_why_not(kind: Kind):
    for name in kind.tests:
        file, _, test = name.partition("::")
        assert test in names_in(file), name
    kernels = [fault for fault in FAULTS if kind.name in fault.kinds]
    assert kernels or kind.tests or kind.reason


@pytest.mark.parametrize("kind", AXES, ids=lambda kind: kind.name)
def test_an_axis_has_faults_in_two_stages(kind: Kind):
    stages = {fault.stage for fault in FAULTS if kind.name in fault.kinds}
    assert len(stages) > 1 or kind.tests or kind.reason, stages


def test_every_fault_is_of_known_kinds_and_has_a_name_of_its_own():
    assert {kind for fault in FAULTS for kind in fault.kinds} <= KINDS.keys()
    assert len(BY_NAME) == len(FAULTS)
