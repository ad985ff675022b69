"""What went wrong: what did not pass, by the cause that records carry.

A fault shows in many tests and in several checks of each. It is one row here, and in a test one
failure: the record that says the cause, and with it the checks that are red for the same cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from moe_parity.reports.records import ITEM_CHECK, Record, Run, count

KINDS: Mapping[str, str] = {
    "decision": "another decision",
    "mistake": "a mistake",
    "memory": "memory",
    "call": "the call itself",
    "batch": "other rows of the batch",
    "state": "an earlier or a later call",
    "pattern": "a pattern, unexplained",
}
"""Kind of a cause -> its words in a report; another kind is said as it is."""
NO_CAUSE = "no cause"
NOT_SAID = "an assertion of a test, or a test that broke"
"""What a failure without a cause is."""
_LISTED = 4

Key = tuple[str, str]
"""(kind, name) of a cause."""


def cause_of(record: Record) -> Key | None:
    """Return the cause of a record, None where it says none.

    A `cause` without its kind is what a check was about: the mutant of a test of mutants.
    """
    return (record.cause_kind, record.cause) if record.cause_kind and record.cause else None


def explaining(record: Record) -> tuple[str, ...]:
    """Return the names of all that explains a record, its cause first."""
    return tuple(dict.fromkeys((record.cause, *record.alternatives)))


@dataclass(frozen=True)
class Failure:
    """What one cause made red in one test, or what is red there without a cause."""

    record: Record
    """The one that says why."""
    also: tuple[Record, ...]
    """The other checks, in their order: of the same cause or of none."""

    @property
    def same(self) -> tuple[Record, ...]:
        """The other checks that are red for the same cause; what they say is said already."""
        cause = cause_of(self.record)
        return tuple(r for r in self.also if cause is not None and cause_of(r) == cause)

    @property
    def others(self) -> tuple[Record, ...]:
        """The other checks, which say no cause of their own."""
        return tuple(r for r in self.also if r not in self.same)

    @property
    def test(self) -> str:
        """What tells its test from others."""
        return self.record.nodeid or self.record.id


def failures(run: Run) -> list[Failure]:
    """Return what did not pass, test by test, and in a test cause by cause.

    A test's own record speaks only where none of its checks says why, or where the test itself
    broke. What says no cause stands with the first cause of its test.
    """
    bad: dict[str, list[Record]] = {}
    for record in run.records:
        if record.verdict in ("fail", "error"):
            bad.setdefault(record.nodeid or record.id, []).append(record)
    return [failure for records in bad.values() for failure in _of_test(records)]


def _of_test(records: Sequence[Record]) -> list[Failure]:
    checks = [r for r in records if r.check != ITEM_CHECK]
    broken = [r for r in records if r.check == ITEM_CHECK and r.verdict == "error"]
    causes = list(dict.fromkeys(filter(None, map(cause_of, checks))))
    if not causes:
        return [_failure([*broken, *checks] or records)]
    found = []
    for number, cause in enumerate(causes):
        first = next(r for r in checks if cause_of(r) == cause)
        own = (cause, None) if number == 0 else (cause,)
        found.append(
            _failure([first, *(r for r in checks if cause_of(r) in own and r is not first)])
        )
    return [*found, _failure(broken)] if broken else found


def _failure(records: Sequence[Record]) -> Failure:
    first, *also = records
    return Failure(first, tuple(also))


@dataclass(frozen=True)
class Group:
    """A cause and all failures that have it; kind and name are empty for those without one."""

    kind: str
    name: str
    failures: tuple[Failure, ...]
    """The first of every kernel and stage stand in front, so that the first few show most."""
    places: int
    """In how many stages of kernels it is seen."""

    @property
    def known(self) -> bool:
        """Whether this is a cause, not the failures without one."""
        return bool(self.name)

    @property
    def kind_words(self) -> str:
        """The kind, in words."""
        return KINDS.get(self.kind, self.kind) if self.known else NOT_SAID

    @property
    def title(self) -> str:
        """Its name, or that there is none."""
        return self.name or NO_CAUSE

    @property
    def alternatives(self) -> tuple[str, ...]:
        """The names of what explains every one of the failures as well."""
        first, *others = (explaining(f.record) for f in self.failures)
        return tuple(n for n in first if n != self.name and all(n in names for names in others))

    @property
    def beyond(self) -> str:
        """How many alternatives are not said with the name, which has the first two; in words."""
        more = len(self.alternatives) - 2
        return f" or one of {count(more, 'other')}" if more > 0 else ""

    @property
    def tests(self) -> int:
        """How many tests it made red."""
        return len({failure.test for failure in self.failures})

    @property
    def checks(self) -> int:
        """How many checks are red with it."""
        every = (r for f in self.failures for r in (f.record, *f.also))
        return sum(r.check != ITEM_CHECK for r in every)

    @property
    def differing(self) -> tuple[int, int]:
        """Outputs that differ, of how many, each test counted once; a call that raised has none."""
        firsts = [f.record for f in self.failures if f.record.compared and self.kind != "call"]
        return sum(r.differing for r in firsts), sum(r.compared for r in firsts)

    @property
    def kernels(self) -> str:
        """The kernels, most of them by name."""
        return listed(f.record.kernel for f in self.failures)

    @property
    def stages(self) -> str:
        """The stages, those inside a layer by their own name."""
        every = (r for f in self.failures for r in (f.record, *f.same))
        return listed(r.stage for r in every)


def groups(run: Run) -> list[Group]:
    """Return the causes, the one with most tests first; what has none comes last.

    One fault may be `a` or `b` by one test and `b` alone by another. In one stage of one kernel it
    is the cause that explains most.
    """
    found: dict[Key, list[Failure]] = {}
    every = failures(run)
    causes = _settled(every)
    for number, failure in enumerate(every):
        found.setdefault(causes.get(number, ("", "")), []).append(failure)
    made = [_group(key, every) for key, every in found.items()]
    return sorted(made, key=lambda group: (not group.known, -group.tests))


def _settled(every: Sequence[Failure]) -> dict[int, Key]:
    """Return the cause of each failure that has one, by its number."""
    places: dict[Key, dict[int, Key]] = {}
    for number, failure in enumerate(every):
        cause = cause_of(failure.record)
        if cause is not None:
            place = (failure.record.kernel, failure.record.stage)
            places.setdefault(place, {})[number] = cause
    settled: dict[int, Key] = {}
    for left in places.values():
        known = {name: (kind, name) for kind, name in left.values()}
        while left:
            names = {number: explaining(every[number].record) for number in left}
            counts = Counter(name for found in names.values() for name in found if name in known)
            most = max(known, key=lambda name: counts[name])
            if counts[most] == 1:  # nothing is explained together any more
                settled |= left
                break
            for number, found in names.items():
                if most in found:
                    settled[number] = known[most]
                    del left[number]
    return settled


def _group(key: Key, every: Sequence[Failure]) -> Group:
    # what one cause alone explains says more than what several do
    every = sorted(every, key=lambda failure: len(failure.record.alternatives))
    seen: Counter[Key] = Counter()
    turns = []
    for failure in every:
        place = (failure.record.kernel, failure.record.stage)
        turns.append(seen[place])
        seen[place] += 1
    order = sorted(range(len(every)), key=lambda number: turns[number])
    kind, name = key
    return Group(kind, name, tuple(every[number] for number in order), len(seen))


def first_ones(every: Sequence[Group], most: int) -> list[Group]:
    """Return the first of very many causes; what has none stays."""
    known = [group for group in every if group.known]
    return known[:most] + [group for group in every if not group.known]


def listed(names: Iterable[str]) -> str:
    """Return names as a list, each once; of very many the first ones and how many more."""
    every = [name for name in dict.fromkeys(names) if name]
    more = f" and {len(every) - _LISTED} more" if len(every) > _LISTED else ""
    return ", ".join(every[:_LISTED]) + more


def share(counts: Sequence[int], most: int) -> list[int]:
    """Return how many of each are shown so that all fit into `most`: every one its first."""
    each = max(
        (level for level in range(1, most + 1) if sum(min(n, level) for n in counts) <= most),
        default=1,
    )
    return [min(n, each) for n in counts]
