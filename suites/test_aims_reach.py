"""Every decision of every recipe reaches the outputs of every stage that has it.

For each stage, recipe and single change of it: how many outputs of the stage's own aimed inputs
differ, reference against reference.  A thousand at least; ``suites/aimed.py`` lists the changes
that no input can show, each with its reason, and what is listed must show on none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_parity.harness.checks.compare import comparable
from moe_parity.harness.checks.expect import Recorder, claim
from moe_parity.harness.evidence.mutants import ENOUGH
from moe_parity.references.arithmetic.formats import bits_of, from_bits, round_bf16
from moe_parity.references.language import Case, Recipe, Stage
from moe_parity.references.recipes import ALL
from moe_parity.references.stages import COMBINE, FC1, FC2, SWIGLU, SWIGLU_QUANT
from moe_parity.references.stages.quant.decisions import Floor, PowerOfTwo, QuantRecipe
from moe_parity.references.stages.quant.reference import quantize
from moe_parity.references.stages.swiglu import stage as stage_of_swiglu
from moe_parity.references.stages.swiglu.decisions import ProductRounding
from moe_parity.references.stages.swiglu.silu import Silu, silu
from moe_parity.references.stages.swiglu.stage import GateUpRows
from moe_parity.suites.aimed import SLOW, aimed, none_shows, swiglu_of

Known = dict[tuple[Case, int], Tensor]
"""The outputs of a recipe on the inputs it was asked about."""


def bits(stage: Stage[Any], case: Case, inputs: Any, recipe: Recipe) -> Tensor:
    """Return the outputs of owned rows as bits."""
    live = stage.live(case, inputs)
    made = stage.reference(case, inputs, recipe)
    kept = [comparable(t)[live[n]] if n in live else comparable(t) for n, t in made.items()]
    return torch.cat([t.flatten().int() for t in kept])


def told(stage: Stage[Any], recipe: Recipe, label: str, changed: Recipe, known: Known) -> int:
    """Return how many outputs differ on the inputs where most do; stop where it is enough."""
    best = 0
    for case, inputs in aimed(stage, label.partition("=")[0]):
        key = (case, id(inputs))
        if key not in known:
            known[key] = bits(stage, case, inputs, recipe)
        best = max(best, int((known[key] != bits(stage, case, inputs, changed)).sum()))
        if best >= ENOUGH:
            break
    return best


def _recipes() -> Iterator[Any]:
    """Yield every stage with every recipe of it, and the changes that no recipe before it has.

    What a quantizer shows depends on the other part by whether products are BF16 numbers alone.
    """
    for stage in (FC1, SWIGLU, SWIGLU_QUANT, FC2, COMBINE):
        seen: list[tuple[Any, ...]] = []
        for recipe in ALL.values():
            if not stage.described_by(recipe):
                continue
            labels = []
            for label, _ in stage.neighbours(recipe):
                parts: list[Any] = [recipe.parts.get(name) for name in stage.acting]
                if stage is SWIGLU_QUANT and label.startswith("quant."):
                    wide = swiglu_of(recipe).product_rounding is ProductRounding.NONE
                    parts = [recipe.parts["swiglu_quant"], wide]
                if (label, *parts) not in seen:
                    seen.append((label, *parts))
                    labels.append(label)
            if labels:
                yield pytest.param(stage, recipe, labels, id=f"{stage.name}-{recipe.name}")


@pytest.fixture(autouse=True)
def _activated_once(monkeypatch: pytest.MonkeyPatch):
    """Compute the products once for all mutants of the quantizer behind them."""
    plain, kept = stage_of_swiglu.activated, {}

    def activated(inputs: GateUpRows, recipe: Recipe) -> Tensor:
        key = (id(inputs), swiglu_of(recipe))
        if key not in kept:
            kept[key] = plain(inputs, recipe)
        return kept[key]

    monkeypatch.setattr(stage_of_swiglu, "activated", activated)


@pytest.mark.parametrize(("stage", "recipe", "labels"), list(_recipes()))
def test_every_change_reaches_the_outputs(
    stage: Stage[Any], recipe: Recipe, labels: list[str], parity_recorder: Recorder
):
    known: Known = {}
    lacking = {}
    least, nearest = 1 << 62, ""
    for label, changed in stage.neighbours(recipe):
        if label not in labels:
            continue
        found = told(stage, recipe, label, changed, known)
        same = none_shows(stage, recipe, changed)
        if found if same else found < ENOUGH:
            lacking[label] = found
        if not same and found < least:
            least, nearest = found, label
    claim(
        parity_recorder, "mutant_told", f"{stage} of {recipe.name}: {lacking}" if lacking else "",
        recipe=recipe.name, stage=stage.name, device="reference", could_show=least,
        compared=max(t.numel() for t in known.values()), nearest_mutant=nearest,
        mutant_distance=least,
    )  # fmt: skip


def test_forms_of_silu_that_are_one():
    """Of all finite BF16 gates, and for the two that write the same all mantissas of up."""
    word = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    gate = from_bits(word << 16)
    gate = gate[torch.isfinite(gate)]
    value = {form: silu(gate, form) for form in Silu}
    rounded = [bits_of(round_bf16(value[form])) for form in Silu if form.value in SLOW]
    assert all(torch.equal(rounded[0], other) for other in rounded[1:])
    assert not torch.equal(rounded[0], bits_of(round_bf16(value[Silu.FAST])))
    ups = 1.0 + torch.arange(128) / 128.0
    for up in ups:
        one, two = (round_bf16(value[form] * up) for form in (Silu.TL_SIGMOID, Silu.DIV_FULL))
        assert torch.equal(bits_of(one), bits_of(two))


def test_the_logarithm_is_right_for_them():
    """For every finite BF16 amax, in every quantizer behind BF16 products that has a floor."""
    amax = from_bits(torch.arange(1, 0x7F80, dtype=torch.int32) << 16)[:, None]
    recipes = [r for r in ALL.values() if "swiglu_quant" in r.parts]
    parts = {r.of("swiglu_quant", QuantRecipe) for r in recipes}
    ways = (PowerOfTwo.BIT_CEIL, PowerOfTwo.LOG2)
    parts = {part for part in parts if part.floor is not Floor.NONE and part.power_of_two in ways}
    assert len(parts) >= 3
    for part in parts:
        one, two = (
            quantize(amax, dataclasses.replace(part, power_of_two=how), power_of_two=True)[1]
            for how in ways
        )
        assert torch.equal(bits_of(one), bits_of(two)), part
