"""What a fuzz run has found so far: counted, said once, kept in the corpus."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_parity.harness.checks.expect import repro
from moe_parity.harness.fuzz import corpus
from moe_parity.harness.fuzz.reason import Failure, Reason, from_json
from moe_parity.kernels import Kernel
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case
from moe_parity.reports.records import count


@dataclass(kw_only=True)
class Telling:
    """Hears the events of all processes of a run."""

    kernel: Kernel
    folder: Path
    say: Callable[[str], None]
    judged: int = 0
    calls: int = 0
    red: int = 0
    largest: tuple[int, str] = (0, "")
    found: dict[Reason, Failure] = field(default_factory=dict)
    replayed: dict[str, Failure] = field(default_factory=dict)
    """Entries of the corpus that still fail, by their files."""
    unkept: str = ""
    _open: dict[Reason, Mapping[str, Any]] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)

    def hear(self, event: Mapping[str, Any]) -> None:
        """Take in an event."""
        kind = event["kind"]
        if kind == "case":
            self.calls += 1
            self.largest = max(self.largest, (event["cost"], event["case"]))
        elif kind == "judged":
            self.judged += 1
            self.red += event["red"]
        elif kind == "replayed":
            self._replayed(event)
        elif kind == "failure":
            failure = from_json(event["failure"])
            self._open[failure.reason] = event
            if event["final"]:
                self.close(failure.reason)

    def close(self, reason: Reason | None = None) -> None:
        """Say and keep a failure as small as it is, or all that were being shrunk."""
        for known in [reason] if reason else list(self._open):
            event = self._open.pop(known)
            failure = from_json(event["failure"])
            if known not in self.found:
                self.found[known] = failure
                self._tell(failure, event)

    def crashed(self, case: Case, sentence: str) -> None:
        """Take in that a process died on a case."""
        hung = "longer than the limit" in sentence
        reason = Reason("exact", self.kernel.stage.name, "timeout" if hung else "crash")
        failure = Failure(case=case, reason=reason, sentence=f"{sentence}.")
        self.red += 1
        if reason not in self.found:
            self.found[reason] = failure
            self._tell(failure, {"first": case.id, "drawn": self.judged + 1, "steps": 0})

    def _tell(self, failure: Failure, event: Mapping[str, Any]) -> None:
        name = f"{self.kernel.name}-{failure.case.id}"
        lines = [f"✗ {self._sentence(failure)}"]
        shrunk = ""
        if event["first"] != failure.case.id:
            tries = f"in {event['steps']} more" if event["steps"] else "so far"
            shrunk = f", made small from {event['first']} {tries}"
        seed = f"seed {failure.case.seed}, case {event['drawn']} that was drawn{shrunk}"
        lines += [f"  {name}", f"  {seed}", f"  {repro(self.kernel, failure.case)}"]
        try:
            lines.append(f"  kept in {corpus.save(self.folder, self.kernel.name, failure)}")
        except ParityError as error:
            if not self.unkept:
                self.unkept = f"nothing that was found is kept: {error}"
                lines.append(f"! {self.unkept}")
        self.say("\n".join(lines))

    def _sentence(self, failure: Failure) -> str:
        if not failure.after:
            return failure.sentence
        before = ", ".join(f"{case.id} (seed {case.seed})" for case in failure.after)
        return (
            f"{self.kernel.name} fails only after other calls: {failure.case.id} passes when it is "
            f"called alone. Before it came {before}. {failure.sentence}"
        )

    def _replayed(self, event: Mapping[str, Any]) -> None:
        """Say what became of an entry of the corpus."""
        path = event["path"]
        if event["broken"]:
            self.say(f"! {event['broken']}")
        elif event["failure"] is None:
            self.say(f"✓ {path}: {self.kernel.name}-{event['case']} passes now; the file stays.")
        else:
            failure = from_json(event["failure"])
            self.replayed[path] = failure
            line = repro(self.kernel, failure.case)
            self.say(f"✗ {self._sentence(failure)}\n  still fails: {path}\n  {line}")

    @property
    def progress(self) -> str:
        """How far the run has come, in a line."""
        seconds = time.monotonic() - self._began
        rate = self.calls / seconds if seconds else 0.0
        largest = f", largest {self.largest[1]}" if self.largest[1] else ""
        busy = f", making {count(len(self._open), 'failure')} small" if self._open else ""
        return (
            f"{seconds:.0f} s: {count(self.judged, 'case')}, {self.red:,} red, "
            f"{rate:.1f} calls/s{largest}{busy}"
        )
