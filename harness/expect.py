"""Run every check of a kernel on a case, record the verdicts, raise where one is red."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import pytest

from moe_parity.harness.checks.quant import check_quant
from moe_parity.harness.verdict import Verdict
from moe_parity.kernels import Kernel
from moe_parity.kernels.registry import builtin
from moe_parity.references.language import Case, Stage

CPU_PROGRAMS = 500
"""Programs of a Triton kernel that one case may cost on a CPU, some ten milliseconds each."""

CPU_OUTPUTS = 1 << 22
"""Outputs of one case on a CPU."""


class Recorder(Protocol):
    """What takes the fields of a record."""

    def add(self, record_fields: Mapping[str, Any]) -> None:
        """Add what a check found."""


def over_budget(kernel: Kernel, case: Case) -> str | None:
    """Return None where a CPU can afford the case, else the reason to skip it."""
    weights = kernel.stage is Stage.WEIGHT_QUANT
    rows, tile = (case.i, 128) if weights else (case.m, 32)
    programs = -(-rows // tile) * -(-case.h // (128 if weights else case.group))
    if kernel.triton and programs > CPU_PROGRAMS:
        return f"{programs} programs are over the CPU's budget of {CPU_PROGRAMS}"
    if rows * case.h > CPU_OUTPUTS:
        return f"{rows * case.h} outputs are over the CPU's budget of {CPU_OUTPUTS}"
    return None


def repro(kernel: Kernel, case: Case) -> str:
    """Return the command that runs this case again; it loads a kernel's own file first."""
    file = "" if builtin(kernel) else f" --kernel {kernel.source}"
    return f"parity repro '{kernel.name}-{case.id}' --seed {case.seed}{file}"


def skip_reason(kernel: Kernel, case: Case, device: str) -> str | None:
    """Return why the case does not run here: support, availability, the CPU's budget."""
    reason = kernel.why_not(case, device)
    if reason is None and device == "cpu":
        reason = over_budget(kernel, case)
    return reason and f"{kernel.name}: {reason}"


@lru_cache(maxsize=64)
def digest(path: Path) -> str:
    """Return twelve digits of the SHA-256 of a file, or of all of the package that it is in."""
    total = hashlib.sha256()
    inside = (path.parent / "__init__.py").exists()
    for source in sorted(path.parent.glob("*.py")) if inside else [path]:
        total.update(source.read_bytes())
    return total.hexdigest()[:12]


def fields(
    kernel: Kernel, case: Case, device: str, verdict: Verdict, seconds: float
) -> dict[str, Any]:
    """Return a verdict as the fields of a record."""
    weights = kernel.stage is Stage.WEIGHT_QUANT
    return verdict.fields() | {
        "kernel": kernel.name,
        "stage": kernel.stage.value,
        "scale": case.scale.value,
        "layout": case.layout.value,
        "dtype": case.dtype.value,
        "shape": f"n{case.i}-k{case.h}" if weights else f"m{case.m}-k{case.h}",
        "device": kernel.runs_on(device),
        "bound": "exact",
        "poison": bool(verdict.check == "write_set"),
        "repro": repro(kernel, case) if verdict.verdict == "fail" else "",
        "seconds": seconds,
        "sources": {kernel.source.name: digest(kernel.source)},
    }


def expect(
    kernel: Kernel, case: Case, device: str, recorder: Recorder, *, power: bool = False
) -> None:
    """Run the kernel's contract on a case; skip with a reason, or fail with the first red check.

    ``power`` also measures how many outputs could have been red.
    """
    __tracebackhide__ = True
    reason = skip_reason(kernel, case, device)
    if reason is not None:
        pytest.skip(reason)
    verdicts = check_quant(kernel, case, device, power=power)
    record_all(verdicts, partial(fields, kernel, case, device), recorder, repro(kernel, case))


def record_all(
    verdicts: Iterable[Verdict],
    as_record: Callable[[Verdict, float], dict[str, Any]],
    recorder: Recorder,
    again: str,
) -> None:
    """Record every verdict with the seconds it took; raise AssertionError with the first red one.

    ``again`` is the command that reproduces it.
    """
    __tracebackhide__ = True
    failed = []
    start = time.perf_counter()
    for verdict in verdicts:
        now = time.perf_counter()
        recorder.add(as_record(verdict, now - start))
        start = now
        if verdict.verdict == "fail":
            failed.append(verdict.message)
    if failed:
        raise AssertionError(f"{failed[0]} Reproduce: {again}")
