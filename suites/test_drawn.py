"""Every kernel on drawn cases: any words that its stage reads, any sizes that a case can cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_parity.harness.cases.grid import each
from moe_parity.harness.cases.strategies import cases, formats
from moe_parity.harness.checks.expect import Recorder, expect, needs
from moe_parity.kernels import Kernel
from moe_parity.references.language import Case
from moe_parity.references.stages import STAGES

KERNELS = [parameter for stage in STAGES.values() for parameter in each(stage)]


@pytest.mark.parametrize("kernel", KERNELS)
@given(data=st.data())
def test_drawn(kernel: Kernel, data: st.DataObject, parity_device: str, parity_recorder: Recorder):
    """Formats, widths, experts, ranks, routings, tokens, values and hazards, all at once."""
    needs(kernel, next(iter(formats(kernel, parity_device)), Case()), parity_device)
    case = data.draw(cases(kernel, parity_device), label="case")
    expect(kernel, case, parity_device, parity_recorder)
