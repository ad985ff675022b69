"""A kernel on captured tensors in a test: judged, recorded, and made small where it is red."""

from __future__ import annotations

import time
from typing import Any

from moe_parity.harness.captured.feed import Declined, fed
from moe_parity.harness.captured.file import Captured
from moe_parity.harness.captured.shrink import kept_small, line, made_small
from moe_parity.harness.cases.budget import CPU_COST, skip_of
from moe_parity.harness.checks.expect import Recorder, fields
from moe_parity.harness.checks.flow import check, first_line, overran
from moe_parity.harness.checks.verdict import Verdict
from moe_parity.harness.session import environment
from moe_parity.harness.session.skips import skip_test
from moe_parity.harness.session.watch import Overrun, current
from moe_parity.kernels import Kernel
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Skip, Why

SECONDS_EACH = 0.03
"""Seconds of the virtual GPU for a program and a block of K, in all calls of a contract."""


def expect_captured(
    kernel: Kernel, captured: Captured, device: str, recorder: Recorder, *, alone: bool = True
) -> None:
    """Run a kernel's contract on captured tensors; skip with a reason, or fail with the first red.

    ``alone`` says that no other kernel of the run takes them.  What fails is made small and written
    beside the capture.
    """
    __tracebackhide__ = True
    reason = kernel.unavailable()
    if reason is not None:
        skip_test(reason)
    try:
        case, inputs = fed(captured, kernel, device)
    except Declined as error:
        skip_test(Skip(error.why, str(error)))
    reason = skip_of(kernel, case, device)
    if reason is not None and reason.why is not Why.BUDGET:
        skip_test(reason)
    # what is over the budget was asked for all the same, where it may take so long
    needed, limit = SECONDS_EACH * kernel.cost(case), current().seconds
    if reason is not None and limit and needed > limit:
        skip_test(
            Skip(
                Why.BUDGET,
                f"{kernel.name}: {case.id} may take the virtual GPU {needed:.0f} s, and the limit "
                f"is {limit:g} s: pass --timeout {2 * needed:.0f}, or capture fewer rows.",
            )
        )
    own = line(kernel, captured.path)
    current().case(f"{kernel.name}-{case.id}", own)
    judged = _judged(kernel, case, device, inputs)
    red = next((verdict for verdict, _ in judged if verdict.failed), None)
    said = ""
    if red is not None and red.cause != "timeout":
        own, said = _small(kernel, captured, device, red, own, alone)
    for verdict, seconds in judged:
        told = {"repro": own} if verdict.failed else {}
        recorder.add(fields(kernel, case, device, verdict, seconds) | told)
    if red is not None:
        words = (red.message, captured.rows_said, said, f"Reproduce: {own}")
        raise AssertionError(" ".join(word for word in words if word))


def _judged(kernel: Kernel, case: Case, device: str, inputs: Any) -> list[tuple[Verdict, float]]:
    """Return the verdicts with the seconds that each took; one that overran is the last."""
    power = kernel.cost(case) <= CPU_COST or device != "cpu"
    found: list[tuple[Verdict, float]] = []
    start = time.perf_counter()
    try:
        for verdict in check(kernel, case, device, inputs=inputs, power=power):
            now = time.perf_counter()
            found.append((verdict, now - start))
            start = now
    except Overrun as error:
        verdict = overran(kernel, case, current().seconds, error)
        found.append((verdict, time.perf_counter() - start))
    return found


def _small(
    kernel: Kernel, captured: Captured, device: str, red: Verdict, own: str, alone: bool
) -> tuple[str, str]:
    """Make a failure small; return the line that reproduces it, and what became of it."""
    if environment.gpu_lost():
        return own, ""
    try:
        small = made_small(captured, red, kernel, device)
        path = kept_small(small, captured, kernel, alone)
    except ParityError as error:
        return own, f"The smaller capture is not kept: {error}"
    except Exception as error:  # what was found must be told all the same
        return own, f"It could not be made small: {type(error).__name__}: {first_line(error)}."
    if path == captured.path:
        return own, ""
    return line(kernel, path), f"Made small to {small.case.id}."
