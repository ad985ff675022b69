"""Every kernel in every configuration: whichever is the fastest, its bits are those of a recipe."""

from __future__ import annotations

import pytest

from moe_parity.harness.cases.grid import each
from moe_parity.harness.checks.expect import Recorder, expect_configs
from moe_parity.kernels import Kernel
from moe_parity.references.stages import STAGES


@pytest.mark.parametrize("kernel", [one for stage in STAGES.values() for one in each(stage)])
def test_every_configuration(
    kernel: Kernel, parity_device: str, parity_recorder: Recorder, parity_seed: int
):
    """Those that it registered, and those of the autotuners that it launches."""
    expect_configs(kernel, parity_device, parity_recorder, seed=parity_seed)
