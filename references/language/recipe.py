"""Recipes: which rounding happens where, as ordinary frozen values.

A recipe is a set of named parts, each a frozen dataclass of decisions that lives in the room of its
stage (``references/stages``); nothing here knows which parts there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from moe_parity.references.errors import ParityError
from moe_parity.references.language.decision import decisions, neighbours

PartT = TypeVar("PartT")

Acting = Mapping[str, frozenset[str] | None]
"""Part -> names of its decisions that act in a stage; None for all."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a recipe; every field is a decision.

    Raises ParityError for an option of another decision.
    """

    def __post_init__(self) -> None:
        """Reject an option that does not belong to its field."""
        for name, decision in decisions(self).items():
            value = getattr(self, name)
            if not isinstance(value, decision.options):
                known = ", ".join(decision.options)
                raise ParityError(f"{decision.name} cannot be {value!r}; its options are: {known}.")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named recipe: one small value for each part that it decides."""

    name: str
    source: str
    """The code it describes."""
    parts: Mapping[str, Part] = field(default_factory=dict)

    def __hash__(self) -> int:
        """Hash by name; ``parts`` is a mapping and has no hash."""
        return hash(self.name)

    def of(self, name: str, kind: type[PartT]) -> PartT:
        """Return a part; raises ParityError, in a sentence, where the recipe has none."""
        found = self.parts.get(name)
        if not isinstance(found, kind):
            raise ParityError(f"recipe {self.name} says nothing about {name}.")
        return found

    def with_parts(self, **changed: Part) -> Recipe:
        """Return the recipe with some parts replaced or added."""
        return dataclasses.replace(self, parts={**self.parts, **changed})

    def changed(self, name: str, options: Mapping[str, str]) -> Recipe:
        """Return a recipe of one's own: this one with some decisions changed.

        ``options`` maps decisions to options, both by their words: ``{"quant.apply": "divide"}``.
        Where several parts have a decision it changes in all of them; ``"swiglu_quant:
        quant.apply"`` changes it in one.  Raises ParityError, in a sentence, for a decision that
        the recipe does not make and for an option that its decision does not have.
        """
        parts = dict(self.parts)
        for words, option in options.items():
            only, _, decision = words.rpartition(":")
            found = False
            for part, value in parts.items():
                for attribute, made in decisions(value).items():
                    if made.name != decision.strip() or only.strip() not in ("", part):
                        continue
                    found = True
                    known = {str(word): word for word in made.options}
                    chosen = known.get(option, option)  # a word that is none is refused by the part
                    parts[part] = dataclasses.replace(value, **{attribute: chosen})
            if not found:
                made_here = {d.name for value in parts.values() for d in decisions(value).values()}
                raise ParityError(
                    f"recipe {self.name} makes no decision {words!r}; "
                    f"it makes {', '.join(sorted(made_here)) or 'none'}."
                )
        told = ", ".join(f"{words}={option}" for words, option in options.items())
        source = f"{self.name} with {told or 'nothing changed'}"
        return Recipe(name=name, source=source, parts=parts)

    def neighbours(self, acting: Acting, *, several: bool = False) -> Iterator[tuple[str, Recipe]]:
        """Yield (label, recipe) for every single decision changed, of those that act.

        The label is ``decision=option``; with ``several`` quantizers their part stands before it.
        """
        for name, chosen in acting.items():
            if name not in self.parts:
                continue
            for decision, option, part in neighbours(self.parts[name]):
                if chosen is None or decision.name in chosen:
                    label = f"{decision.name}={option}"
                    own = several and not label.startswith(f"{name}.")
                    yield f"{name}: {label}" if own else label, self.with_parts(**{name: part})

    def changes(self, other: Recipe, acting: Acting) -> Iterator[tuple[str, Any, Any]]:
        """Yield (decision name, option here, option there) where two recipes differ."""
        for name in acting:
            here, there = self.parts.get(name), other.parts.get(name)
            if here is None or there is None:
                continue
            for attribute, decision in decisions(here).items():
                left, right = getattr(here, attribute), getattr(there, attribute)
                if left is not right:
                    yield decision.name, left, right

    def on_chip(self, acting: Acting) -> bool:
        """Whether an option that acts takes its bits from a chip's units or tables."""
        options = (
            getattr(self.parts[name], attribute)
            for name in acting
            if name in self.parts
            for attribute in decisions(self.parts[name])
        )
        return any(option.on_chip for option in options)
