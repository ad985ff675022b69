"""What two sides gave on the same case: where bits differ, and which decision explains it.

The base's bits are held against the named recipes first, then against all that decisions can make.
Where one is found, the candidate is diagnosed against it: what differs from the recipe is what
differs from the base.  Of a layer the stages inside are looked at, each on its own input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moe_parity.harness.checks.compare import Difference, differences, where
from moe_parity.harness.checks.exact import exact
from moe_parity.harness.checks.judged import Judged
from moe_parity.harness.checks.verdict import Verdict
from moe_parity.harness.diagnosis import pattern
from moe_parity.harness.diagnosis.answer import identify
from moe_parity.harness.diagnosis.cause import opened
from moe_parity.harness.diagnosis.identify import Probe, Seen, explaining
from moe_parity.harness.diagnosis.scene import Scene
from moe_parity.references.language import Case, Recipe, Stage
from moe_parity.references.language.stage import Outputs
from moe_parity.references.recipes import ALL
from moe_parity.references.recipes.ours import NO_ROUNDING


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A stage on one case: what the base gave and what the candidate gave."""

    who: str
    stage: Stage[Any]
    case: Case
    inputs: Any
    base: Outputs
    candidate: Outputs
    settled: bool = False
    """Whether the candidate wrote what it returned: other memory gave the same bits."""

    @property
    def names(self) -> list[str]:
        """The outputs that both gave."""
        return [name for name in self.base if name in self.candidate]

    def differences(self) -> list[Difference]:
        """Return how outputs differ, in rows that somebody owns."""
        outputs = self.stage.outputs(self.case, self.inputs)
        live = self.stage.live(self.case, self.inputs)
        base, candidate = (
            {name: side[name] for name in self.names} for side in (self.base, self.candidate)
        )
        return differences(outputs, candidate, base, live)

    def judged(self, got: Outputs) -> Judged:
        """Return outputs of a side, to be judged."""
        return Judged(
            who=self.who, stage=self.stage, case=self.case, inputs=self.inputs, got=got,
            settled=self.settled,
        )  # fmt: skip


class Explainer:
    """Says why bits changed; what it finds of a base in one format it keeps for the next case."""

    def __init__(self) -> None:
        """Begin knowing nothing."""
        self.known: dict[tuple[object, ...], list[Recipe]] = {}

    def explain(self, pair: Pair) -> Verdict:
        """Return the red verdict of a pair whose bits differ: its sentence and its cause."""
        inner = list(self._inside(pair))
        if inner:
            first, *others = inner
            more = f" It goes on in {' and '.join(v.stage for v in others)}." if others else ""
            return dataclasses.replace(first, message=f"{first.message}{more}")
        return self._one(pair)

    def _inside(self, pair: Pair) -> Iterator[Verdict]:
        """Yield the stages inside that leave the base's recipe on their own input."""
        stages = [
            list(pair.stage.inner(pair.case, pair.inputs, side))
            for side in (pair.base, pair.candidate)
        ]
        for base, candidate in zip(*stages, strict=False):
            if base.stage is not candidate.stage:
                continue
            old = Pair(
                who=pair.who, stage=base.stage, case=base.case, inputs=base.inputs,
                base=base.got, candidate=base.got,
            )  # fmt: skip
            recipes = self.recipes(old)
            if not recipes:
                continue
            new = dataclasses.replace(
                old, case=candidate.case, inputs=candidate.inputs, candidate=candidate.got
            )
            verdict = exact(new.judged(new.candidate), tuple(recipes), check="compare", power=False)
            if verdict.failed:
                yield dataclasses.replace(verdict, stage=new.stage.name)

    def _one(self, pair: Pair) -> Verdict:
        recipes = self.recipes(pair)
        if recipes:
            got = {name: pair.candidate[name] for name in pair.names}
            verdict = exact(pair.judged(got), tuple(recipes), check="compare", power=False)
            if verdict.failed:
                return verdict
        return _described(pair)

    def recipes(self, pair: Pair) -> list[Recipe]:
        """Return recipes that give every bit of a base, those of the format's other cases first."""
        stage, case = pair.stage, pair.case
        probe = Probe(stage=stage, case=case, inputs=pair.inputs)
        seen = Seen(probe, {name: pair.base[name] for name in pair.names})
        key = (pair.who, stage.name, case.scale, case.mid_scale, case.dtype, case.group)
        named = [recipe for recipe in ALL.values() if stage.described_by(recipe)]
        for candidates in (self.known.get(key, []), named or [NO_ROUNDING]):
            found = seen.matching(candidates)
            if found:
                break
        else:
            found = _made(seen)
        self.known[key] = found or self.known.get(key, [])
        return found


def _made(seen: Seen) -> list[Recipe]:
    """Return a recipe without a name that explains every bit, called by the nearest named one."""
    if seen.probe.stage.partial or not explaining([seen]):
        return []
    answer = identify([seen])
    label = answer.changed[0] if answer.changed else answer.recipes[0].name
    return [dataclasses.replace(answer.recipes[0], name=label)]


def _described(pair: Pair) -> Verdict:
    """Return where bits first differ, and what they equal, where the base follows no recipe."""
    found = pair.differences()
    first = next(d for d in found if d.wrong)
    got = {name: pair.candidate[name] for name in pair.names}
    scene = Scene(judged=pair.judged(got), want=pair.base)
    cause = pattern.describe(scene)
    place = where(pair.inputs, first.output, first.index)
    wrong = sum(d.wrong for d in found)
    text = (
        f"{opened(cause.phrase).rstrip(',')} in {pair.stage} of {pair.who}, whose base follows no "
        f"known recipe: at {place} of {first.name} the base has {first.want}, the candidate "
        f"{first.got}; {', '.join(d.words for d in found)}."
    )
    return Verdict(
        check="compare", verdict="fail", message=text, cause_kind=cause.kind.value,
        cause=cause.name, compared=sum(d.of for d in found), differing=wrong,
    )  # fmt: skip


def wrong(found: Sequence[Difference]) -> int:
    """Return how many outputs differ."""
    return sum(difference.wrong for difference in found)
