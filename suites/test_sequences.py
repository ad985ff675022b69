"""Every kernel called again and again: the calls before a call, and after it, change nothing."""

from __future__ import annotations

import pytest

from moe_parity.harness.cases.grid import each
from moe_parity.harness.checks.expect import Recorder, expect_calls
from moe_parity.kernels import Kernel
from moe_parity.references.language import Check
from moe_parity.references.stages import STAGES


@pytest.mark.parametrize("kernel", [one for stage in STAGES.values() for one in each(stage)])
def test_calls_after_calls(
    kernel: Kernel, parity_device: str, parity_recorder: Recorder, parity_seed: int
):
    """One word changed and changed back, the rows up and down, the first call probed again."""
    expect_calls(kernel, Check.SEQUENCE, parity_device, parity_recorder, seed=parity_seed)
