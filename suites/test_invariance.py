"""Every kernel on the same rows in other batches: a row's bits are its own."""

from __future__ import annotations

import pytest

from moe_parity.harness.cases.grid import each
from moe_parity.harness.checks.expect import Recorder, expect_calls
from moe_parity.kernels import Kernel
from moe_parity.references.language import Check
from moe_parity.references.stages import STAGES


@pytest.mark.parametrize("kernel", [one for stage in STAGES.values() for one in each(stage)])
def test_a_row_in_any_batch(
    kernel: Kernel, parity_device: str, parity_recorder: Recorder, parity_seed: int
):
    """Alone, at the start, in the middle and at the end, reversed, copied, beside NaN."""
    expect_calls(kernel, Check.INVARIANCE, parity_device, parity_recorder, seed=parity_seed)
