"""A layer of which the output alone is seen: named recipes, with up to two decisions changed.

The stages form a chain.  What a stage gives depends on what it is given and on its own decisions,
so it is computed once for each: most changes of one decision leave most stages as they were.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from moe_parity.harness.diagnosis.identify import Seen
from moe_parity.references.language import Case, Recipe
from moe_parity.references.recipes import ALL
from moe_parity.references.stages import LAYER
from moe_parity.references.stages.layer.stage import LayerInputs, steps_of


class Chain:
    """A layer on one batch for any recipe, each step computed once."""

    def __init__(self, case: Case, inputs: LayerInputs) -> None:
        self.case, self.inputs = case, inputs
        self._known: dict[tuple[object, ...], tuple[int, dict[str, Tensor]]] = {}
        self._states: dict[bytes, int] = {}

    def trace(self, recipe: Recipe) -> dict[str, Tensor]:
        """Return what a recipe gives, every stage's tensors."""
        trace: dict[str, Tensor] = {}
        state = 0
        for stage, case, upstream, names in steps_of(self.case):
            parts = tuple(recipe.parts.get(name) for name in stage.acting)
            key = (stage.name, parts, state)
            if key not in self._known:
                made = stage.reference(case, upstream(self.inputs, trace), recipe)
                own = {theirs: made[ours] for ours, theirs in names.items()}
                self._known[key] = self._state(own), own
            state, own = self._known[key]
            trace |= own
        return trace

    def _state(self, made: dict[str, Tensor]) -> int:
        """Return a number for a stage's outputs, the same for the same bits."""
        raw = b"".join(
            bytes(t.contiguous().view(-1).view(torch.uint8).cpu().numpy()) for t in made.values()
        )
        return self._states.setdefault(raw, len(self._states) + 1)


def explaining(seen: Sequence[Seen]) -> list[tuple[str, Recipe]]:
    """Return (name or changes, recipe) of all that explain every bit, of the fewest changes.

    Named recipes first; else those with one decision changed, else with two.
    """
    chains = [(Chain(one.probe.case, one.probe.inputs), one) for one in seen]

    def gives(recipe: Recipe) -> bool:
        return all(
            torch.equal(
                one.probe.as_bits({"out": chain.trace(recipe)["out"]})["out"], one.bits["out"]
            )
            for chain, one in chains
        )

    named = list(_distinct(ALL.values()))
    for candidates in (_plain(named), _changed(named), _twice(named)):
        found = [(label, r) for label, r in candidates if gives(r)]
        if found:
            return found
    return []


def _distinct(recipes: Iterable[Recipe]) -> Iterator[Recipe]:
    for recipe in recipes:
        if LAYER.described_by(recipe):
            yield recipe


def _plain(named: Iterable[Recipe]) -> Iterator[tuple[str, Recipe]]:
    return ((recipe.name, recipe) for recipe in named)


def _changed(named: Iterable[Recipe]) -> Iterator[tuple[str, Recipe]]:
    for recipe in named:
        for label, one in LAYER.neighbours(recipe):
            yield f"{recipe.name} with {label}", one


def _twice(named: Iterable[Recipe]) -> Iterator[tuple[str, Recipe]]:
    for recipe in named:
        singles = list(LAYER.neighbours(recipe))
        for (one, first), (two, second) in itertools.combinations(singles, 2):
            if one.rpartition("=")[0] != two.rpartition("=")[0]:
                yield f"{recipe.name} with {one} and {two}", _both(recipe, first, second)


def _both(recipe: Recipe, one: Recipe, two: Recipe) -> Recipe:
    """Return a recipe with two single changes made at once."""
    parts = dict(one.parts)
    for name, part in two.parts.items():
        if part == recipe.parts[name]:
            continue
        changes = {
            f.name: getattr(part, f.name)
            for f in dataclasses.fields(part)
            if getattr(part, f.name) is not getattr(recipe.parts[name], f.name)
        }
        parts[name] = dataclasses.replace(parts[name], **changes)
    return dataclasses.replace(recipe, parts=parts)
