"""The aimed inputs of each stage for each decision, and the changes that no input can show.

What ``test_aims_reach`` holds against every recipe, and ``test_checks`` against the check itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch

from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import f32_to_bf16, to_f32
from moe_parity.references.language import Case, Decision, Gate, Recipe, ScaleFormat, Stage, Values
from moe_parity.references.language.decision import decisions
from moe_parity.references.recipes import ALL
from moe_parity.references.recipes.ours import OURS
from moe_parity.references.stages import COMBINE, FC1, FC2, SWIGLU, SWIGLU_QUANT
from moe_parity.references.stages.combine import CombineRecipe, WeightsAt
from moe_parity.references.stages.gemm.stage import GroupedRows
from moe_parity.references.stages.quant.decisions import Floor, PowerOfTwo, QuantRecipe
from moe_parity.references.stages.swiglu import aims, pools
from moe_parity.references.stages.swiglu.decisions import (
    ClampOrder,
    ClampRounding,
    ProductRounding,
    SwigluRecipe,
)
from moe_parity.references.stages.swiglu.stage import GateUpRows

POOL = 2
"""The newest version of the aimed inputs."""
PLAIN = Case(values=Values.AIMED, pool=POOL)
LOW = dataclasses.replace(PLAIN, clamp=aims.LOW_LIMIT)
SPECIAL = dataclasses.replace(PLAIN, clamp=aims.ODD_LIMIT, values=Values.SPECIAL)
GATED: Mapping[str, tuple[tuple[Case, str], ...]] = {
    "swiglu.silu": ((PLAIN, "codes"), (PLAIN, "scales"), (PLAIN, "flushed")),
    "swiglu.product_rounding": ((PLAIN, "codes"),),
    "swiglu.clamp_order": ((LOW, "own_limit"),),
    "swiglu.clamp_rounding": (
        (LOW, "own_limit"), (dataclasses.replace(LOW, gate=Gate.SWIGLUOAI), "own_limit"),
    ),
    "swiglu.shift": (
        (PLAIN, "shift"), (dataclasses.replace(PLAIN, gate=Gate.SWIGLUOAI), "shift"),
    ),
    "swiglu.clamp_nan": ((SPECIAL, "nan_ups"),),
    "quant.subnormal_amax": ((PLAIN, "tiny_groups"), (PLAIN, "least")),
    "quant.floor": ((PLAIN, "tiny_groups"), (PLAIN, "least")),
    "quant.apply": ((PLAIN, "quotients"),),
    "quant.power_of_two": (
        (PLAIN, "power_of_two_edges"), (PLAIN, "powers"), (PLAIN, "least"),
    ),
}  # fmt: skip
"""Decision -> the parts of the pool of SwiGLU that are made for it, and the case that has them.

