"""Which decision differs: look among the neighbouring recipes for the bits that were seen.

And the other way round: how many outputs of these very inputs would have told any of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_parity.harness.compare import compare
from moe_parity.harness.mutants import mutants
from moe_parity.harness.run import reference
from moe_parity.references.arithmetic.formats import bits_of
from moe_parity.references.language import Case, QuantOutput, QuantRecipe, Stage


def identify(
    stage: Stage, case: Case, x: Tensor, got: QuantOutput, recipe: QuantRecipe
) -> list[str]:
    """Return the single changes of ``recipe``, as ``decision=option``, that give ``got``."""
    return [
        mutant.name
        for mutant in mutants(recipe)
        if compare(got, reference(stage, case, x, mutant.recipe), stage).equal
    ]


def identify_apart(
    stage: Stage, case: Case, x: Tensor, got: QuantOutput, recipe: QuantRecipe
) -> str:
    """Say which changes give the codes alone and which the scales alone; empty if none does.

    One wrong division often moves two decisions: the scale and what elements are divided by.
    """
    codes, scales = [], []
    for mutant in mutants(recipe):
        other = reference(stage, case, x, mutant.recipe)
        if torch.equal(other.codes, got.codes):
            codes.append(mutant.name)
        if torch.equal(bits_of(other.scales), bits_of(got.scales)):
            scales.append(mutant.name)
    parts = [("codes", codes), ("scales", scales)]
    return "; ".join(f"the {what} match with {' or '.join(n)}" for what, n in parts if n)


@dataclass(frozen=True, kw_only=True)
class Power:
    """What a set of inputs could have shown."""

    could_show: int
    """Outputs on which at least one mutant differs."""
    nearest: str
    """The mutant that the fewest outputs tell, of those that any does."""
    distance: int | None
    """How many outputs tell it."""


def power_on(
    stage: Stage, case: Case, x: Tensor, recipe: QuantRecipe, expected: QuantOutput
) -> Power:
    """Measure the power of ``x``: run every mutant and collect where it differs."""
    codes = torch.zeros_like(expected.codes, dtype=torch.bool)
    scales = torch.zeros_like(expected.scales, dtype=torch.bool)
    told: dict[str, int] = {}
    for mutant in mutants(recipe):
        other = reference(stage, case, x, mutant.recipe)
        code_mask = other.codes != expected.codes
        scale_mask = bits_of(other.scales) != bits_of(expected.scales)
        codes |= code_mask
        scales |= scale_mask
        count = int(code_mask.sum()) + int(scale_mask.sum())
        if count:
            told[mutant.name] = count
    nearest = min(told, key=lambda name: told[name]) if told else ""
    return Power(
        could_show=int(codes.sum()) + int(scales.sum()),
        nearest=nearest,
        distance=told.get(nearest),
    )
