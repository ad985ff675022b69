"""Run every check of a middle stage's kernel on a case, record the verdicts, raise on a red one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from moe_parity.harness.checks.stage import check_stage
from moe_parity.harness.expect import Recorder, digest, record_all, repro
from moe_parity.harness.verdict import Verdict
from moe_parity.kernels import Kernel
from moe_parity.references.language import Case, Stage

CPU_PROGRAMS = 3000
"""Programs times blocks of K that a case may cost on the virtual GPU."""


def cost(kernel: Kernel, case: Case) -> int:
    """Return about how many programs, times blocks of K, a call costs on the virtual GPU."""
    pairs = case.m * case.k
    if kernel.stage in (Stage.FC1, Stage.FC2):
        n, k = (2 * case.i, case.h) if kernel.stage is Stage.FC1 else (case.h, case.i)
        return min(pairs, case.e + pairs // 16) * -(-n // 64) * -(-k // 128)
    if kernel.stage in (Stage.SWIGLU, Stage.SWIGLU_QUANT):
        return max(case.m // 4, 1) * -(-case.i // 128)
    return pairs


def skip_reason(kernel: Kernel, case: Case, device: str) -> str | None:
    """Return why a case does not run here, or None."""
    reason = kernel.why_not(case, device)
    if reason is None and device == "cpu" and cost(kernel, case) > CPU_PROGRAMS:
        reason = f"{cost(kernel, case)} programs are over the CPU's budget of {CPU_PROGRAMS}"
    return reason and f"{kernel.name}: {reason}"


def fields(
    kernel: Kernel, case: Case, device: str, verdict: Verdict, seconds: float
) -> dict[str, Any]:
    """Return a verdict as the fields of a record."""
    return verdict.fields() | {
        "kernel": kernel.name,
        "stage": kernel.stage.value,
        "scale": case.scale.value,
        "layout": case.layout.value,
        "clamp": case.clamp,
        "ep": f"{case.ep_rank}of{case.ep_size}" if case.ep_size > 1 else "",
        "shape": f"m{case.m}-e{case.e}-k{case.k}-h{case.h}-i{case.i}",
        "device": kernel.runs_on(device),
        "bound": "exact",
        "poison": True,
        "repro": repro(kernel, case) if verdict.verdict == "fail" else "",
        "seconds": seconds,
        "sources": {kernel.source.name: digest(kernel.source)},
    }


def expect_stage(
    kernel: Kernel, case: Case, device: str, recorder: Recorder, *, power: bool = False
) -> None:
    """Run the checks of a case; skip with a reason, or fail with the first red one."""
    __tracebackhide__ = True
    reason = skip_reason(kernel, case, device)
    if reason is not None:
        pytest.skip(reason)
    verdicts = check_stage(kernel, case, device, power=power)
    record_all(verdicts, partial(fields, kernel, case, device), recorder, repro(kernel, case))
