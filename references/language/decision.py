"""A decision: one numeric choice that a kernel makes, whether its author knew it or not.

A decision is written down once, as an enumeration of its options beside the recipe's field.  All
else comes from there: the mutants (every other option), the aimed inputs, the candidates of
``identify``, the words of an error, the row of the docs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self, TypeVar

AimedInputs = Callable[[int], Any]
"""Makes inputs on which the decision shows, from a seed.

fp32 groups [G, 128] for quantization, what their rooms' ``aims`` say for the other stages.
"""


class Option(StrEnum):
    """One option of a decision.  Members are written ``NAME = "value", "meaning", "source"``."""

    meaning: str
    source: str
    on_chip: bool

    def __new__(cls, value: str, meaning: str, source: str, on_chip: bool = False) -> Self:
        """Attach what the option means and who makes this choice.

        ``on_chip``: the bits come from a chip's own units or tables, not from IEEE arithmetic.
        """
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        member.source = source
        member.on_chip = on_chip
        return member

    def __repr__(self) -> str:
        """Return source text, so that a printed recipe can be pasted."""
        return f"{type(self).__name__}.{self.name}"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is decided, between which options, and on which inputs it shows.

    Where a pair of options matters is not written by hand: it is where the two references differ
    (``moe_parity.harness.evidence.mutants``), so it cannot be wrong.
    """

    name: str
    """Stage family and field, e.g. ``quant.apply``."""
    question: str
    options: type[Option]
    aim: AimedInputs
    formats: tuple[str, ...] = ("fp32", "ue8m0")
    """The scale formats in which the choice exists at all."""
    exists: Callable[[Any], bool] = lambda recipe: True
    """Whether the choice exists beside the recipe's other options."""
    reaches: tuple[str, ...] = ()
    """The outputs of a stage that it can change, where it cannot change all of them."""
    asked: Callable[[Any, Any], bool] = lambda case, inputs: True
    """(case, inputs) -> whether a kernel has to make the choice at all."""

    def others(self, chosen: Option) -> Iterator[Option]:
        """Yield the options that are not ``chosen``."""
        return (option for option in self.options if option is not chosen)


RecipeT = TypeVar("RecipeT")


def decided(decision: Decision, default: Option) -> Any:
    """Declare a recipe field that holds an option of ``decision``."""
    return dataclasses.field(default=default, metadata={"decision": decision})


def decisions(recipe: Any) -> dict[str, Decision]:
    """Return field name -> decision of a recipe class or value, in order."""
    found = {}
    for field in dataclasses.fields(recipe):
        decision = field.metadata.get("decision")
        if decision is not None:
            found[field.name] = decision
    return found


def neighbours(recipe: RecipeT) -> Iterator[tuple[Decision, Option, RecipeT]]:
    """Yield every recipe with exactly one decision changed: (decision, new option, recipe)."""
    for field, decision in decisions(recipe).items():
        if not decision.exists(recipe):
            continue
        for option in decision.others(getattr(recipe, field)):
            changed: Any = dataclasses.replace(recipe, **{field: option})  # type: ignore[type-var]
            yield decision, option, changed
