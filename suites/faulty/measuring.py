"""Hold planted kernels to the default check, suite by suite, until one says why it is red."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, settings

from moe_parity.harness.cases.small import small_case
from moe_parity.harness.checks.expect import expect_calls
from moe_parity.harness.checks.flow import check
from moe_parity.harness.checks.replay import replay
from moe_parity.harness.checks.verdict import Verdict
from moe_parity.harness.session import profiles
from moe_parity.kernels import Kernel
from moe_parity.references.language import Case, Check
from moe_parity.suites import test_drawn
from moe_parity.suites.faulty.planting import Fault


class Named(BaseException):
    """The cause was named: no more cases.  hypothesis hands on what is not an Exception."""


@dataclass
class Found:
    """What the suites said of one fault."""

    suite: str = ""
    """The first that was red."""
    named: bool = False
    causes: list[str] = field(default_factory=list)
    """Causes of red verdicts, in the order seen."""
    cases: int = 0

    @property
    def red(self) -> bool:
        """Whether one was red."""
        return bool(self.suite)

    def take(self, fault: Fault, suite: str, cause: str, others: tuple[str, ...]) -> None:
        """Take a red verdict; raise Named where it says why."""
        self.suite = self.suite or suite
        if cause and cause not in self.causes:
            self.causes.append(cause)
        if fault.named((cause, *others)):
            self.named = True
            raise Named


class _Recorder:
    def __init__(self, fault: Fault, found: Found, suite: str) -> None:
        self.fault, self.found, self.suite = fault, found, suite

    def add(self, record_fields: Mapping[str, Any]) -> None:
        """Take a record."""
        if record_fields["verdict"] == "fail":
            cause, others = record_fields["cause"], record_fields["alternatives"]
            self.found.take(self.fault, self.suite, cause, tuple(others))


def drawn(fault: Fault, found: Found, seed: int | None) -> None:
    """Draw the cases of the default check: those of the profile ci, or of dev with a seed."""
    profiles.activate("ci" if seed is None else "dev", times=profiles.CHOSEN)
    base = settings.get_profile("ci" if seed is None else "dev")
    test: Any = test_drawn.test_drawn
    test._hypothesis_internal_use_settings = settings(
        base, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck)
    )
    test._hypothesis_internal_use_seed = None
    if seed is not None:
        hypothesis.seed(seed)(test)

    def look(kernel: Kernel, case: Case, device: str, recorder: Any) -> None:
        found.cases += 1
        for verdict in check(kernel, case, device):
            if verdict.failed:
                found.take(fault, "test_drawn", verdict.cause, verdict.alternatives)
                break  # others of the call say the same

    kept, test_drawn.expect = test_drawn.expect, look  # type: ignore[assignment]
    try:
        test(kernel=fault.kernel, parity_device="cpu", parity_recorder=None)
    finally:
        test_drawn.expect = kept


def _several(fault: Fault, found: Found, name: Check) -> None:
    recorder = _Recorder(fault, found, f"test_{name}")
    try:
        expect_calls(fault.kernel, name, "cpu", recorder)
    except Exception as error:
        if not isinstance(error, AssertionError):
            raise


def _replayed(fault: Fault, found: Found) -> Iterator[Verdict]:
    case = small_case(fault.kernel, "cpu")
    if case is not None:
        yield replay(fault.kernel, case, "cpu")


def measured(fault: Fault, seed: int | None = None, *, drawn_only: bool = False) -> Found:
    """Return what the suites say of a fault: drawn cases, then calls, replays and batches."""
    found = Found()
    try:
        drawn(fault, found, seed)
        if not drawn_only:
            for verdict in _replayed(fault, found):
                if verdict.failed:
                    found.take(fault, "test_replay", verdict.cause, verdict.alternatives)
            _several(fault, found, Check.SEQUENCE)
            _several(fault, found, Check.INVARIANCE)
    except Named:
        pass
    return found
