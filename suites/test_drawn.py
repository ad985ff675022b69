"""Every kernel on drawn cases: any words that its stage reads, any sizes that a case can cost."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from moe_parity.harness.cases.grid import each
from moe_parity.harness.cases.strategies import cases, formats
from moe_parity.harness.checks.expect import Recorder, expect, needs
from moe_parity.harness.fuzz.small import made_small
from moe_parity.kernels import Kernel
from moe_parity.references.language import Case
from moe_parity.references.stages import STAGES

PLAIN, TRITON = (
    [p for stage in STAGES.values() for p in each(stage) if p.values[0].triton is triton]
    for triton in (False, True)
)
FEW = 30
"""Cases of a Triton kernel, which a CPU runs slowly: half of a profile, but no fewer."""


SMALL: dict[tuple[str, Case], Case] = {}
"""What red cases became: hypothesis runs the one that it reports again."""
ONCE = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate], report_multiple_bugs=False)
"""Shrinking is ours (``made_small``): it knows what of a case costs, and takes seconds."""


def drawn(kernel: Kernel, data: st.DataObject, device: str, recorder: Recorder):
    needs(kernel, next(iter(formats(kernel, device)), Case()), device)
    case = data.draw(cases(kernel, device), label="case")
    known = kernel.name, case
    try:
        expect(kernel, SMALL.get(known, case), device, recorder)
    except AssertionError:
        if known in SMALL:
            raise
        SMALL[known] = made_small(kernel, case, device)
        # its record is the last one, which speaks
        expect(kernel, SMALL[known], device, recorder)
        raise


@pytest.mark.parametrize("kernel", PLAIN)
@settings(ONCE)
@given(data=st.data())
def test_drawn(kernel: Kernel, data: st.DataObject, parity_device: str, parity_recorder: Recorder):
    """Formats, widths, experts, ranks, routings, tokens, values and hazards, all at once."""
    drawn(kernel, data, parity_device, parity_recorder)


@pytest.mark.parametrize("kernel", TRITON)
@settings(ONCE, max_examples=max(FEW, settings().max_examples // 2))
@given(data=st.data())
def test_drawn_in_triton(
    kernel: Kernel, data: st.DataObject, parity_device: str, parity_recorder: Recorder
):
    """The same of Triton kernels, half as many where there are many."""
    drawn(kernel, data, parity_device, parity_recorder)
