"""One process that fuzzes: draws a case, judges it, shrinks what is new, and says all that it does.

What it says are events, plain values, so that they go through a pipe as well: whoever hears them
counts, prints and keeps. A case is said before it runs, so that the largest one is known when a
process dies.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moe_parity.harness.cases.budget import skip_of
from moe_parity.harness.cases.strategies import cases
from moe_parity.harness.fuzz.corpus import Entry, load
from moe_parity.harness.fuzz.draw import Enough, draw
from moe_parity.harness.fuzz.reason import Failure, Judge, Reason, judge, same
from moe_parity.harness.fuzz.shrink import Shrinking
from moe_parity.kernels import Kernel
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case

BEFORE = 5
"""Calls that are told of a failure that shows only after others."""

Send = Callable[[dict[str, Any]], None]
Alone = Callable[[Case], bool | None]
"""Whether a case fails in a process of its own; None where that cannot be said."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a process fuzzes: cases, or seconds, whichever is over first; None for no limit."""

    cases: int | None = None
    seconds: float | None = None


@dataclass(kw_only=True)
class Fuzzer:
    """A kernel, and what is known of it."""

    kernel: Kernel
    device: str
    seed: int
    limits: Limits
    send: Send
    claim: Callable[[Reason], bool] = lambda reason: True
    """Whether a new reason is this process's to shrink, and no other's."""
    alone: Alone = lambda case: None
    judge: Judge | None = None
    known: set[Reason] = field(default_factory=set)
    _before: deque[Case] = field(default_factory=lambda: deque(maxlen=BEFORE))
    _drawn: set[Case] = field(default_factory=set)
    _count: int = 0

    def run(self) -> None:
        """Draw and judge until a limit is reached."""
        self._end = None if self.limits.seconds is None else _now() + self.limits.seconds
        draw(cases(self.kernel, self.device), self.seed, self._take)

    def replay(self, paths: Iterable[Path]) -> None:
        """Judge entries of the corpus as they failed, and say of each what became of it.

        What an entry fails for is known from then on and not reported once more.
        """
        for path in paths:
            event: dict[str, Any] = {"kind": "replayed", "path": str(path), "broken": ""}
            try:
                self.send(event | self._replay(load(path)))
            except ParityError as error:
                self.send(event | {"broken": str(error)})

    def _replay(self, entry: Entry) -> dict[str, Any]:
        reason = skip_of(self.kernel, entry.case, self.device)
        if reason is not None:
            raise ParityError(f"{entry.path} cannot be tried here: {reason}")
        for case in entry.failure.after:
            self._judged(case)
        failures = self._judged(entry.case)
        self.known |= {failure.reason for failure in failures}
        failure = same(entry.failure.reason, failures) or next(iter(failures), None)
        if failure is not None:
            failure = replace(failure, after=entry.failure.after)
        return {"case": entry.case.id, "failure": failure and failure.to_json()}

    def _take(self, case: Case) -> None:
        over = self._end is not None and _now() >= self._end
        if over or (self.limits.cases is not None and self._count >= self.limits.cases):
            raise Enough
        if case in self._drawn:
            return
        self._drawn.add(case)
        if skip_of(self.kernel, case, self.device) is not None:
            self.send({"kind": "skipped"})
            return
        self._count += 1
        before = tuple(self._before)
        failures = self._judged(case)
        self.send({"kind": "judged", "red": bool(failures)})
        for failure in failures:
            if failure.reason not in self.known:
                self.known.add(failure.reason)
                if self.claim(failure.reason):
                    self._new(failure, before)

    def _judged(self, case: Case) -> tuple[Failure, ...]:
        cost = self.kernel.cost(case)
        self.send({"kind": "case", "case": case.id, "seed": case.seed, "cost": cost})
        self._before.append(case)
        return self.judge(case) if self.judge else judge(self.kernel, case, self.device)

    def _new(self, failure: Failure, before: tuple[Case, ...]) -> None:
        """Shrink a failure for a reason that was not seen before, and say it."""
        self._say(failure, failure, 0, final=False)
        again = same(failure.reason, self._judged(failure.case))
        if again is None:
            self._say(replace(failure, after=before), failure, 0)
            return
        steps = Shrinking(
            failure,
            self.kernel.stage.sizes,
            self._judged,
            lambda case: skip_of(self.kernel, case, self.device) is None,
            known=self.known,
            better=lambda found: self._say(found, failure, steps.cases, final=False),
        )
        small = steps.run()
        self.known.add(small.reason)
        if self.alone(small.case) is False:
            self._say(replace(failure, after=before), failure, steps.cases)
        else:
            self._say(small, failure, steps.cases)

    def _say(self, failure: Failure, first: Failure, steps: int, *, final: bool = True) -> None:
        self.send(
            {
                "kind": "failure", "final": final, "failure": failure.to_json(),
                "first": first.case.id, "drawn": self._count, "steps": steps,
            }
        )  # fmt: skip


def _now() -> float:
    return time.monotonic()
