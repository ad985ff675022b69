"""The check ``exact``: every bit as the recipe says, else which decision differs.

And the other way round: how many outputs of these very inputs would have told a mutant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from moe_parity.harness.checks.compare import Difference, differences, mask, where
from moe_parity.harness.checks.verdict import Verdict
from moe_parity.references.language import Case, Recipe, Stage
from moe_parity.references.language.stage import Kind, Output, Outputs

MEASURE_BELOW = 1 << 23
"""Outputs up to which the power of the inputs is measured against every mutant."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """Outputs of one stage that are to be judged."""

    who: str
    stage: Stage[Any]
    case: Case
    inputs: Any
    got: Outputs

    def against(self, recipe: Recipe) -> dict[str, Tensor]:
        """Return what a recipe gives."""
        made = self.stage.reference(self.case, self.inputs, recipe)
        return {name: made[name] for name in self.got}

    @cached_property
    def outputs(self) -> Mapping[str, Output]:
        """The stage's outputs."""
        return self.stage.outputs(self.case, self.inputs)

    @cached_property
    def live(self) -> Mapping[str, Tensor]:
        """The rows that are owned, of outputs where not all are."""
        return self.stage.live(self.case, self.inputs)

    def differences(self, want: Outputs) -> list[Difference]:
        """Return how the outputs differ from others, in live rows."""
        return differences(self.outputs, self.got, want, self.live)

    def differs(self, name: str, want: Outputs, got: Outputs | None = None) -> Tensor:
        """Return where one output differs, in live rows."""
        found = (self.got if got is None else got)[name]
        return mask(self.outputs[name], found, want[name], self.live.get(name))

    def equals(self, want: Outputs) -> bool:
        """Whether every live bit is the same."""
        return not any(bool(self.differs(name, want).any()) for name in self.got)


def exact(
    judged: Judged,
    recipes: tuple[Recipe, ...],
    *,
    check: str,
    power: bool,
    search: bool = True,
    cause: str = "",
) -> Verdict:
    """Compare with the nearest of the recipes that a kernel may follow.

    ``power`` counts the outputs that a mutant would change, ``search`` looks for the decision that
    differs: both cost one reference a mutant.  A known ``cause``, in words that follow the kernel's
    name, is said first, and no decision is looked for.
    """  # fmt: skip
    tried = [(recipe, judged.against(recipe)) for recipe in recipes]
    compared = [(r, want, judged.differences(want)) for r, want in tried]
    recipe, want, found = min(compared, key=lambda entry: sum(d.wrong for d in entry[2]))
    verdict = _verdict(judged, recipe, found, check)
    if verdict.failed and cause:
        counts = ", ".join(d.words for d in found if d.wrong)
        text = f"{judged.stage} of {judged.who} {cause}. Against recipe {recipe.name}: {counts}."
        return dataclasses.replace(verdict, message=text)
    if verdict.failed:
        return _explained(verdict, judged, recipe, found, search)
    if power and verdict.compared <= MEASURE_BELOW:
        return _with_power(verdict, judged, recipe, want)
    return verdict


def _verdict(judged: Judged, recipe: Recipe, found: list[Difference], check: str) -> Verdict:
    wrong = sum(d.wrong for d in found)
    ulps = [d.farthest for d in found if d.farthest is not None and d.output.kind is not Kind.CODES]
    codes = [d.wrong for d in found if d.output.kind is Kind.CODES]
    ulp = max(ulps, default=None)
    bf16, f64 = judged.stage.errors(judged.case, judged.inputs, judged.got)
    return Verdict(
        check=check, verdict="fail" if wrong else "pass", recipe=recipe.name,
        compared=sum(d.of for d in found), differing=wrong, code_flips=sum(codes),
        # 0 beside codes that differ would seem to speak of them
        max_ulp=None if wrong and not ulp else ulp, rel_err_bf16=bf16, rel_err_f64=f64,
    )  # fmt: skip


def _explained(
    verdict: Verdict, judged: Judged, recipe: Recipe, found: list[Difference], search: bool
) -> Verdict:
    first = next(d for d in found if d.wrong)
    place = where(judged.inputs, first.output, first.index)
    # codes and scales are called what they are, beside their value
    named = len(found) > 1 and first.output.kind in (Kind.VALUES, Kind.INTEGERS)
    of = f" of {first.name}" if named else ""
    matches = list(identify(judged, recipe)) if search else []
    if matches:
        why = f" The bits match with {' or '.join(matches)}."
    else:
        apart = _apart(judged, recipe, found) if search and len(found) > 1 else ""
        why = f" No recipe with one decision changed has these bits{apart}." if search else ""
    text = (
        f"{judged.stage} of {judged.who} differs from recipe {recipe.name} at {place}{of}: got "
        f"{first.got}, expected {first.want}; {', '.join(d.words for d in found)}.{why}"
    )
    return dataclasses.replace(verdict, message=text, decision=" or ".join(matches))


def identify(judged: Judged, recipe: Recipe) -> Iterator[str]:
    """Yield the single changes of a recipe that give the bits that were seen."""
    for label, changed in judged.stage.neighbours(recipe):
        if judged.equals(judged.against(changed)):
            yield label


def _apart(judged: Judged, recipe: Recipe, found: list[Difference]) -> str:
    """Say which changes give one output alone, for each that differs; empty if none does.

    One wrong division often moves two decisions: the scale and what elements are divided by.
    """
    names: dict[str, list[str]] = {d.name: [] for d in found if d.wrong}
    for label, changed in judged.stage.neighbours(recipe):
        want = judged.against(changed)
        for name, labels in names.items():
            if not bool(judged.differs(name, want).any()):
                labels.append(label)
    parts = [f"{name} match with {' or '.join(labels)}" for name, labels in names.items() if labels]
    return f": {'; '.join(parts)}" if parts else ""


def _with_power(verdict: Verdict, judged: Judged, recipe: Recipe, want: Outputs) -> Verdict:
    """Measure the power of the inputs: run every mutant and collect where it differs."""
    shown = {name: torch.zeros_like(t, dtype=torch.bool) for name, t in want.items()}
    told: dict[str, int] = {}
    mutants = 0
    for label, changed in judged.stage.neighbours(recipe):
        mutants += 1
        other = judged.against(changed)
        masks = {name: judged.differs(name, want, other) for name in want}
        for name, bad in masks.items():
            shown[name] |= bad
        count = sum(int(bad.sum()) for bad in masks.values())
        if count:
            told[label] = count
    nearest = min(told, key=lambda name: told[name]) if told else ""
    could = sum(int(bad.sum()) for bad in shown.values())
    return dataclasses.replace(
        verdict,
        # Copies and integers have no mutants: every one of them could have been red.
        could_show=could if mutants else verdict.compared,
        nearest_mutant=nearest,
        mutant_distance=told.get(nearest),
    )
