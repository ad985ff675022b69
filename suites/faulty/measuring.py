"""Hold planted kernels to the default check, suite by suite, until one says why it is red."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from moe_parity.harness.cases.small import small_case
from moe_parity.harness.checks.expect import expect_calls
from moe_parity.harness.checks.flow import check
from moe_parity.harness.checks.replay import replay
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

    def see(self, fault: Fault, suite: str, cause: str, others: tuple[str, ...]) -> bool:
        """Note a red verdict; return whether it says why."""
        self.suite = self.suite or suite
        if cause and cause not in self.causes:
            self.causes.append(cause)
        said = fault.named((cause, *others))
        self.named = self.named or said
        return said

    def take(self, fault: Fault, suite: str, cause: str, others: tuple[str, ...]) -> None:
        """Take a red verdict; raise Named where it says why."""
        if self.see(fault, suite, cause, others):
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
    cases, same = profiles.PROFILES["ci" if seed is None else "dev"]
    inner: Any = test_drawn.test_drawn.hypothesis.inner_test
    # the test itself, whose source is the seed of ci, with settings of its own: nothing shrinks
    test: Any = settings(
        max_examples=profiles.CHOSEN * cases, derandomize=same, phases=[Phase.generate],
        database=None, deadline=None, suppress_health_check=list(HealthCheck),
    )(given(data=st.data())(inner))  # fmt: skip
    if seed is not None:
        hypothesis.seed(seed)(test)

    def look(kernel: Kernel, case: Case, device: str, recorder: Any) -> None:
        found.cases += 1
        for verdict in check(kernel, case, device):
            if verdict.failed:
                found.take(fault, "test_drawn", verdict.cause, verdict.alternatives)
                break  # others of the call say the same

    kept, test_drawn.expect = test_drawn.expect, look
    try:
        test(kernel=fault.kernel, parity_device="cpu", parity_recorder=None)
    finally:
        test_drawn.expect = kept


def _several(fault: Fault, found: Found, name: Check) -> None:
    recorder = _Recorder(fault, found, f"test_{name}")
    with contextlib.suppress(AssertionError, pytest.skip.Exception):
        expect_calls(fault.kernel, name, "cpu", recorder)


def _replayed(fault: Fault, found: Found) -> None:
    case = small_case(fault.kernel, "cpu")
    verdict = None if case is None else replay(fault.kernel, case, "cpu")
    if verdict is not None and verdict.failed:
        found.take(fault, "test_replay", verdict.cause, verdict.alternatives)


def measured(fault: Fault, seed: int | None = None, *, drawn_only: bool = False) -> Found:
    """Return what the suites say of a fault: drawn cases, then replays, calls and batches.

    What is kept between calls is asked for first in the suites that are about it.
    """
    found = Found()
    suites: list[Callable[[], None]] = [lambda: drawn(fault, found, seed)]
    if not drawn_only:
        several: list[Callable[[], None]] = [
            lambda: _replayed(fault, found),
            lambda: _several(fault, found, Check.SEQUENCE),
            lambda: _several(fault, found, Check.INVARIANCE),
        ]
        keeps = {"sequence", "replay"} & set(fault.kinds)
        suites = several + suites if keeps else suites + several
    try:
        for suite in suites:
            suite()
    except Named:
        pass
    return found
