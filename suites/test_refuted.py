"""A wrong recipe for a real kernel is refuted, and the decision that differs is named."""

from __future__ import annotations

import dataclasses

import pytest

from moe_parity.harness.cases.grid import each
from moe_parity.harness.checks.expect import Recorder, needs, record
from moe_parity.harness.checks.flow import check
from moe_parity.harness.checks.verdict import found
from moe_parity.kernels import Kernel
from moe_parity.references.language import Case, Check, InputDtype, Recipe, Values, decisions
from moe_parity.references.stages import ACT_QUANT
from moe_parity.references.stages.quant.decisions import Apply, Floor, QuantRecipe, ScaleForm
from moe_parity.references.stages.quant.inputs import aimed_rows

WRONG = {
    "apply": {Apply.DIVIDE: Apply.MUL_RECIP, None: Apply.DIVIDE},
    "scale_form": {ScaleForm.DIV_448: ScaleForm.MUL_RECIP_448, None: ScaleForm.DIV_448},
    "floor": {Floor.AMAX_1E_4: Floor.NONE, None: Floor.AMAX_1E_4},
}
"""Field -> what to claim instead of an option; None for any other option."""


@pytest.mark.parametrize("field", WRONG)
@pytest.mark.parametrize("kernel", each(ACT_QUANT))
def test_wrong_recipe_is_refuted(
    kernel: Kernel, field: str, parity_device: str, parity_recorder: Recorder
):
    """The check turns red on the true kernel and names its true option."""
    case = Case(m=aimed_rows(512, 8), h=512, values=Values.AIMED, dtype=InputDtype.FP32)
    needs(kernel, case, parity_device)
    true = kernel.recipes(case, parity_device)[0]
    part = true.of("act_quant", QuantRecipe)
    option = getattr(part, field)
    claimed = WRONG[field].get(option, WRONG[field][None])
    wrong = dataclasses.replace(part, **{field: claimed})
    recipe = Recipe(name="wrong", source="on purpose", parts={"act_quant": wrong})
    impostor = dataclasses.replace(kernel, recipes=lambda case, device: (recipe,))
    verdict = next(check(impostor, case, parity_device))
    name = f"{decisions(part)[field].name}={option.value}"
    refuted = verdict.verdict == "fail" and name in verdict.causes
    fault = "" if refuted else f"{kernel.name} as {field}={claimed.value}: {verdict.message}"
    if verdict.verdict == "pass":
        fault = f"{kernel.name} passes for {field}={claimed.value}."
    outcome = found(
        "wrong_recipe_refuted", fault, recipe=true.name, compared=verdict.compared,
        could_show=verdict.differing, cause=name,
    )  # fmt: skip
    record(kernel, case, parity_device, [outcome], parity_recorder)
    assert verdict.check == Check.EXACT
