"""Mutants of a recipe, and how many outputs tell each from the original.

A mutant is the recipe with one decision changed; it is generated from the decision, never listed.
``matters`` is the mask of outputs on which two recipes differ: a check on those inputs could have
caught the one passing for the other, and on no other output.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from moe_parity.references import quant
from moe_parity.references.formats import f32_to_bf16, f32_to_f16
from moe_parity.references.spec import (
    Decision,
    InputDtype,
    Option,
    QuantRecipe,
    ScaleFormat,
    neighbours,
)
from torch import Tensor

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


def tell_apart(left: QuantRecipe, right: QuantRecipe, x: Tensor, *, ue8m0: bool, group: int = 128) -> Told:  # fmt: skip  # noqa: E501
    """Count the outputs of ``act_quant`` on ``x`` [M, K] that differ between two recipes."""
    a = quant.act_quant(x, left, group=group, ue8m0=ue8m0)
    b = quant.act_quant(x, right, group=group, ue8m0=ue8m0)
    codes = int((a.codes != b.codes).sum())
    scales = int((a.scales.view(torch.int32) != b.scales.view(torch.int32)).sum())
    return Told(codes=codes, scales=scales, of=a.codes.numel() + a.scales.numel())


def cast_input(x: Tensor, dtype: InputDtype) -> Tensor:
    """Round fp32 inputs to a kernel's input type."""
    if dtype is InputDtype.BF16:
        return f32_to_bf16(x)
    return f32_to_f16(x) if dtype is InputDtype.FP16 else x


@lru_cache(maxsize=4096)
def power(recipe: QuantRecipe, mutant: QuantRecipe, decision: str, dtype: InputDtype, scale: ScaleFormat, seed: int = 0) -> Told:  # fmt: skip  # noqa: E501
    """Count what the decision's own aimed inputs show of a mutant, for one type and format."""
    from moe_parity.references.spec import decisions

    aim = next(d.aim for d in decisions(recipe).values() if d.name == decision)
    x = cast_input(aim(seed), dtype)
    return tell_apart(recipe, mutant, x, ue8m0=scale.is_power_of_two)
