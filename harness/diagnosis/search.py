"""The search for a cause: named recipes, one decision, mistakes, two decisions, else a pattern.

Each hypothesis is tried on a few rows first, most of them differing ones; what survives is held
against all outputs.  Nothing here runs for a check that passes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from moe_parity.harness.checks.judged import Judged
from moe_parity.harness.diagnosis import pattern
from moe_parity.harness.diagnosis.cause import Cause, CauseKind
from moe_parity.harness.diagnosis.chains import Chain
from moe_parity.harness.diagnosis.guessed import identified
from moe_parity.harness.diagnosis.scene import Fit, Scene
from moe_parity.references.language import Case, Mistake, Recipe, Stage
from moe_parity.references.language.stage import Kind, Outputs
from moe_parity.references.recipes import ALL
from moe_parity.references.stages import LAYER

PLACES = 12
"""Hypotheses that are tried place by place, those that explain most."""
EACH = 16
"""Ways to explain each output by a cause of its own that are kept."""
AT_ONCE = 3
"""Mistakes at once that are looked for."""
SECONDS = 1.0
"""Pairs of decisions are tried where they take about as long, on the few rows."""


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """What may have been done, and the bits that come of it."""

    kind: CauseKind
    name: str
    words: str
    outputs: Callable[[], Outputs]
    """On all rows."""
    few: Callable[[], Outputs] | None
    """On the few rows; None where it shows on all rows only."""

    def cause(self, where: str = "") -> Cause:
        """Return it as a cause."""
        return Cause(kind=self.kind, name=self.name, words=self.words, where=where)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A hypothesis that explains every output that differs."""

    hypothesis: Hypothesis
    fit: Fit


def by_recipe(stage: Stage[Any], case: Case, inputs: Any) -> Callable[[Recipe], Outputs]:
    """Return the reference of a stage on given inputs; of a layer each step is computed once."""
    if stage is LAYER:
        return Chain(case, inputs).trace
    return lambda recipe: stage.reference(case, inputs, recipe)


