"""The answer of an identification: what explains every bit, what stays open, or the nearest."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_parity.harness.checks.compare import where
from moe_parity.harness.diagnosis import chains
from moe_parity.harness.diagnosis.cause import Cause
from moe_parity.harness.diagnosis.identify import Field, Seen, explaining, judged
from moe_parity.harness.diagnosis.search import diagnose
from moe_parity.references.language import Decision, Recipe, Stage
from moe_parity.references.language.decision import decisions
from moe_parity.references.recipes import ALL
from moe_parity.references.recipes.ours import NO_ROUNDING, OURS


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """What comes closest where nothing explains all: a recipe, and the first that it leaves."""

    recipe: str
    equal: int
    of: int
    place: str
    """The first output that differs from it, with both bits."""
    alone: bool
    """Whether no recipe that was tried has the bits of that row."""
    cause: Cause
    """What the diagnosis says of the difference."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a stage was seen to compute."""

    stage: str
    recipes: tuple[Recipe, ...]
    """All that explain every bit; empty for none."""
    names: tuple[str, ...]
    """The named ones among them."""
    fixed: dict[str, str] = field(default_factory=dict)
    """Decision -> its only option."""
    open: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Decision -> the options that these inputs do not tell apart."""
    not_asked: tuple[str, ...] = ()
    """Decisions that no case asked for."""
    changed: tuple[str, ...] = ()
    """Named recipes with decisions changed: of a layer seen by its output alone all of the fewest
    changes, else, where no named one explains every bit, the one with the fewest."""
    nearest: Nearest | None = None


def identify_each(seen: Sequence[Seen], who: str = "it") -> Iterator[tuple[list[Seen], Answer]]:
    """Yield answers for cases that one recipe explains together.

    A tile size may decide the order of scales: what one recipe does not explain is told apart.
    """
    groups = [list(seen)]
    if len(seen) > 1 and not explained(seen):
        groups = []
    for one in () if groups else seen:
        fitting = next((g for g in groups if explained([*g, one])), None)
        if fitting is None:
            groups.append([one])
        else:
            fitting.append(one)
    for group in groups:
        yield group, identify(group, who)


def explained(seen: Sequence[Seen]) -> bool:
    """Whether some recipe explains every bit of all that was seen."""
    if seen[0].probe.stage.partial:
        return bool(chains.explaining(seen))
    return bool(explaining(seen))


def identify(seen: Sequence[Seen], who: str = "it") -> Answer:
    """Return the recipes of a stage that explain every bit of all that was seen of it."""
    stage = seen[0].probe.stage
    if stage.partial:
        return _layer(seen, who)
    fields = list({(p, a): (p, a, d) for s in seen for p, a, d in s.probe.fields}.values())
    found = explaining(seen)
    if not found:
        return Answer(stage=stage.name, recipes=(), names=(), nearest=nearest(seen, who))
    if not fields:
        return Answer(stage=stage.name, recipes=(NO_ROUNDING,), names=(NO_ROUNDING.name,))
    options = {f: tuple(dict.fromkeys(_option(r, f) for r in found)) for f in fields}
    named = [recipe for recipe in ALL.values() if stage.described_by(recipe)]
    names = [r.name for r in named if all(one.matching([r]) for one in seen)]
    every = {d.name for d in _decisions(stage)}
    return Answer(
        stage=stage.name, recipes=tuple(found), names=tuple(names),
        changed=() if names else (_fewest(named, found, fields),),
        fixed={_said(f, fields): o[0] for f, o in options.items() if len(o) == 1},
        open={_said(f, fields): o for f, o in options.items() if len(o) > 1},
        not_asked=tuple(sorted(every - {d.name for _, _, d in fields})),
    )  # fmt: skip


def _fewest(named: Sequence[Recipe], found: Sequence[Recipe], fields: Sequence[Field]) -> str:
    """Return the named recipe with the fewest decisions changed that explains every bit."""

    def changes(name: Recipe, recipe: Recipe) -> list[str]:
        own = [f for f in fields if f[0] in name.parts]
        return [
            f"{_said(f, fields)}={_option(recipe, f)}"
            for f in own
            if _option(name, f) != _option(recipe, f)
        ]

    near = min(itertools.product(named, found), key=lambda pair: len(changes(*pair)))
    return f"{near[0].name} with {' and '.join(changes(*near))}"


def _option(recipe: Recipe, field: Field) -> str:
    return str(getattr(recipe.parts[field[0]], field[1]))


def _said(field: Field, fields: Iterable[Field]) -> str:
    """Return a decision's name, its part before it where two parts have the same."""
    part, _, decision = field
    twice = sum(d.name == decision.name for _, _, d in fields) > 1
    return f"{part}: {decision.name}" if twice else decision.name


def _decisions(stage: Stage[Any]) -> Iterator[Decision]:
    for part, chosen in stage.acting.items():
        for decision in decisions(OURS.parts[part]).values():
            if chosen is None or decision.name in chosen:
                yield decision


def nearest(seen: Sequence[Seen], who: str) -> Nearest:
    """Return the named recipe that has most bits, and what it leaves unexplained."""
    stage = seen[0].probe.stage
    named = [r for r in ALL.values() if stage.described_by(r)] or [NO_ROUNDING]
    recipe = max(named, key=lambda r: sum(one.equal(r)[0] for one in seen))
    one = next(one for one in seen if not one.matching([recipe]))
    equal, of = (sum(counts) for counts in zip(*(s.equal(recipe) for s in seen), strict=True))
    about = judged(one, who)
    want = about.against(recipe)
    first = next(d for d in about.differences(want) if d.wrong)
    tried = [changed for _, changed in stage.neighbours(recipe)] + named
    row = first.index[0]
    alone = not any(
        torch.equal(one.probe.bits(r)[first.name][row], one.bits[first.name][row]) for r in tried
    )
    place = (
        f"{where(one.probe.inputs, first.output, first.index)} of {one.probe.case.id}: got "
        f"{first.got}, by {recipe.name} {first.want}"
    )
    # a mistake may hide which recipe it is made beside
    others = {tuple(r.parts.get(p) for p in stage.acting): r for r in [*named[::-1], recipe]}
    cause = diagnose(about, (recipe, *others.values()), recipe, want)
    return Nearest(recipe=recipe.name, equal=equal, of=of, place=place, alone=alone, cause=cause)


def _layer(seen: Sequence[Seen], who: str) -> Answer:
    """Return what explains the output of a layer: named recipes with up to two changes."""
    found = chains.explaining(seen)
    if not found:
        return Answer(stage="layer", recipes=(), names=(), nearest=nearest(seen, who))
    names = tuple(dict.fromkeys(label for label, _ in found if label in ALL))
    return Answer(
        stage="layer", recipes=tuple(recipe for _, recipe in found), names=names,
        changed=tuple(label for label, _ in found if label not in ALL),
    )  # fmt: skip
