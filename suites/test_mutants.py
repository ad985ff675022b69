"""What the checks could have caught: every generated mutant of every recipe is told apart.

First reference against reference, on the aimed inputs of the changed decision; then through the
very check that judges kernels, which must turn red and name the decision.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from moe_parity.harness.checks.quant import check_quant
from moe_parity.harness.expect import Recorder
from moe_parity.harness.inputs import aimed_rows
from moe_parity.harness.mutants import ENOUGH, Mutant, mutants, power
from moe_parity.harness.run import reference
from moe_parity.kernels import Kernel
from moe_parity.references.language import (
    Case,
    Check,
    Contract,
    InputDtype,
    QuantRecipe,
    Recipe,
    Stage,
    Values,
)
from moe_parity.references.language.recipes import ALL, DEEPGEMM, OURS

STAGE = Stage.ACT_QUANT


def _params():
    parts: dict[QuantRecipe, str] = {}
    for recipe in ALL.values():
        for part in recipe.stages.values():
            parts.setdefault(part, recipe.name)
    for part, name in parts.items():
        for mutant in mutants(part):
            yield pytest.param(name, part, mutant, id=f"{name}-{mutant.name}".replace("=", "-"))


@pytest.mark.parametrize(("name", "part", "mutant"), list(_params()))
def test_told_by_its_aimed_inputs(
    name: str, part: QuantRecipe, mutant: Mutant, parity_recorder: Recorder
):
    """At least 1,000 outputs differ between a recipe and each of its mutants."""
    found = power(part, mutant)
    message = (
        f"{name} and its mutant {mutant.name} differ in {found.told.total} of "
        f"{found.told.of} outputs of {mutant.decision.aim.__name__}, expected {ENOUGH}."
    )
    told = found.told.total >= ENOUGH
    parity_recorder.add(
        {
            "check": "mutant_told",
            "verdict": "pass" if told else "fail",
            "recipe": name,
            "stage": STAGE.value,
            "scale": found.scale.value,
            "dtype": found.dtype.value,
            "device": "reference",
            "bound": "exact",
            "compared": found.told.of,
            "could_show": found.told.total,
            "nearest_mutant": mutant.name,
            "mutant_distance": found.told.total,
            "message": "" if told else message,
        }
    )
    assert told, message


def mutant_kernel(recipe: Recipe, mutant: Mutant) -> Kernel:
    """Return a kernel that claims ``recipe`` and follows ``mutant``."""

    def run(call):
        output = reference(STAGE, call.case, call.x, mutant.recipe)
        return output.codes, output.scales

    return Kernel(
        name="mutant",
        stage=STAGE,
        run=run,
        recipes=lambda case, device: (recipe,),
        supports=lambda case, device: None,
        unavailable=lambda: None,
        contract=Contract(checks=frozenset({Check.EXACT})),
        source=Path(__file__),
        triton=False,
        note="",
    )


def _through_the_check():
    for recipe in (OURS, DEEPGEMM):
        for mutant in mutants(recipe.of(STAGE)):
            name = f"{recipe.name}-{mutant.name}".replace("=", "-")
            yield pytest.param(recipe, mutant, id=name)


@pytest.mark.parametrize(("recipe", "mutant"), list(_through_the_check()))
def test_red_and_named_by_the_check(recipe: Recipe, mutant: Mutant):
    """The check of a kernel that follows a mutant is red and says which decision differs."""
    case = Case(m=aimed_rows(512, 8), h=512, values=Values.AIMED, dtype=InputDtype.FP32)
    case = dataclasses.replace(case, scale=power(recipe.of(STAGE), mutant).scale)
    verdict = next(check_quant(mutant_kernel(recipe, mutant), case, "cpu"))
    assert verdict.verdict == "fail", f"{mutant.name} passed for {recipe.name}"
    assert mutant.name in verdict.decision.split(" or "), verdict.message
    assert f"The bits match with {verdict.decision}." in verdict.message