class Search:
    """The hypotheses about one red check."""

    def __init__(self, judged: Judged, recipe: Recipe, want: Outputs) -> None:
        self.judged, self.recipe = judged, recipe
        self.scene = Scene(judged=judged, want=want)
        self.part = self.scene.part()
        self.apart: dict[str, list[Cause]] = {}
        self.tried: list[tuple[Hypothesis, Outputs]] = []
        """Hypotheses that explain something, with what they make on the few rows, or on all."""

    # --- hypotheses ------------------------------------------------------------------------------

    def of_recipe(self, changed: Recipe, kind: CauseKind, name: str, words: str) -> Hypothesis:
        """Return the hypothesis that a recipe was followed."""
        part = self.part
        return Hypothesis(
            kind=kind, name=name, words=words, outputs=lambda: self.whole(changed),
            few=None if part is None else lambda: self.few(changed),
        )  # fmt: skip

    @cached_property
    def whole(self) -> Callable[[Recipe], Outputs]:
        """Return what a recipe gives on all rows."""
        return by_recipe(self.judged.stage, self.judged.case, self.judged.inputs)

    @cached_property
    def few(self) -> Callable[[Recipe], Outputs]:
        """Return what a recipe gives on the few rows."""
        assert self.part is not None
        return by_recipe(self.judged.stage, self.part.case, self.part.inputs)

    def decisions(self, recipe: Recipe) -> Iterator[Hypothesis]:
        """Yield each decision of a recipe changed alone."""
        for label, changed in self.judged.stage.neighbours(recipe):
            words = spoken(recipe, changed, self.judged, label)
            yield self.of_recipe(changed, CauseKind.DECISION, label, words)

    def pairs(self, recipe: Recipe) -> Iterator[Hypothesis]:
        """Yield two decisions of a recipe changed at once."""
        stage = self.judged.stage
        seen: set[frozenset[str]] = set()
        for one, changed in stage.neighbours(recipe):
            for two, both in stage.neighbours(changed):
                key = frozenset((one, two))
                if decision_of(one) != decision_of(two) and key not in seen:
                    seen.add(key)
                    words = " and ".join(
                        spoken(recipe, both, self.judged, label) for label in (one, two)
                    )
                    yield self.of_recipe(both, CauseKind.DECISION, f"{one} and {two}", words)

    def named(self) -> Iterator[Hypothesis]:
        """Yield the other named recipes, each way of rounding once."""
        acting, stage = self.judged.stage.acting, self.judged.stage
        seen = [acting_parts(self.recipe, acting)]
        for other in ALL.values():
            parts = acting_parts(other, acting)
            if stage.described_by(other) and parts not in seen:
                seen.append(parts)
                changed = [f"{n}={b.value}" for n, _, b in self.recipe.changes(other, acting)]
                if len(changed) > 1:
                    words = f"the roundings of recipe {other.name} ({', '.join(changed)})"
                    yield self.of_recipe(other, CauseKind.DECISION, other.name, words)

    def mistakes(self, recipe: Recipe, *, late: bool) -> Iterator[Hypothesis]:
        """Yield the mistakes of the stage, or its late ones, on top of a recipe."""
        stage, part = self.judged.stage, self.part
        few: dict[tuple[str, str], list[Mistake]] = {}
        if part is not None:
            for made in stage.mistakes(part.case, part.inputs, recipe):
                few.setdefault((made.name, made.words), []).append(made)
        for mistake in stage.mistakes(self.judged.case, self.judged.inputs, recipe):
            if mistake.late is not late:
                continue
            # one mistake may be made in several ways, in the same order here and there
            same = few.get((mistake.name, mistake.words))
            here = same.pop(0).outputs if same and mistake.local else None
            if mistake.few is not None and part is not None:
                here = partial(mistake.few, part.chosen)
            figures = f" ({mistake.figures})" if mistake.figures else ""
            beside = "" if recipe is self.recipe else f" beside recipe {recipe.name},"
            yield Hypothesis(
                kind=CauseKind.MISTAKE, name=mistake.name, words=mistake.words + figures + beside,
                outputs=mistake.outputs, few=here,
            )  # fmt: skip

    # --- trying them -----------------------------------------------------------------------------

    def fitting(self, hypotheses: Iterable[Hypothesis]) -> list[Found]:
        """Return the hypotheses that explain every differing output, the plain ones first."""
        passed = [hypothesis for hypothesis in hypotheses if self._passes(hypothesis)]
        found = []
        for hypothesis in passed:
            made = hypothesis.outputs()
            if hypothesis.few is None or self.part is None:
                self.tried.append((hypothesis, made))
            fit = self.scene.fit(made)
            if fit is not None:
                found.append(Found(hypothesis=hypothesis, fit=fit))
            self._note_apart(hypothesis, made)
        return sorted(found, key=lambda f: (f.fit.missed > 0, f.fit.missed))

    def _passes(self, hypothesis: Hypothesis) -> bool:
        """Whether the few rows speak for it, or for it in one output."""
        if self.part is None or hypothesis.few is None:
            return True
        scene, made = self.part.scene, hypothesis.few()
        if self.part.scene.explains_some(made):
            self.tried.append((hypothesis, made))
        return any(scene.possible(made, [name]) for name in scene.differing)

    def _note_apart(self, hypothesis: Hypothesis, made: Outputs) -> None:
        """Keep what explains one output of several, wholly."""
        if len(self.scene.differing) < 2:
            return
        for name in self.scene.differing:
            fit = self.scene.fit(made, [name])
            if fit is not None and not fit.missed:
                self.apart.setdefault(name, []).append(hypothesis.cause())


def diagnose(judged: Judged, recipes: tuple[Recipe, ...], recipe: Recipe, want: Outputs) -> Cause:
    """Return the cause of a difference from what ``recipe``, the nearest of ``recipes``, gives."""
    search = Search(judged, recipe, want)
    bases = [recipe, *(r for r in recipes if r is not recipe)]
    somewhere: list[Found] = []
    tiers: list[Callable[[], Iterable[Hypothesis]]] = [
        lambda: (h for base in bases for h in search.decisions(base)),
        lambda: (h for base in bases for h in search.mistakes(base, late=False)),
        lambda: (h for base in bases for h in search.mistakes(base, late=True)),
        search.named,
        lambda: _affordable(search, bases),
    ]
    for number, tier in enumerate(tiers):
        found = search.fitting(tier())
        whole = [f for f in found if not f.fit.missed]
        if number == 0 and whole:
            # a mistake may have the same bits: both are said
            whole += [f for f in search.fitting(tiers[1]()) if not f.fit.missed]
        if whole:
            return _cause(whole)
        somewhere += found
    if somewhere:
        least = min(f.fit.missed for f in somewhere)
        return _cause([f for f in somewhere if f.fit.missed == least])
    # of a version that nobody has read any recipe is as likely as the one it is held to
    whole_recipe = identified(judged, recipe) if judged.guess else None
    return (
        whole_recipe or _each_output(search) or _each_place(search)
        or pattern.describe(search.scene)
    )  # fmt: skip


