"""A failure made small: fewer tokens, experts, choices and groups, plainer words, the same reason.

Cases shrink by their words. The seed stays, since inputs are keyed by (seed, token, expert): a
smaller case keeps the bits of its rows. Only where that leaves a case large are a few other seeds
tried at small sizes, in which one of the first rows may show what a late one did. The last resort
is the same failure in other words: the fewer rows there are, the more explains their bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterator
from typing import Any

from moe_parity.harness.diagnosis.cause import CauseKind
from moe_parity.harness.fuzz.reason import Failure, Judge, Reason, same
from moe_parity.references.arithmetic.formats import BLOCK
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Values

BUDGET = 150
"""Cases that one failure may cost."""

SIZES = ("m", "e", "k", "h", "i")
_DEFAULTS = {name: getattr(Case(), name) for name in SIZES}
_WORDS = tuple(
    field for field in dataclasses.fields(Case) if field.name not in (*SIZES, "seed", "ep_rank")
)
_SMALL = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 2, 2), (2, 2, 1), (2, 2, 2))
"""(m, e, k) of the cases that are tried at once."""
_OTHER_SEEDS = range(28)


class Spent(Exception):
    """The budget of a failure is used up."""


class Shrinking:
    """One failure on its way down; `best` is the smallest case that fails for its reason."""

    def __init__(
        self,
        failure: Failure,
        sizes: Container[str],
        judge: Judge,
        takes: Callable[[Case], bool],
        *,
        budget: int = BUDGET,
        better: Callable[[Failure], None] = lambda failure: None,
        known: Container[Reason] = (),
    ) -> None:
        """Begin; `takes` says for nothing whether a case can run, `better` hears of each step.

        `sizes` are those that the kernel's stage has.
        """
        self.best = failure
        self._first = failure.case
        self._sizes = tuple(name for name in SIZES if name in sizes)
        self.cases = 0
        self._judge = judge
        self._takes = takes
        self._budget = budget
        self._better = better
        self._known = known
        self._tried = {failure.case}
        self._lenient = False

    def run(self) -> Failure:
        """Shrink until nothing smaller fails for the same reason, or the budget is used up."""
        try:
            self._leap()
            while self._pass():
                pass
            if self._large() and self.best.kind == CauseKind.PATTERN:
                self._in_other_words()
            if self._large():
                self._elsewhere()
                while self._pass():
                    pass
            if self._large() and not self._lenient:
                self._in_other_words()
        except Spent:
            pass
        return self.best

    def _in_other_words(self) -> None:
        self._lenient = True
        self._tried = {self.best.case}
        self._leap()
        while self._pass():
            pass

    def _elsewhere(self) -> None:
        """Try 2 tokens, few experts and 2 groups, with aimed inputs and with other seeds.

        Aimed inputs have many of what is rare. The choices of a token are those at first: an
        order of few of them may hardly show.
        """
        case = self.best.case
        size = {"m": min(2, case.m), "k": self._first.k}
        size["e"] = min(self._first.e, max(2, self._first.k))
        size |= {name: min(2 * case.group, getattr(self._first, name)) for name in ("h", "i")}
        small: dict[str, object] = {n: v for n, v in size.items() if n in self._sizes}
        small |= {"ep_size": 1, "ep_rank": 0}
        for seed in (case.seed, *_OTHER_SEEDS):
            for values in dict.fromkeys((Values.AIMED, case.values)):
                if self._try(**small | {"values": values, "seed": seed}):
                    return

    def _large(self) -> bool:
        case = self.best.case
        return case.m > 2 or case.e > 2 * case.ep_size or case.h > 256 or case.i > 256

    def _try(self, **words: object) -> bool:
        """Take over a case that fails for the same reason."""
        try:
            case = dataclasses.replace(self.best.case, **words)  # type: ignore[arg-type]
            if case in self._tried or not self._takes(case):
                return False
        except ParityError:
            return False
        if self.cases >= self._budget:
            raise Spent
        self._tried.add(case)
        self.cases += 1
        failures = self._judge(case)
        reason = self.best.reason
        found = same(reason, failures)
        if found is None and self._lenient:
            found = self._akin(failures)
        if found is None:
            return False
        self.best = found
        self._better(found)
        return True

    def _akin(self, failures: tuple[Failure, ...]) -> Failure | None:
        """Return a failure that is the same one in other words, None where there is none.

        Its bits are explained by the cause as well, or nothing was known of the large case (only a
        pattern was described) and the small one is known as a mistake. What was found on its own
        before is another failure.
        """
        reason, kind = self.best.reason, self.best.kind
        vague = kind == CauseKind.PATTERN
        for found in failures:
            if (found.reason.check, found.reason.stage) != (reason.check, reason.stage):
                continue
            if reason.cause and reason.cause in found.others:
                return dataclasses.replace(found, reason=reason, kind=kind)
            named = found.kind in (CauseKind.PATTERN, CauseKind.MISTAKE)
            if vague and named and found.reason not in self._known:
                return found
        return None

    def _leap(self) -> bool:
        """Try the smallest sizes at once, with plain words and with those of the failure."""
        case = self.best.case
        plain: dict[str, Any] = {f.name: f.default for f in _WORDS} | {"ep_rank": 0}
        for words in (plain, {"ep_rank": 0, "ep_size": 1}):
            for m, e, k in _SMALL:
                if m > max(case.m, 1) or e > case.e or k > case.k:
                    continue
                for blocks in (1, 2):
                    size = blocks * int(words.get("group", case.group))
                    small = {"m": min(m, case.m), "e": e, "k": k}
                    small |= {name: min(size, getattr(case, name)) for name in ("h", "i")}
                    small = {n: v if n in self._sizes else _DEFAULTS[n] for n, v in small.items()}
                    if self._try(**words, **small):
                        return True
        return False

    def _pass(self) -> bool:
        """Try everything once; return whether anything became smaller."""
        before = self.best.case
        for field in _WORDS:
            value = getattr(self.best.case, field.name)
            if field.name == "ep_size":
                self._ranks()
            elif value != field.default:
                case = self.best.case
                # whole groups stay whole groups
                wide = {n: -(-getattr(case, n) // BLOCK) * BLOCK for n in ("h", "i")}
                more = wide if field.name == "group" else {}
                self._try(**{field.name: field.default} | more)
        for name in SIZES:
            if name in self._sizes:
                self._size(name)
            elif getattr(self.best.case, name) != _DEFAULTS[name]:
                self._try(**{name: _DEFAULTS[name]})
        return self.best.case != before

    def _ranks(self) -> None:
        case = self.best.case
        if case.ep_size == 1:
            return
        local = case.e // case.ep_size if case.e % case.ep_size == 0 else case.e
        for e in dict.fromkeys((max(local, case.k), case.e)):
            if self._try(ep_size=1, ep_rank=0, e=e):
                return
        if case.ep_size > 2:
            self._try(ep_size=2, ep_rank=min(case.ep_rank, 1), e=2 * local)
        self._try(ep_rank=0)

    def _size(self, name: str) -> None:
        """Make one size smaller: the least one that can be asked for, then by halves."""
        failed = 0
        for value in self._least(name):
            if value >= getattr(self.best.case, name):
                return
            if self._try(**{name: value}):
                return
            failed = value
        step = self._step(name)
        while (high := getattr(self.best.case, name)) - failed > step:
            middle = failed + max(step, (high - failed) // 2 // step * step)
            if middle >= high:
                return
            if not self._try(**{name: middle}):
                failed = middle

    def _step(self, name: str) -> int:
        case = self.best.case
        if name == "e":
            return case.ep_size
        block = name in ("h", "i") and getattr(case, name) % case.group == 0
        return case.group if block else 1

    def _least(self, name: str) -> Iterator[int]:
        """Yield the smallest values of a size that a kernel takes, two at most."""
        step, found = self._step(name), 0
        first = 1 if name in ("h", "i") else step
        for value in dict.fromkeys((first, step, 2 * step, 3 * step)):
            try:
                case = dataclasses.replace(self.best.case, **{name: value})  # type: ignore[arg-type]
                if self._takes(case):
                    yield value
                    found += 1
            except ParityError:
                continue
            if found == 2:
                return
