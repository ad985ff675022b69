"""Run every check of a layer kernel on a case, record the verdicts, raise where one is red."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from moe_parity.harness.checks.layer import check_layer
from moe_parity.harness.expect import Recorder, digest, record_all, repro
from moe_parity.harness.layer_inputs import LayerInputs
from moe_parity.harness.verdict import Verdict
from moe_parity.kernels import Kernel
from moe_parity.references.language import Case

CPU_PROGRAMS = 3000
"""Programs times blocks of K that one layer may cost on a CPU, some three milliseconds each."""


def cost(case: Case, block: int = 16) -> int:
    """Return the programs times K blocks that a layer costs on the virtual GPU."""
    pairs = case.m * case.k // case.ep_size
    hit = min(pairs, case.e)
    blocks = hit + max(pairs - hit, 0) // block
    first = (2 * case.i // 64) * (case.h // 128)
    return blocks * (first + (case.h // 64) * (case.i // 128))


def skip_reason(kernel: Kernel, case: Case, device: str) -> str | None:
    """Return why a layer case does not run here, or None."""
    reason = kernel.why_not(case, device)
    if reason is None and device == "cpu" and cost(case) > CPU_PROGRAMS:
        reason = f"{cost(case)} programs and K blocks are over the CPU's budget of {CPU_PROGRAMS}"
    return reason and f"{kernel.name}: {reason}"


def fields(
    kernel: Kernel, case: Case, device: str, verdict: Verdict, seconds: float
) -> dict[str, Any]:
    """Return a verdict as the fields of a record."""
    stage = str(verdict.check).removeprefix("exact_")
    return verdict.fields() | {
        "kernel": kernel.name,
        "stage": stage if str(verdict.check).startswith("exact_") else "layer",
        "scale": case.scale.value,
        "clamp": case.clamp,
        "ep": f"{case.ep_rank}of{case.ep_size}" if case.ep_size > 1 else "",
        "dtype": case.dtype.value,
        "shape": f"m{case.m}-e{case.e}-k{case.k}-h{case.h}-i{case.i}",
        "device": kernel.runs_on(device),
        "bound": "exact",
        "repro": repro(kernel, case) if verdict.verdict == "fail" else "",
        "seconds": seconds,
        "sources": {kernel.source.name: digest(kernel.source)},
    }


def expect_layer(
    kernel: Kernel,
    case: Case,
    device: str,
    recorder: Recorder,
    *,
    power: bool = False,
    inputs: LayerInputs | None = None,
) -> None:
    """Run the checks of a layer case; skip with a reason, or fail with the first red one."""
    __tracebackhide__ = True
    reason = skip_reason(kernel, case, device)
    if reason is not None:
        pytest.skip(reason)
    verdicts = check_layer(kernel, case, device, power=power, inputs=inputs)
    record_all(verdicts, partial(fields, kernel, case, device), recorder, repro(kernel, case))