def _affordable(search: Search, bases: list[Recipe]) -> Iterable[Hypothesis]:
    """Return the pairs of decisions, where trying them takes about a second."""
    if search.judged.stage.partial:
        return []  # a layer has thousands: ``parity identify`` tries them
    pairs = list(itertools.chain.from_iterable(search.pairs(base) for base in bases))
    if not pairs:
        return []
    seconds = []
    for pair in pairs[:3]:
        start = time.perf_counter()
        _ = search._passes(pair) if search.part is not None else pair.outputs()
        seconds.append(time.perf_counter() - start)
    return pairs if min(seconds) * len(pairs) < SECONDS else []


def _cause(found: list[Found]) -> Cause:
    causes = [f.hypothesis.cause(f.fit.where) for f in found]
    first = causes[0]
    return first.among(tuple(c for c in causes[1:] if c.words != first.words))


def _each_output(search: Search) -> Cause | None:
    """Return one cause made of what explains each output; None where one has no explanation.

    One wrong division often moves two things: the scale, and what elements are divided by.
    """
    names = search.scene.differing
    if len(names) < 2 or not all(search.apart.get(name) for name in names):
        return None
    # a cause before its effects: scales decide codes
    names = sorted(names, key=lambda name: search.judged.outputs[name].kind is not Kind.SCALES)
    every = itertools.islice(itertools.product(*(search.apart[name] for name in names)), EACH)
    first, *others = (
        Cause(
            kind=chosen[0].kind, name=" and ".join(c.name for c in chosen),
            words=" and ".join(f"{c.words} (its {n})" for c, n in zip(chosen, names, strict=True)),
        )
        for chosen in every
    )  # fmt: skip
    return first.among(tuple(others))


def _each_place(search: Search) -> Cause | None:
    """Return one cause made of what explains each place; None where a place has no explanation.

    Two mistakes at once: one for some experts, tokens or blocks of columns, one for others.
    """
    if search.judged.stage.partial:
        return None  # of a layer's output each trial is a whole layer
    left = {name: search.scene.bits(name)[2].clone() for name in search.scene.differing}
    chosen: list[Cause] = []
    candidates = sorted(search.tried, key=lambda entry: -_promise(search, entry))[:PLACES]
    whole = [(h, h.outputs() if h.few is not None and search.part else m) for h, m in candidates]
    for _ in range(AT_ONCE):
        best: tuple[int, Cause, dict[str, Tensor]] | None = None
        for hypothesis, made in whole:
            for count, where, masks in search.scene.places(made, left):
                if best is None or count > best[0]:
                    best = count, hypothesis.cause(where), masks
        if best is None:
            return None
        _, cause, masks = best
        chosen.append(cause)
        for name, mask in masks.items():
            left[name] &= ~mask
        if not any(bool(mask.any()) for mask in left.values()):
            break
    else:
        return None
    return Cause(
        kind=chosen[0].kind, name=" and ".join(dict.fromkeys(c.name for c in chosen)),
        words=" and ".join(f"{c.words.rstrip(',')} {c.where}" for c in chosen),
    )  # fmt: skip


def _promise(search: Search, entry: tuple[Hypothesis, Outputs]) -> int:
    """Return how many differing outputs a hypothesis has right, where it was tried."""
    hypothesis, made = entry
    few = hypothesis.few is not None and search.part is not None
    scene = search.part.scene if few and search.part is not None else search.scene
    return scene.right(made)


# --- words --------------------------------------------------------------------------------------


def decision_of(label: str) -> str:
    """Return the decision of ``part: decision=option``, its part included."""
    return label.rpartition("=")[0]


def spoken(recipe: Recipe, changed: Recipe, judged: Judged, label: str) -> str:
    """Return ``quant.apply=divide instead of mul_recip``."""
    name = decision_of(label).rpartition(": ")[2]
    before = [a.value for n, a, _ in recipe.changes(changed, judged.stage.acting) if n == name]
    return f"{label} instead of {before[0]}" if before else label


def acting_parts(recipe: Recipe, acting: object) -> dict[str, object]:
    """Return the parts of a recipe that a stage reads."""
    assert isinstance(acting, dict)
    return {name: recipe.parts.get(name) for name in acting}


__all__ = ["Search", "diagnose"]
