"""A layer of which the output alone is seen: named recipes, with up to two decisions changed.

The stages form a chain.  What a stage gives depends on what it is given and on its own decisions,
so it is computed once for each: most changes of one decision leave most stages as they were.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_parity.harness.diagnosis.identify import Seen
from moe_parity.references.language import Case, Recipe, Stage
from moe_parity.references.recipes import ALL
from moe_parity.references.stages import LAYER
from moe_parity.references.stages.layer.stage import LayerInputs, steps_of


class Chain:
    """A layer on one batch for any recipe, each step computed once."""

    def __init__(self, case: Case, inputs: LayerInputs) -> None:
        self.case, self.inputs = case, inputs
        self._steps = list(steps_of(case))
        self._known: dict[tuple[object, ...], tuple[int, dict[str, Tensor]]] = {}
        self._states: dict[bytes, int] = {}

    def trace(self, recipe: Recipe) -> dict[str, Tensor]:
        """Return what a recipe gives, every stage's tensors."""
        return self.ended(recipe)[1]

    def ended(self, recipe: Recipe) -> tuple[int, dict[str, Tensor]]:
        """Return what a recipe gives, with a number that is the same for the same last outputs."""
        trace: dict[str, Tensor] = {}
        state = 0
        for stage, case, upstream, names in self._steps:
            parts = tuple(recipe.parts.get(name) for name in stage.acting)
            key = (stage.name, parts, state)
            if key not in self._known:
                made = self._made(stage, case, upstream(self.inputs, trace), recipe, state)
                own = {theirs: made[ours] for ours, theirs in names.items()}
                self._known[key] = self._state(own), own
            state, own = self._known[key]
            trace |= own
        return state, trace

    def _made(
        self, stage: Stage[Any], case: Case, inputs: Any, recipe: Recipe, state: int
    ) -> Mapping[str, Tensor]:
        """Return the outputs of a stage; of two steps inside each is computed once as well."""
        if not stage.in_two:
            return stage.reference(case, inputs, recipe)
        second, *first = (recipe.parts.get(name) for name in stage.acting)
        key = (stage.name, "first", *first, state)
        if key not in self._known:
            handed = {"": stage.handed_on(case, inputs, recipe)}
            self._known[key] = self._state(handed), handed
        between, handed = self._known[key]
        key = (stage.name, "second", second, between)
        if key not in self._known:
            made = stage.finished(case, handed[""], recipe)
            self._known[key] = self._state(made), made
        return self._known[key][1]

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

    known: dict[tuple[int, int], bool] = {}

    def right(number: int, recipe: Recipe) -> bool:
        chain, one = chains[number]
        state, trace = chain.ended(recipe)
        if (number, state) not in known:
            bits = one.probe.as_bits({"out": trace["out"]})["out"]
            known[number, state] = torch.equal(bits, one.bits["out"])
        return known[number, state]

    def gives(recipe: Recipe) -> bool:
        return all(right(number, recipe) for number in range(len(chains)))

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
