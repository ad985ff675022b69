"""What the checks could have caught: every generated mutant of every recipe is told apart.

First reference against reference, on the aimed inputs of the changed decision; then through the
very check that judges kernels, which must turn red and name the decision.
"""

from __future__ import annotations

import dataclasses

import pytest

from moe_parity.harness.checks.expect import Recorder, claim
from moe_parity.harness.checks.flow import check
from moe_parity.harness.evidence.mutants import ENOUGH, Mutant, mutants, power
from moe_parity.kernels import registry
from moe_parity.references.language import (
    Case,
    Check,
    Contract,
    InputDtype,
    Recipe,
    Values,
)
from moe_parity.references.recipes import ALL
from moe_parity.references.recipes.deepgemm import DEEPGEMM
from moe_parity.references.recipes.ours import OURS
from moe_parity.references.stages import ACT_QUANT
from moe_parity.references.stages.quant.decisions import QuantRecipe
from moe_parity.references.stages.quant.inputs import aimed_rows


def _params():
    parts: dict[QuantRecipe, str] = {}
    for recipe in ALL.values():
        for part in recipe.parts.values():
            if isinstance(part, QuantRecipe):
                parts.setdefault(part, recipe.name)
    for part, name in parts.items():
        for mutant in mutants(part):
            yield pytest.param(name, part, mutant, id=f"{name}-{mutant.name}".replace("=", "-"))


FEWER = {("flashinfer_cutlass", "quant.floor=scale_min_normal"): 256}
"""Groups of subnormals are NaN there, or zeros with scale 1, whatever the floor: what is left of
the aim are those whose scale is flushed, a scale each."""


@pytest.mark.parametrize(("name", "part", "mutant"), list(_params()))
def test_told_by_its_aimed_inputs(
    name: str, part: QuantRecipe, mutant: Mutant, parity_recorder: Recorder
):
    """At least 1,000 outputs differ between a recipe and each of its mutants."""
    found = power(part, mutant)
    enough = FEWER.get((name, mutant.name), ENOUGH)
    told = found.told.total >= enough
    fault = (
        f"{name} and its mutant {mutant.name} differ in {found.told.total} of "
        f"{found.told.of} outputs of {mutant.decision.aim.__name__}, expected {enough}."
    )
    claim(
        parity_recorder, "mutant_told", "" if told else fault, recipe=name, stage=ACT_QUANT.name,
        scale=found.scale.value, dtype=found.dtype.value, device="reference",
        compared=found.told.of, could_show=found.told.total, nearest_mutant=mutant.name,
        mutant_distance=found.told.total,
    )  # fmt: skip


def mutant_kernel(recipe: Recipe, mutant: Mutant):
    """Return a kernel that claims ``recipe`` and follows ``mutant``."""
    followed = recipe.with_parts(act_quant=mutant.recipe)
    contract = Contract(checks=frozenset({Check.EXACT}))

    @registry.register("mutant", stage=ACT_QUANT, recipes=recipe, contract=contract)
    def run(call):
        return ACT_QUANT.reference(call.case, call.inputs, followed)

    return registry._KERNELS.pop("mutant")


def _through_the_check():
    for recipe in (OURS, DEEPGEMM):
        for mutant in mutants(recipe.of("act_quant", QuantRecipe)):
            name = f"{recipe.name}-{mutant.name}".replace("=", "-")
            yield pytest.param(recipe, mutant, id=name)


@pytest.mark.parametrize(("recipe", "mutant"), list(_through_the_check()))
def test_red_and_named_by_the_check(recipe: Recipe, mutant: Mutant):
    """The check of a kernel that follows a mutant is red and says which decision differs."""
    case = Case(m=aimed_rows(512, 8), h=512, values=Values.AIMED, dtype=InputDtype.FP32)
    case = dataclasses.replace(case, scale=power(recipe.of("act_quant", QuantRecipe), mutant).scale)
    verdict = next(check(mutant_kernel(recipe, mutant), case, "cpu"))
    assert verdict.verdict == "fail", f"{mutant.name} passed for {recipe.name}"
    assert mutant.name in verdict.causes, verdict.message
    assert mutant.name in verdict.message
