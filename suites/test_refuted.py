"""A wrong recipe for a real kernel is refuted, and the decision that differs is named."""

from __future__ import annotations

import dataclasses

import pytest

from moe_parity.harness.checks.quant import check_quant
from moe_parity.harness.expect import Recorder, fields, skip_reason
from moe_parity.harness.inputs import aimed_rows
from moe_parity.harness.verdict import Verdict
from moe_parity.kernels import Kernel, all_kernels
from moe_parity.references.language import Case, Check, InputDtype, Recipe, Stage, Values, decisions
from moe_parity.references.language.quant_decisions import Apply, Floor, ScaleForm

WRONG = {
    "apply": {Apply.DIVIDE: Apply.MUL_RECIP, None: Apply.DIVIDE},
    "scale_form": {ScaleForm.DIV_448: ScaleForm.MUL_RECIP_448, None: ScaleForm.DIV_448},
    "floor": {Floor.AMAX_1E_4: Floor.NONE, None: Floor.AMAX_1E_4},
}
"""Field -> what to claim instead of an option; None for any other option."""


@pytest.mark.parametrize("field", WRONG)
@pytest.mark.parametrize("kernel", [k for k in all_kernels() if k.stage is Stage.ACT_QUANT], ids=lambda k: k.name)  # fmt: skip  # noqa: E501
def test_wrong_recipe_is_refuted(
    kernel: Kernel, field: str, parity_device: str, parity_recorder: Recorder
):
    """The check turns red on the true kernel and names its true option."""
    case = Case(m=aimed_rows(512, 8), h=512, values=Values.AIMED, dtype=InputDtype.FP32)
    reason = skip_reason(kernel, case, parity_device)
    if reason:
        pytest.skip(reason)
    true = kernel.recipes(case, parity_device)[0]
    part = true.of(kernel.stage)
    option = getattr(part, field)
    claimed = WRONG[field].get(option, WRONG[field][None])
    wrong = dataclasses.replace(part, **{field: claimed})
    recipe = Recipe(name="wrong", source="on purpose", stages={kernel.stage: wrong})
    impostor = dataclasses.replace(kernel, recipes=lambda case, device: (recipe,))
    verdict = next(check_quant(impostor, case, parity_device))
    name = f"{decisions(part)[field].name}={option.value}"
    refuted = verdict.verdict == "fail" and name in verdict.decision.split(" or ")
    outcome = Verdict(
        check="wrong_recipe_refuted",
        verdict="pass" if refuted else "fail",
        recipe=true.name,
        compared=verdict.compared,
        could_show=verdict.differing,
        decision=name,
        message="" if refuted else f"{kernel.name} passes for {field}={claimed.value}.",
    )
    parity_recorder.add(fields(kernel, case, parity_device, outcome, 0.0))
    assert refuted, verdict.message or outcome.message
    assert verdict.check == Check.EXACT
