"""The flow of checks in a test: every verdict recorded, a skip with its reason, red raised."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from moe_parity.harness.cases.budget import skip_of
from moe_parity.harness.cases.grid import labels
from moe_parity.harness.checks.flow import check, overran
from moe_parity.harness.checks.verdict import Verdict
from moe_parity.harness.session.skips import skip_test
from moe_parity.harness.session.watch import Overrun, current
from moe_parity.kernels import Kernel
from moe_parity.kernels.registry import builtin
from moe_parity.references.language import Case


class Recorder(Protocol):
    """What takes the fields of a record."""

    def add(self, record_fields: Mapping[str, Any]) -> None:
        """Add what a check found."""


def needs(kernel: Kernel, case: Case, device: str) -> None:
    """Skip the running test where a case does not run here."""
    reason = skip_of(kernel, case, device)
    if reason is not None:
        skip_test(reason)


def expect(
    kernel: Kernel,
    case: Case,
    device: str,
    recorder: Recorder,
    *,
    power: bool = False,
    inputs: Any = None,
) -> None:
    """Run a kernel's contract on a case; skip with a reason, or fail with the first red check.

    ``power`` also measures how many outputs could have been red.
    """
    __tracebackhide__ = True
    needs(kernel, case, device)
    current().case(f"{kernel.name}-{case.id}", repro(kernel, case))
    verdicts = check(kernel, case, device, power=power, inputs=inputs)
    record(kernel, case, device, verdicts, recorder)


def record(
    kernel: Kernel, case: Case, device: str, verdicts: Iterable[Verdict], recorder: Recorder
) -> None:
    """Record verdicts with the seconds each took; raise AssertionError with the first red one."""
    __tracebackhide__ = True
    failed = []
    start = time.perf_counter()
    try:
        for verdict in verdicts:
            now = time.perf_counter()
            recorder.add(fields(kernel, case, device, verdict, now - start))
            start = now
            if verdict.failed:
                failed.append(verdict.message)
    except Overrun as error:
        verdict = overran(kernel, case, current().seconds, error)
        recorder.add(fields(kernel, case, device, verdict, time.perf_counter() - start))
        raise Overrun(f"{verdict.message} Reproduce: {repro(kernel, case)}") from None
    if failed:
        raise AssertionError(f"{failed[0]} Reproduce: {repro(kernel, case)}")


def claim(recorder: Recorder, name: str, fault: str = "", **about: Any) -> None:
    """Record a check that is not about one kernel on one case; raise AssertionError on a fault.

    ``about`` are further fields of the record.
    """
    __tracebackhide__ = True
    about.setdefault("bound", "exact")
    recorder.add({"check": name, "verdict": "fail" if fault else "pass", "message": fault, **about})
    assert not fault, fault


def repro(kernel: Kernel, case: Case) -> str:
    """Return the command that runs this case again; it loads a kernel's own file first."""
    file = "" if builtin(kernel) else f" --kernel {kernel.source}"
    return f"parity repro '{kernel.name}-{case.id}' --seed {case.seed}{file}"


@lru_cache(maxsize=64)
def digest(path: Path) -> str:
    """Return twelve digits of the SHA-256 of a file, or of all of the package that it is in."""
    total = hashlib.sha256()
    inside = (path.parent / "__init__.py").exists()
    for source in sorted(path.parent.glob("*.py")) if inside else [path]:
        total.update(source.read_bytes())
    return total.hexdigest()[:12]


def fields(
    kernel: Kernel, case: Case, device: str, verdict: Verdict, seconds: float = 0.0
) -> dict[str, Any]:
    """Return a verdict as the fields of a record."""
    told = verdict.fields()
    stage = told.pop("stage") or kernel.stage.name
    return (
        told
        | labels(kernel, case)
        | {
            "stage": stage,
            "shape": kernel.stage.size_words(case),
            "device": kernel.runs_on(device),
            "bound": "exact",
            "poison": True,
            "contract": kernel.contract.words,
            "repro": repro(kernel, case) if verdict.failed else "",
            "seconds": seconds,
            "sources": {kernel.source.name: digest(kernel.source)},
        }
    )
