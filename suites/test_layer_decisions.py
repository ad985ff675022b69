"""Every option of every decision of the GEMMs, SwiGLU and the top-k sum is told by its own inputs.

Reference against reference; the record says how many outputs tell it.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import Tensor

from moe_parity.harness.checks.compare import comparable
from moe_parity.harness.checks.expect import Recorder, claim
from moe_parity.harness.evidence import distance
from moe_parity.references.arithmetic.formats import bits_of, f32_to_bf16
from moe_parity.references.language import Case, Decision, Values, neighbours
from moe_parity.references.recipes.tensorrt_llm import TRTLLM_DECODE, TRTLLM_FUSED
from moe_parity.references.stages import combine
from moe_parity.references.stages.combine import CombineRecipe
from moe_parity.references.stages.gemm import reference as gemm
from moe_parity.references.stages.gemm.decisions import GemmRecipe
from moe_parity.references.stages.swiglu import aims
from moe_parity.references.stages.swiglu.decisions import SwigluRecipe
from moe_parity.references.stages.swiglu.reference import swiglu

CHANGES = [
    pytest.param(part, decision, changed, id=f"{decision.name}-{option.value}")
    for part in (GemmRecipe(), SwigluRecipe(), CombineRecipe())
    for decision, option, changed in neighbours(part)
]


@lru_cache(maxsize=16)
def outcome(recipe: GemmRecipe | SwigluRecipe | CombineRecipe, decision: Decision) -> Tensor:
    """Return the bits that a part of a recipe gives on a decision's aimed inputs."""
    made = decision.aim(0)
    if isinstance(recipe, GemmRecipe):
        rows = gemm.gemm(made.a, made.a_scale, made.w, made.w_scale, recipe)
        return comparable(gemm.finish(rows, made.bias, recipe))
    if isinstance(recipe, CombineRecipe):
        return comparable(combine.sum_of(made.rows, made.weights, recipe))
    limits = {"swiglu.clamp_order": aims.LIMIT, "swiglu.clamp_rounding": aims.ODD_LIMIT}
    limits["swiglu.clamp_nan"] = aims.ODD_LIMIT
    limit = limits.get(decision.name)
    betas = (0.0, 1.0) if decision.name == "swiglu.shift" else (0.0,)
    rows = [swiglu(f32_to_bf16(made), recipe, limit=limit, beta=beta) for beta in betas]
    return bits_of(torch.cat(rows))


@pytest.mark.parametrize(("part", "decision", "changed"), CHANGES)
def test_told_by_its_aimed_inputs(part, decision: Decision, changed, parity_recorder: Recorder):
    original, other = outcome(part, decision), outcome(changed, decision)
    told = int((original != other).sum())
    fault = f"no output of {decision.aim.__name__} tells {changed} from {part}."
    claim(
        parity_recorder, "mutant_told", "" if told else fault,
        stage=decision.name.partition(".")[0], device="reference", compared=original.numel(),
        could_show=told, nearest_mutant=decision.name, mutant_distance=told,
    )  # fmt: skip


def test_the_decode_path_of_the_pull_request_is_not_bitwise():
    """Seed 003 claims it at one token; the unit and the order of scales tell, each alone."""
    case = Case(m=1, e=8, k=4, h=256, i=128, values=Values.AIMED)
    apart = {d.changed: d for d in distance.split(case, TRTLLM_FUSED, TRTLLM_DECODE)}
    assert {"gemm.unit=mma_f16", "gemm.scale_order=a_then_b", "all of them"} <= apart.keys()
    for name in ("gemm.unit=mma_f16", "all of them"):
        assert apart[name].differing > 0, name
        assert apart[name].max_ulp > 1.0, name
