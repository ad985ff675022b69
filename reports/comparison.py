"""What `parity compare` found: what is the same, what changed and why, what cannot be told.

Values alone, with their words and their JSON: made by ``harness/evidence/compare_runs`` of two
results files and by ``compare_kernels`` of what two kernels give.  Nothing here needs torch.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from moe_parity.reports.records import count

SCHEMA = 1
"""Of the JSON that `parity compare --json` writes."""


class State(StrEnum):
    """What became of a case, from the base to the candidate."""

    SAME = "same bits"
    """Both gave outputs, and every bit is equal."""
    AGREED = "same verdict"
    """A check that looks at no output's bits said the same, for the same cause."""
    CHANGED = "changed bits"
    FAILS = "new failure"
    FIXED = "fixed"
    APART = "not comparable"


MOVED = (State.FAILS, State.CHANGED, State.FIXED)
"""The states that are a change, the worst first."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One case of one stage of one kernel, or one check of a record."""

    state: State
    stage: str
    kernel: str
    case: str
    """``<case id>@<seed>`` of a kernel, the id of a record."""
    sentence: str = ""
    """What changed and why, or why nothing can be said."""
    reason: str = ""
    """Why it is not comparable, the same words for the same reason."""
    cause_kind: str = ""
    cause: str = ""
    """The decision, the mistake or whatever explains the change (docs/ids.md)."""
    alternatives: tuple[str, ...] = ()
    differing: int = 0
    compared: int = 0
    """Outputs, where bits were compared."""

    @property
    def why(self) -> str:
        """The names of what explains it."""
        return " or ".join((self.cause, *self.alternatives[:2])) if self.cause else ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A base and a candidate, and what became of every case."""

    base: str
    candidate: str
    items: tuple[Item, ...]
    notes: tuple[str, ...] = ()
    """What a reader has to know besides."""
    unfinished: str = ""
    """Why it is not whole: a side that crashed or hung, with the case; empty where it is."""

    @property
    def number(self) -> Counter[State]:
        """How many items are in each state."""
        return Counter(item.state for item in self.items)

    @property
    def moved(self) -> tuple[Item, ...]:
        """The items that are a change, the worst first."""
        return tuple(item for state in MOVED for item in self.items if item.state is state)

    @property
    def status(self) -> str:
        """``changed`` beats ``incomplete``, which beats ``same``."""
        if self.moved:
            return "changed"
        compared = self.number[State.SAME] + self.number[State.AGREED]
        return "incomplete" if self.unfinished or not compared else "same"

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        number = self.number
        parts = [_counted(state, number[state]) for state in State if number[state]]
        told = ", ".join(parts) or "nothing compared"
        if self.status == "changed":
            rest = f"; {self.unfinished}" if self.unfinished else ""
            return f"something changed: {told}{rest}"
        if self.status == "incomplete":
            return f"{self.unfinished or 'nothing was comparable'} ({told})"
        return f"nothing changed: {told}"

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages in the order of their first items."""
        return tuple(dict.fromkeys(item.stage for item in self.items))

    def of(self, stage: str) -> tuple[Item, ...]:
        """Return the items of a stage."""
        return tuple(item for item in self.items if item.stage == stage)


def _counted(state: State, number: int) -> str:
    if state is State.FAILS:
        return count(number, "new failure")
    return f"{number:,} {state.value}"


# --- words ---------------------------------------------------------------------------------------

CAUSES = 4
"""Cases of one cause that are named."""
REASONS = 8
"""Reasons of a stage why cases are not comparable that are said."""


@dataclass(frozen=True)
class Group:
    """Changes of one stage of one kernel that one cause explains."""

    items: tuple[Item, ...]

    @property
    def first(self) -> Item:
        """The one whose sentence is said: it has the fewest other explanations."""
        return min(self.items, key=lambda item: (not item.cause, len(item.alternatives)))


def groups(items: Sequence[Item]) -> list[Group]:
    """Return changes by state, stage, kernel and cause; one with alternatives joins what it may be.

    A case whose few differences two decisions explain is no cause of its own where another case
    says which of the two it is.
    """
    found: dict[tuple[str, ...], list[list[Item]]] = {}
    for item in sorted(items, key=lambda one: len(one.alternatives)):
        own = found.setdefault((item.state, item.stage, item.kernel), [])
        names = {item.cause, *item.alternatives}
        fitting = next((group for group in own if group[0].cause in names), None)
        if fitting is None:
            own.append([item])
        else:
            fitting.append(item)
    return [Group(tuple(group)) for several in found.values() for group in several]


def reasons(items: Sequence[Item]) -> list[tuple[str, int]]:
    """Return why items are not comparable, and how many, the most frequent first."""
    return Counter(item.reason for item in items if item.state is State.APART).most_common()


def lines(comparison: Comparison) -> Iterator[str]:
    """Yield the comparison for a terminal: the verdict, then stage by stage."""
    yield f"base: {comparison.base}"
    yield f"candidate: {comparison.candidate}"
    for note in comparison.notes:
        yield f"note: {note}"
    for stage in comparison.stages:
        items = comparison.of(stage)
        number = Counter(item.state for item in items)
        told = ", ".join(_counted(state, number[state]) for state in State if number[state])
        yield f"{stage or 'no stage'}: {told}"
        moved = [item for state in MOVED for item in items if item.state is state]
        for group in groups(moved):
            yield f"  {group.first.state.value}: {group.first.sentence}"
            if len(group.items) > 1:
                cases = ", ".join(item.case for item in group.items[:CAUSES])
                more = f" and {len(group.items) - CAUSES} more" * (len(group.items) > CAUSES)
                yield f"    in {len(group.items)} cases: {cases}{more}"
        why = reasons(items)
        for reason, many in why[:REASONS]:
            yield f"  not comparable, {many:,}: {reason}"
        if len(why) > REASONS:
            rest = sum(many for _, many in why[REASONS:])
            yield f"  not comparable, {rest:,}: for {len(why) - REASONS} other reasons (--json)"
    mark = {"changed": "✗", "incomplete": "!", "same": "✓"}[comparison.status]
    yield f"{mark} {comparison.sentence}."


def to_json(comparison: Comparison) -> str:
    """Return the comparison as JSON: the verdict, numbers by stage, and every item."""
    stages = {
        stage: {s.value: n for s, n in Counter(i.state for i in comparison.of(stage)).items()}
        for stage in comparison.stages
    }
    data = {
        "schema": SCHEMA,
        "status": comparison.status,
        "sentence": comparison.sentence,
        "base": comparison.base,
        "candidate": comparison.candidate,
        "notes": list(comparison.notes),
        "unfinished": comparison.unfinished,
        "stages": stages,
        "items": [asdict(item) for item in comparison.items],
    }
    return json.dumps(data, ensure_ascii=False, indent=1) + "\n"
