"""Every option of every decision of the GEMMs, SwiGLU and the top-k sum is told by its own inputs.

Reference against reference; the record says how many outputs tell it.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_parity.harness.checks.layer import words
from moe_parity.harness.expect import Recorder
from moe_parity.references import aims_layer, combine, gemm
from moe_parity.references.arithmetic.formats import bits_of, f32_to_bf16
from moe_parity.references.language import Decision, neighbours
from moe_parity.references.language.recipe import CombineRecipe, GemmRecipe, SwigluRecipe
from moe_parity.references.swiglu import swiglu

CHANGES = [
    pytest.param(part, decision, changed, id=f"{decision.name}-{option.value}")
    for part in (GemmRecipe(), SwigluRecipe(), CombineRecipe())
    for decision, option, changed in neighbours(part)
]


def outcome(recipe: GemmRecipe | SwigluRecipe | CombineRecipe, decision: Decision) -> Tensor:
    """Return the bits that a part of a recipe gives on a decision's aimed inputs."""
    made = decision.aim(0)
    if isinstance(recipe, GemmRecipe):
        rows = gemm.gemm(made.a, made.a_scale, made.w, made.w_scale, recipe)
        return words(gemm.finish(rows, made.bias, recipe))
    if isinstance(recipe, CombineRecipe):
        return words(combine.sum_of(made.rows, made.weights, recipe))
    limits = {"swiglu.clamp_order": aims_layer.LIMIT, "swiglu.clamp_rounding": aims_layer.ODD_LIMIT}
    limits["swiglu.clamp_nan"] = aims_layer.ODD_LIMIT
    limit = limits.get(decision.name)
    betas = (0.0, 1.0) if decision.name == "swiglu.shift" else (0.0,)
    rows = [swiglu(f32_to_bf16(made), recipe, limit=limit, beta=beta) for beta in betas]
    return bits_of(torch.cat(rows))


@pytest.mark.parametrize(("part", "decision", "changed"), CHANGES)
def test_told_by_its_aimed_inputs(part, decision: Decision, changed, parity_recorder: Recorder):
    original, other = outcome(part, decision), outcome(changed, decision)
    told = int((original != other).sum())
    message = f"no output of {decision.aim.__name__} tells {changed} from {part}."
    parity_recorder.add(
        {
            "check": "mutant_told",
            "verdict": "pass" if told else "fail",
            "stage": decision.name.partition(".")[0],
            "device": "reference",
            "bound": "exact",
            "compared": original.numel(),
            "could_show": told,
            "nearest_mutant": decision.name,
            "mutant_distance": told,
            "message": "" if told else message,
        }
    )
    assert told, message
