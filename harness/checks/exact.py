"""The check ``exact``: every bit as the recipe says, else why not.

And the other way round: how many outputs of these very inputs would have told a mutant.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

from moe_parity.harness.checks.compare import Difference, digest, where
from moe_parity.harness.checks.judged import Judged
from moe_parity.harness.checks.verdict import Verdict, caused
from moe_parity.harness.diagnosis.cause import Cause, CauseKind, opened
from moe_parity.harness.diagnosis.search import diagnose
from moe_parity.harness.diagnosis.stored import stored_at
from moe_parity.references.language import Check, Recipe
from moe_parity.references.language.stage import Kind, Outputs

NO_ROUNDING = "no_rounding"
"""The recipe of integers and copies, of which a sentence says nothing."""
POWERS = 256
"""Measurements that are kept."""
_POWERS: dict[tuple[object, ...], Power | None] = {}
MEASURE_BELOW = 1 << 23
"""Outputs up to which the power of the inputs is measured against every mutant."""


def exact(
    judged: Judged,
    recipes: tuple[Recipe, ...],
    *,
    check: str,
    power: bool,
    search: bool = True,
    cause: Cause | None = None,
) -> Verdict:
    """Compare with the nearest of the recipes that a kernel may follow.

    ``power`` counts the outputs that a mutant would change, at the cost of one reference a mutant;
    ``search`` looks for the cause of a difference.  A known ``cause``, in words that follow the
    kernel's name, is said first, and nothing is looked for.
    """
    tried = [(recipe, judged.against(recipe)) for recipe in recipes]
    compared = [(r, want, judged.differences(want)) for r, want in tried]
    recipe, want, found = min(compared, key=lambda entry: sum(d.wrong for d in entry[2]))
    verdict = _verdict(judged, recipe, found, check)
    if verdict.failed and cause is not None:
        counts = ", ".join(d.words for d in found if d.wrong)
        stored = stored_at(judged, want) if cause.name == "unwritten" else None
        because = "" if stored is None else f": {stored.words}"
        cause = cause if stored is None else cause.among((stored,))
        text = (
            f"{judged.stage} of {judged.who} {cause.words}{because}. "
            f"Against recipe {recipe.name}{_whose(judged)}: {counts}."
        )
        return caused(dataclasses.replace(verdict, message=text), cause)
    if verdict.failed:
        why = diagnose(judged, recipes, recipe, want) if search else None
        text = _sentence(judged, recipe, found, why)
        verdict = dataclasses.replace(verdict, message=text)
        return verdict if why is None else caused(verdict, why)
    if power and verdict.compared <= MEASURE_BELOW:
        return _with_power(verdict, judged, recipe, want)
    return verdict


def every_stage(
    judged: Judged,
    recipes: tuple[Recipe, ...],
    *,
    power: bool = False,
    search: bool = True,
    cause: Cause | None = None,
) -> Iterator[Verdict]:
    """Yield the verdicts of the stages inside, each on its own upstream tensors, then of the whole.

    The arguments are those of :func:`exact`.  Of a stage that may return its last output alone
    the whole is that output, and where others were shown its cause stands with them.
    """
    stage, got, starts = judged.stage, judged.got, []
    for inner in stage.inner(judged.case, judged.inputs, got):
        own = dataclasses.replace(
            judged, stage=inner.stage, case=inner.case, inputs=inner.inputs, got=inner.got
        )
        name = f"exact_{inner.stage}"
        verdict = exact(own, recipes, check=name, power=power, search=search, cause=cause)
        starts += [inner.stage.name] if verdict.failed else []
        yield dataclasses.replace(verdict, stage=inner.stage.name)
    name = f"exact_{stage}" if stage.partial else Check.EXACT
    shown = not stage.partial or len(got) == 1
    last = {list(got)[-1]: list(got.values())[-1]} if stage.partial else got
    whole = dataclasses.replace(judged, got=last)
    verdict = exact(
        whole, recipes, check=name, power=power and shown, search=search and shown, cause=cause
    )
    if verdict.failed and starts:
        message = f"{verdict.message} It starts in {' and '.join(starts)}."
        verdict = dataclasses.replace(verdict, message=message)
    yield verdict


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
        digest=digest(judged.outputs, judged.got, judged.live),
    )  # fmt: skip


def _sentence(judged: Judged, recipe: Recipe, found: list[Difference], why: Cause | None) -> str:
    """Say the cause, the stage, the first place that differs with its bits, and how many do."""
    first = next(d for d in found if d.wrong)
    place = where(judged.inputs, first.output, first.index)
    # codes and scales are called what they are, beside their value
    named = len(found) > 1 and first.output.kind in (Kind.VALUES, Kind.INTEGERS)
    of = f" of {first.name}" if named else ""
    about = f"{judged.stage} of {judged.who}"
    own = judged.stage.told(judged.case, judged.inputs, judged.got)
    known = why is not None and not (own and why.kind is CauseKind.PATTERN)
    start = f"{opened(why.phrase)} in {about}" if why is not None and known else about
    seen = own or f"at {place}{of} got {first.got}, expected {first.want}"
    whose = _whose(judged)
    by = whose if recipe.name == NO_ROUNDING else f" by recipe {recipe.name}{whose}"
    colon = ": " if known or own else " differs: "
    return f"{start}{colon}{seen}{by}; {', '.join(d.words for d in found)}."


def _whose(judged: Judged) -> str:
    return f" (of {judged.guess})" if judged.guess else ""


class Power(NamedTuple):
    """What inputs can tell of a recipe's mutants."""

    could_show: int
    nearest: str
    distance: int | None


def _with_power(verdict: Verdict, judged: Judged, recipe: Recipe, want: Outputs) -> Verdict:
    """Say what the inputs could have shown; kernels that share them share the measurement."""
    key = _seen(judged, recipe)
    if key not in _POWERS:
        if len(_POWERS) >= POWERS:
            _POWERS.clear()
        _POWERS[key] = _power(judged, recipe, want)
    power = _POWERS[key]
    # Copies and integers have no mutants: every one of them could have been red.
    could = verdict.compared if power is None else power.could_show
    return dataclasses.replace(
        verdict, could_show=could, nearest_mutant=power.nearest if power else "",
        mutant_distance=power.distance if power else None,
    )  # fmt: skip


def _seen(judged: Judged, recipe: Recipe) -> tuple[object, ...]:
    """Return what a measurement depends on: the case, the recipe, the outputs, every input."""
    total = hashlib.sha256()
    for tensor in judged.stage.handed(judged.inputs):
        total.update(str((tensor.dtype, tensor.shape)).encode())
        total.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return judged.stage.name, judged.case, recipe, tuple(judged.got), total.digest()


def _power(judged: Judged, recipe: Recipe, want: Outputs) -> Power | None:
    """Run every mutant and collect where it differs; None where a recipe has none."""
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
    return Power(could, nearest, told.get(nearest)) if mutants else None
