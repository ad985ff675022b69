"""Recipes: which rounding happens where, as ordinary frozen values."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_parity.references.spec import quant_decisions as q
from moe_parity.references.spec.decision import decided
from moe_parity.references.spec.stage import Stage


@dataclass(frozen=True, kw_only=True)
class QuantRecipe:
    """How one quantizer rounds; every field is a decision.

    Raises ValueError for options of another decision.
    """

    floor: q.Floor = decided(q.FLOOR, q.Floor.NONE)
    zero_group: q.ZeroGroup = decided(q.ZERO_GROUP, q.ZeroGroup.AS_FLOORED)
    scale_form: q.ScaleForm = decided(q.SCALE_FORM, q.ScaleForm.DIV_448)
    apply: q.Apply = decided(q.APPLY, q.Apply.DIVIDE)
    power_of_two: q.PowerOfTwo = decided(q.POWER_OF_TWO, q.PowerOfTwo.BIT_CEIL)
    nan_element: q.NanElement = decided(q.NAN_ELEMENT, q.NanElement.KEEP)
    overflow: q.Overflow = decided(q.OVERFLOW, q.Overflow.SATURATE)
    nan_amax: q.NanAmax = decided(q.NAN_AMAX, q.NanAmax.IGNORE)

    def __post_init__(self) -> None:
        """Reject an option that does not belong to its field."""
        for name, spec in self.__dataclass_fields__.items():
            decision = spec.metadata["decision"]
            value = getattr(self, name)
            if not isinstance(value, decision.options):
                known = ", ".join(decision.options)
                raise ValueError(f"{decision.name} cannot be {value!r}; its options are: {known}.")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named recipe: one small value per stage that it decides."""

    name: str
    source: str
    """The code it describes."""
    stages: dict[Stage, QuantRecipe] = field(default_factory=dict)

    def __hash__(self) -> int:
        """Hash by name: names are unique (``recipes.ALL``)."""
        return hash(self.name)

    def of(self, stage: Stage) -> QuantRecipe:
        """Return the part of ``stage``; raises KeyError with a sentence where there is none."""
        if stage not in self.stages:
            raise KeyError(f"recipe {self.name} says nothing about stage {stage}.")
        return self.stages[stage]
