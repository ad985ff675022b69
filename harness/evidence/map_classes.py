"""Whose bits a token has: the recipes that give them, and the decision between two of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_parity.harness.checks.judged import Judged
from moe_parity.harness.diagnosis.cause import Cause
from moe_parity.harness.diagnosis.identify import Probe, Seen, explaining
from moe_parity.harness.diagnosis.search import diagnose
from moe_parity.references.language import Case, Recipe, Stage
from moe_parity.references.recipes import ALL

TRIED = 6
"""Tokens of which those are taken whose outputs tell most mutants; of a layer the first is."""
NOBODY = "none"
"""What stands for the recipe of bits that none explains."""


@dataclass(frozen=True, kw_only=True)
class Token:
    """One unit of a case, alone."""

    unit: int
    probe: Probe
    rows: Mapping[str, Tensor]
    """Output -> its rows among those of the whole case, in order, int64."""
    told: int = 0
    """Mutants of the stated recipe that some output of it tells."""
    shown: int = 0
    """Its outputs that differ under some mutant: what could have shown another decision."""

    @property
    def outputs(self) -> int:
        """How many outputs it has, of rows that somebody owns."""
        case, inputs = self.probe.case, self.probe.inputs
        live = self.probe.stage.live(case, inputs)
        total = 0
        for name, output in self.probe.stage.outputs(case, inputs).items():
            if name in self.rows:
                shape = output.canonical or output.shape
                rows = int(live[name].sum()) if name in live else shape[0]
                total += rows * (shape[1] if len(shape) > 1 else 1)
        return total


def token_of(stage: Stage[Any], case: Case, inputs: Any, unit: int) -> Token:
    """Return a unit of a case as a case of its own."""
    chosen = torch.tensor([unit], device=stage.handed(inputs)[0].device)
    part = stage.some(case, inputs, chosen)
    probe = Probe(stage=stage, case=part.case, inputs=part.inputs)
    return Token(unit=unit, probe=probe, rows={n: r.sort().values for n, r in part.rows.items()})


def telling(
    stage: Stage[Any], case: Case, inputs: Any, recipe: Recipe, count: int, units: Sequence[int]
) -> list[Token]:
    """Return ``count`` tokens, those whose outputs tell most mutants of a recipe first."""
    made = [_measured(token_of(stage, case, inputs, unit), recipe) for unit in units]
    made.sort(key=lambda token: (-token.told, -token.shown))
    return made[:count]


def _measured(token: Token, recipe: Recipe) -> Token:
    """Return a token with what its outputs could show; copies and integers all could."""
    probe = token.probe
    want = {name: bits for name, bits in probe.bits(recipe).items() if name in token.rows}
    shown = {name: torch.zeros_like(bits, dtype=torch.bool) for name, bits in want.items()}
    told = mutants = 0
    for _, changed in probe.stage.neighbours(recipe):
        mutants += 1
        made = probe.bits(changed)
        masks = {name: made[name] != bits for name, bits in want.items()}
        told += any(bool(mask.any()) for mask in masks.values())
        for name, mask in masks.items():
            shown[name] |= mask
    could = sum(int(mask.sum()) for mask in shown.values()) if mutants else token.outputs
    return Token(**{**vars(token), "told": told, "shown": could})


class Recognised(NamedTuple):
    """What gives some bits."""

    recipes: tuple[Recipe, ...]
    """All of the first list that has any; empty where none explains them."""
    names: tuple[str, ...]
    cause: Cause | None = None
    """What the diagnosis says where none does."""

    @property
    def words(self) -> str:
        """The recipes by name, for a table."""
        return " or ".join(self.names) or NOBODY


class Recogniser:
    """Finds the recipes of a token's bits, those that a kernel states before any other."""

    def __init__(self, token: Token, who: str, stated: Sequence[Recipe]) -> None:
        self.token, self.who, self.stated = token, who, list(dict.fromkeys(stated))
        self._known: dict[tuple[str, tuple[str, ...]], Recognised] = {}

    def find(
        self, digest: str, got: Mapping[str, Tensor], first: Sequence[Recipe] = ()
    ) -> Recognised:
        """Return the recipes of bits with a digest; ``first`` are those stated for the call."""
        key = digest, tuple(recipe.name for recipe in first)
        if key not in self._known:
            self._known[key] = self._found(Seen(self.token.probe, got), first)
        return self._known[key]

    def _found(self, seen: Seen, first: Sequence[Recipe]) -> Recognised:
        for candidates in self._lists(seen, first):
            named = list(candidates)
            alive = seen.matching([recipe for _, recipe in named])
            if alive:
                names = [label for label, r in named if any(r is one for one in alive)]
                return Recognised(tuple(alive), tuple(dict.fromkeys(names)))
        return Recognised((), (), self._cause(seen))

    def _lists(self, seen: Seen, first: Sequence[Recipe]) -> Iterator[Iterable[tuple[str, Recipe]]]:
        stage = self.token.probe.stage
        yield [(recipe.name, recipe) for recipe in first]
        yield [(recipe.name, recipe) for recipe in self.stated]
        yield self._named()
        yield [
            (f"{recipe.name} with {label}", changed)
            for recipe in self.stated
            for label, changed in stage.neighbours(recipe)
        ]
        if (
            not stage.partial
            and self.stated
            and any(True for _ in stage.neighbours(self.stated[0]))
        ):
            yield self._nearest(explaining([seen]))

    def _named(self) -> list[tuple[str, Recipe]]:
        """Return the named recipes, of those that say the same of the stage the first."""
        stage = self.token.probe.stage
        known: dict[tuple[object, ...], Recipe] = {}
        for recipe in ALL.values():
            if stage.described_by(recipe):
                known.setdefault(tuple(recipe.parts.get(part) for part in stage.acting), recipe)
        return [(recipe.name, recipe) for recipe in known.values()]

    def _nearest(self, found: Sequence[Recipe]) -> list[tuple[str, Recipe]]:
        """Return the one of some recipes that has the fewest changes, called by them."""
        acting = self.token.probe.stage.acting
        pairs = [
            (f"{a.name} with {_said(a.changes(b, acting))}", len(list(a.changes(b, acting))), b)
            for a in self.stated
            for b in found
        ]
        return [(label, recipe) for label, _, recipe in sorted(pairs, key=lambda p: p[1])[:1]]

    def _cause(self, seen: Seen) -> Cause:
        probe = self.token.probe
        near = max(self.stated, key=lambda recipe: seen.equal(recipe)[0])
        about = Judged(
            who=self.who, stage=probe.stage, case=probe.case, inputs=probe.inputs, got=seen.got
        )
        return diagnose(about, tuple(self.stated), near, about.against(near))


def _said(changes: Iterable[tuple[str, Any, Any]]) -> str:
    return " and ".join(f"{name}={there}" for name, _, there in changes)


def decision_between(stage: Stage[Any], before: Recognised, after: Recognised) -> str:
    """Return what changes between two kinds of bits: ``gemm.unit: mma_f16 -> wgmma_fp8``.

    Of all pairs of recipes that explain them, the one with the fewest decisions changed.
    """
    if after.cause is not None or before.cause is not None:
        cause = after.cause or before.cause
        assert cause is not None
        side = "after" if after.cause is not None else "before"
        return f"no decision: the bits {side} it are no recipe's ({cause.phrase})"
    pairs = itertools.product(before.recipes, after.recipes)
    every = [list(a.changes(b, stage.acting)) for a, b in pairs]
    least = min(every, key=lambda changes: (not changes, len(changes)))
    return " and ".join(f"{name}: {here} -> {there}" for name, here, there in least)
