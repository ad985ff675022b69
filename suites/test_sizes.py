"""Every kernel at every size that heuristics choose by: rows, experts and choices, widths."""

from __future__ import annotations

import pytest
from hypothesis import settings

from moe_parity.harness.cases.grid import each
from moe_parity.harness.checks.expect import Recorder, expect_sizes
from moe_parity.kernels import Kernel
from moe_parity.references.stages import STAGES


@pytest.mark.parametrize("kernel", [one for stage in STAGES.values() for one in each(stage)])
def test_every_size(
    kernel: Kernel, parity_device: str, parity_recorder: Recorder, parity_seed: int
):
    """One size changed at a time, through every bucket that the budget has room for."""
    drawn = settings().max_examples
    expect_sizes(kernel, parity_device, parity_recorder, drawn=drawn, seed=parity_seed)