Another decision of the quantizer has the part that is named like its aim."""
GEMM = Case(m=24, e=4, k=2, h=256, i=256, values=Values.AIMED, pool=POOL)
DEEP = dataclasses.replace(GEMM, h=512, i=512)
"""Four blocks of K: of two, halves that are added last hide how a chain accumulates."""
ORDINARY = dataclasses.replace(GEMM, values=Values.NORMAL)
"""Halves that cancel leave a few bits, which BF16 holds: nothing is rounded before a bias."""
SUM = Case(m=24, e=8, k=8, h=256, values=Values.AIMED)


@lru_cache(maxsize=1)
def decided() -> dict[str, Decision]:
    """Return every decision by its name."""
    parts = [part for recipe in ALL.values() for part in recipe.parts.values()]
    return {d.name: d for part in parts for d in decisions(part).values()}


parts = lru_cache(maxsize=8)(pools.parts)


@lru_cache(maxsize=32)
def gated(case: Case, part: str, most: int | None) -> GateUpRows:
    """Return the groups of one part of the pool as rows, at most so many, evenly spread."""
    groups = parts(case)[part]
    rows = f32_to_bf16(groups if most is None else groups[:: -(-len(groups) // most)])
    alpha, beta = case.gate.alpha_beta
    return GateUpRows(
        rows=rows, counts=torch.tensor([len(rows)]).int(), expert=torch.zeros(len(rows)).long(),
        limit=case.clamp, alpha=alpha, beta=beta,
    )  # fmt: skip


@lru_cache(maxsize=8)
def grouped(stage: Stage[Any], case: Case, *, biased: bool) -> GroupedRows:
    """Return operands, with a bias of the size of the outputs if asked for."""
    made: GroupedRows = stage.inputs(case)
    if not biased:
        return made
    rows = to_f32(stage.reference(case, made, OURS)["rows"]).abs()
    bias = random_bits.normal(1, "bias", *made.w.shape[:2])
    return dataclasses.replace(made, bias=bias * rows.median())


def aimed(stage: Stage[Any], decision: str, most: int | None = None) -> Iterator[tuple[Case, Any]]:
    """Yield what the stage has for a decision: cases and inputs, ``most`` groups of a pool."""
    if stage in (FC1, FC2):
        biased = decision == "gemm.bias_at"
        for case in (GEMM, DEEP, *[ORDINARY] * biased):
            yield case, grouped(stage, case, biased=biased)
    elif stage is COMBINE:
        yield SUM, COMBINE.inputs(SUM)
    else:
        aim = decided()[decision].aim.__name__
        for case, part in GATED.get(decision, ((PLAIN, aim),)):
            for scale in (ScaleFormat.FP32, ScaleFormat.UE8M0)[: 1 + (stage is SWIGLU_QUANT)]:
                if scale.value in decided()[decision].formats:
                    yield dataclasses.replace(case, scale=scale), gated(case, part, most)


# --- what no input can show ---------------------------------------------------------------------

SLOW = frozenset({"mul_recip", "div", "tl_sigmoid", "div_full"})
"""The forms of SiLU with a division or a reciprocal that keeps what is tiny: the others are 0 from
-87.5 on, and that of fast-math at subnormal gates too."""


def swiglu_of(recipe: Recipe) -> SwigluRecipe:
    return recipe.of("swiglu", SwigluRecipe)


def rows_are_bf16(stage: Stage[Any], recipe: Recipe, changed: Recipe) -> bool:
    """Say whether rows that are rounded to BF16 were products, rounded or not."""
    roundings = {swiglu_of(r).product_rounding for r in (recipe, changed)}
    return stage is SWIGLU and roundings == {ProductRounding.ONCE, ProductRounding.NONE}


def gate_comes_late(stage: Stage[Any], recipe: Recipe, changed: Recipe) -> bool:
    """Say whether the limit comes after SiLU, which leaves no clamped gate to round."""
    one, two = swiglu_of(recipe), swiglu_of(changed)
    late = one.clamp_order is two.clamp_order is ClampOrder.AFTER
    return late and {one.clamp_rounding, two.clamp_rounding} == {
        ClampRounding.NONE, ClampRounding.GATE,
    }  # fmt: skip


def forms_are_one(stage: Stage[Any], recipe: Recipe, changed: Recipe) -> bool:
    """Say whether no BF16 gate and up tell the forms: ``test_forms_of_silu_that_are_one``."""
    one, two = swiglu_of(recipe), swiglu_of(changed)
    forms = {one.silu.value, two.silu.value}
    if len(forms) == 1:
        return False
    if one.product_rounding is ProductRounding.TWICE:
        return forms <= SLOW
    return one.product_rounding is ProductRounding.ONCE and forms == {"tl_sigmoid", "div_full"}


def power_is_right(stage: Stage[Any], recipe: Recipe, changed: Recipe) -> bool:
    """Say whether amax is a BF16 number: ``test_the_logarithm_is_right_for_them``.

    Without a floor the scale of a tiny group is a subnormal, which the logarithm's flush shows.
    """
    if stage is not SWIGLU_QUANT or swiglu_of(recipe).product_rounding is ProductRounding.NONE:
        return False
    one, two = (r.of("swiglu_quant", QuantRecipe) for r in (recipe, changed))
    how = {one.power_of_two, two.power_of_two}
    return one.floor is not Floor.NONE and how == {PowerOfTwo.BIT_CEIL, PowerOfTwo.LOG2}


def weights_are_in(stage: Stage[Any], recipe: Recipe, changed: Recipe) -> bool:
    """Say whether rows carry their weights: they are added as they are, nothing is to fuse."""
    summing = recipe.parts.get("combine")
    step = isinstance(summing, CombineRecipe) and summing.weights_at is WeightsAt.EPILOGUE
    return (
        stage is COMBINE and step and summing.step is not changed.of("combine", CombineRecipe).step
    )


SAME = {
    SWIGLU: (rows_are_bf16, gate_comes_late, forms_are_one),
    SWIGLU_QUANT: (gate_comes_late, forms_are_one, power_is_right),
    COMBINE: (weights_are_in,),
}
"""Stage -> the changes that are none, each with its reason."""


def none_shows(stage: Stage[Any], recipe: Recipe, changed: Recipe) -> bool:
    """Say whether a change of a recipe is one that no input of the stage can show."""
    return any(rule(stage, recipe, changed) for rule in SAME.get(stage, ()))
