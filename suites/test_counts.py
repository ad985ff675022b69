"""What a check counts, and what its record says besides the sentence."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_parity.harness.checks.compare import differences
from moe_parity.harness.checks.expect import digest, record
from moe_parity.harness.checks.flow import check
from moe_parity.harness.checks.verdict import Verdict
from moe_parity.kernels import Call
from moe_parity.kernels.registry import RecipesOf
from moe_parity.references.language import Case, Check, Contract, Recipe, Values
from moe_parity.references.language.stage import Kind, Output
from moe_parity.references.recipes.ours import OURS
from moe_parity.references.stages import STAGES
from moe_parity.suites.planted import CASES, following, kernel_of, red, right
from moe_parity.suites.test_words import judged, last_of, leaves_a_row


def test_power_is_measured_where_it_is_asked_for():
    """With it the outputs that could have been red, the nearest mutant; without it nothing."""
    case, kernel = CASES["act_quant"], kernel_of("act_quant", right)
    asked, not_asked = (next(iter(check(kernel, case, "cpu", power=p))) for p in (True, False))
    assert asked.verdict == not_asked.verdict == "pass"
    assert asked.could_show
    assert asked.could_show < asked.compared
    assert asked.mutant_distance
    assert asked.nearest_mutant
    assert not_asked.could_show is None
    assert not_asked.mutant_distance is None
    assert not_asked.nearest_mutant == ""


def test_a_record_says_what_it_is_about():
    """Source, seconds and, where it is red, the command that runs it again."""
    told: list[dict[str, Any]] = []

    class Recorder:
        def add(self, record_fields: dict[str, Any]) -> None:
            told.append(record_fields)

    kernel, case = kernel_of("combine", leaves_a_row), CASES["combine"]
    with pytest.raises(AssertionError, match="Reproduce: parity repro 'faulty-"):
        record(kernel, case, "cpu", check(kernel, case, "cpu"), Recorder())
    by_check = {fields["check"]: fields for fields in told}
    assert len(told) == len(by_check) >= 5
    for fields in told:
        assert 0 <= fields["seconds"] < 60
        assert fields["poison"] is True
        assert bool(fields["repro"]) == (fields["verdict"] == "fail")
        (digits,) = fields["sources"].values()
        assert re.fullmatch(r"[0-9a-f]{12}", digits)
    own = {name: (f["verdict"], f["differing"]) for name, f in by_check.items()}
    outputs = sum(t.numel() for t in right_of(case).values())
    assert by_check["exact"]["compared"] == outputs
    green = {v.check: v for v in check(kernel_of("combine", right), case, "cpu")}
    assert (green["finite"].compared, green["finite"].differing) == (outputs, 0)
    assert own["input_kept"] == ("pass", 0)
    skipped = Verdict(check="x", verdict="skip", reason="none")
    assert (skipped.compared, skipped.differing) == (0, 0)


def test_counts_are_of_live_rows():
    """Elements of a live row, all its axes, once; of no row none."""
    output = Output(kind=Kind.VALUES, shape=(3, 2, 5), dtype=torch.float32, axes=("a", "b", "c"))
    want = torch.zeros(3, 2, 5)
    got = want.clone()
    got[2] = -1.0
    for live, of, wrong in (((1, 0, 1), 20, 10), ((1, 1, 0), 20, 0), ((0, 0, 0), 0, 0)):
        mask = {"x": torch.tensor(live).bool()}
        (found,) = differences({"x": output}, {"x": got}, {"x": want}, mask)
        assert (found.of, found.wrong) == (of, wrong)
        if wrong:
            assert (found.index, found.got) == ((2, 0, 0), "0xbf800000 (-1)")
    (found,) = differences({"x": output}, {"x": got}, {"x": want}, {})
    assert (found.of, found.wrong) == (30, 10)
    none, nobody = torch.zeros(0, 2, 5), {"x": torch.zeros(0).bool()}
    (found,) = differences({"x": output}, {"x": none}, {"x": none}, nobody)
    assert (found.of, found.wrong) == (0, 0)


def either_of(*recipes: Recipe) -> RecipesOf:
    return lambda case, device: recipes


def test_finite_goes_by_any_recipe_that_may_be_followed():
    """A NaN that one of them makes is none; one that neither makes is."""
    case = dataclasses.replace(CASES["act_quant"], values=Values.SPECIAL)
    labels = dict(STAGES["act_quant"].neighbours(OURS))
    keeps, other = OURS, labels["quant.nan_element=low"]
    for first, second in ((keeps, other), (other, keeps)):
        for followed in (keeps, other):
            kernel = kernel_of("act_quant", following(followed))
            assert not red(dataclasses.replace(kernel, recipes=either_of(first, second)), case)


def test_an_output_is_named_where_there_are_several():
    """Slots and blocks of an alignment are both integers; a sum has one output."""

    def moves(call: Call) -> dict[str, Tensor]:
        out = right(call)
        last_of(out, call)[0] += 1
        return out

    several, one = (judged(stage, moves)["exact"].message for stage in ("align", "combine"))
    assert "token 0, k 0 (expert 0) is in no slot, 1 pair in all; " in several
    assert " of out got" not in one


def test_a_contract_without_memory_is_one_call():
    """No second call is made where no check needs it."""
    calls: list[int] = []

    def counts(call: Call) -> dict[str, Tensor]:
        calls.append(1)
        return right(call)

    kernel = kernel_of("combine", counts)
    for dropped, number in (((Check.WRITE_SET, Check.RERUN), 1), ((Check.WRITE_SET,), 2), ((), 2)):
        calls.clear()
        contract = Contract().without(Check.ROW_SUBSET, *dropped)
        promising = dataclasses.replace(kernel, contract=contract)
        verdicts = list(check(promising, CASES["combine"], "cpu"))
        assert len(calls) == number
        assert not any(v.failed for v in verdicts)


def right_of(case: Case) -> dict[str, Tensor]:
    stage = STAGES["combine"]
    return stage.reference(case, stage.inputs(case), OURS)


def test_a_digest_is_of_a_file_or_of_its_package(tmp_path: Path):
    """A module in a package may lean on its neighbours; a file alone may not."""
    alone = tmp_path / "kernel.py"
    alone.write_text("one")
    (tmp_path / "other.py").write_text("two")
    assert digest(alone) == hashlib.sha256(b"one").hexdigest()[:12]
    package = tmp_path / "package"
    package.mkdir()
    for name, text in (("__init__", ""), ("a", "one"), ("b", "two")):
        (package / f"{name}.py").write_text(text)
    assert digest(package / "a.py") == hashlib.sha256(b"onetwo").hexdigest()[:12]
