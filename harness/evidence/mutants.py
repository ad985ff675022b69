"""Mutants of a recipe, and how many outputs tell each from the original.

A mutant is the recipe with one decision changed; it is generated from the decision, never listed.
``matters`` is the mask of outputs on which two recipes differ: a check on those inputs could have
caught the one passing for the other, and on no other output.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from moe_parity.references.arithmetic.formats import ScaleFormat, bits_of
from moe_parity.references.language import Decision, InputDtype, Option, neighbours
from moe_parity.references.stages.quant import reference as quant
from moe_parity.references.stages.quant.decisions import QuantRecipe
from moe_parity.references.stages.quant.inputs import cast_input
from moe_parity.references.stages.quant.reference import QuantOutput

ENOUGH = 1000
"""A mutant must be told by this many outputs, or by all that its domain has."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A recipe with one decision changed."""

    decision: Decision
    option: Option
    recipe: QuantRecipe

    @property
    def name(self) -> str:
        """E.g. ``quant.apply=divide``."""
        return f"{self.decision.name}={self.option.value}"


def mutants(recipe: QuantRecipe) -> list[Mutant]:
    """Return every mutant of ``recipe``, in the order of its fields and options."""
    return [Mutant(decision=d, option=o, recipe=r) for d, o, r in neighbours(recipe)]


@dataclass(frozen=True, kw_only=True)
class Told:
    """How many outputs tell two recipes apart."""

    codes: int
    scales: int
    of: int
    """Outputs compared, codes and scales together."""

    @property
    def total(self) -> int:
        """Codes and scales together."""
        return self.codes + self.scales


def count(a: QuantOutput, b: QuantOutput) -> Told:
    """Count the codes and scales that differ between two outputs of the same inputs."""
    codes = int((a.codes != b.codes).sum())
    scales = int((bits_of(a.scales) != bits_of(b.scales)).sum())
    return Told(codes=codes, scales=scales, of=a.codes.numel() + a.scales.numel())


@lru_cache(maxsize=64)
def _aimed(decision: Decision, dtype: InputDtype, seed: int) -> Tensor:
    return cast_input(decision.aim(seed), dtype)


@lru_cache(maxsize=64)
def _original(
    recipe: QuantRecipe, decision: Decision, dtype: InputDtype, scale: ScaleFormat, seed: int
) -> QuantOutput:
    return quant.act_quant(_aimed(decision, dtype, seed), recipe, scale=scale)


@dataclass(frozen=True, kw_only=True)
class Power:
    """What a decision's own aimed inputs show of one mutant, where they show it best."""

    told: Told
    dtype: InputDtype
    scale: ScaleFormat


def power(recipe: QuantRecipe, mutant: Mutant, seed: int = 0) -> Power:
    """Count the outputs that tell a mutant, on the aimed inputs of its decision.

    Input types and scale formats are tried until one shows enough; else the best one is returned.
    """
    best: Power | None = None
    for scale in (ScaleFormat.FP32, ScaleFormat.UE8M0):
        if scale.value not in mutant.decision.formats:
            continue
        for dtype in (InputDtype.FP32, InputDtype.BF16):
            original = _original(recipe, mutant.decision, dtype, scale, seed)
            x = _aimed(mutant.decision, dtype, seed)
            changed = quant.act_quant(x, mutant.recipe, scale=scale)
            found = Power(told=count(original, changed), dtype=dtype, scale=scale)
            if best is None or found.told.total > best.told.total:
                best = found
            if best.told.total >= ENOUGH:
                return best
    assert best is not None, f"{mutant.decision.name} exists in no format"
    return best
