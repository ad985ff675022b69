"""Replay as a contract, for every kernel: captured once, called again on other inputs.

On a GPU (``--parity-device cuda``) the capture is a CUDA graph; on a CPU the recorded ops and
launches, with the host's scalars as they were, stand for one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
from _pytest.mark import ParameterSet

from moe_parity.harness.cases.grid import param
from moe_parity.harness.cases.small import small_case
from moe_parity.harness.checks.expect import Recorder, needs, record, repro
from moe_parity.harness.checks.promises import no_recompile, no_sync
from moe_parity.harness.checks.replay import replay
from moe_parity.harness.checks.verdict import Verdict
from moe_parity.harness.session.skips import skip_test
from moe_parity.harness.session.watch import current
from moe_parity.kernels import Kernel, all_kernels
from moe_parity.references.language import Case, Check, Skip, Why
from moe_parity.references.stages import LAYER


def every() -> Iterator[ParameterSet]:
    """Yield every kernel with a small case that it takes."""
    for kernel in all_kernels():
        case = small_case(kernel, "cpu") or small_case(kernel, "cuda")
        if case is not None:
            yield param(kernel, case)


EVERY = list(every())
SERVED = Case(m=8, e=32, k=4, h=512, i=256, ep_rank=1, ep_size=2)
"""What a GPU is asked besides; too many programs for a CPU."""
LAYERS = [param(kernel, SERVED) for kernel in all_kernels(LAYER)]


Look = Callable[[Kernel, Case, str], Verdict]


def told(
    kernel: Kernel, case: Case, device: str, recorder: Recorder, look: Look, *, seed: int
) -> None:
    """Record what is found on a case with that base seed; a skip says why."""
    case = dataclasses.replace(case, seed=seed)
    needs(kernel, case, device)
    current().case(f"{kernel.name}-{case.id}", repro(kernel, case))
    verdict = look(kernel, case, device)
    record(kernel, case, device, [verdict], recorder)
    if verdict.verdict == "skip":
        skip_test(Skip(Why.UNSUPPORTED, verdict.reason))


@pytest.mark.untouched
@pytest.mark.parametrize(("kernel", "case"), [*EVERY, *LAYERS])
def test_a_captured_call_replays(
    kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder, parity_seed: int
):
    if Check.REPLAY not in kernel.contract.checks:
        skip_test(Skip(Why.UNSUPPORTED, f"{kernel.name}: its contract leaves replay out."))
    told(kernel, case, parity_device, parity_recorder, replay, seed=parity_seed)


@pytest.mark.parametrize(("kernel", "case"), EVERY)
def test_a_call_does_not_wait(
    kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder, parity_seed: int
):
    told(kernel, case, parity_device, parity_recorder, no_sync, seed=parity_seed)


@pytest.mark.parametrize(("kernel", "case"), EVERY)
def test_serving_compiles_nothing(
    kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder, parity_seed: int
):
    told(kernel, case, parity_device, parity_recorder, no_recompile, seed=parity_seed)
