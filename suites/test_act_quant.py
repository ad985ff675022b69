"""Stage ``act_quant``: every kernel, format, layout and input type, bit for bit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_parity.harness.cases.grid import quant_params
from moe_parity.harness.cases.strategies import quant_cases
from moe_parity.harness.expect import Recorder, expect
from moe_parity.harness.inputs import aimed_rows
from moe_parity.harness.session import environment
from moe_parity.kernels import Kernel
from moe_parity.references.language import Case, Hazard, InputDtype, Stage, Values

STAGE = Stage.ACT_QUANT
# The whole pool on a GPU, a quarter of its groups on a CPU.
AIMED = Case(m=aimed_rows(512, 1 if environment.gpu() else 4), h=512, values=Values.AIMED)
NOT_CONTIGUOUS = (Hazard.STRIDED, Hazard.TRANSPOSED)
EVERY = Case(m=128, h=512, values=Values.EVERY_BF16)


@pytest.mark.parametrize(("kernel", "case"), quant_params(STAGE, AIMED, layouts=False))
def test_aimed(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """The aimed inputs of every decision; the record counts the outputs that could be red."""
    expect(kernel, case, parity_device, parity_recorder, power=True)


@pytest.mark.parametrize(
    ("kernel", "case"), quant_params(STAGE, EVERY, dtypes=[InputDtype.BF16], layouts=False)
)
def test_every_bf16(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """All 2^16 BF16 values, a group for each sign and exponent."""
    expect(kernel, case, parity_device, parity_recorder, power=True)


@pytest.mark.parametrize(("kernel", "base"), quant_params(STAGE, Case(h=512)))
@given(data=st.data())
def test_drawn(
    kernel: Kernel, base: Case, data: st.DataObject, parity_device: str, parity_recorder: Recorder
):
    """Drawn shapes, groups, values and hazards."""
    reason = kernel.why_not(base, parity_device)
    if reason:
        pytest.skip(f"{kernel.name}: {reason}")
    case = data.draw(quant_cases(base, STAGE).filter(_supported(kernel, parity_device)))
    expect(kernel, case, parity_device, parity_recorder)


def _supported(kernel: Kernel, device: str):
    return lambda case: not kernel.supports(case, device)


BROKEN_UP = [Case(m=33, h=512, values=Values.WIDE, hazard=h) for h in NOT_CONTIGUOUS]
SIZED = [Case(m=m, h=h, values=Values.WIDE) for m in (0, 1, 7, 4096) for h in (128, 512, 7168)]


@pytest.mark.parametrize(
    ("kernel", "case"),
    quant_params(STAGE, *BROKEN_UP, dtypes=[InputDtype.BF16], layouts=False),
)
def test_not_contiguous(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """Input with gaps of NaN, and transposed input, is refused or quantized right."""
    expect(kernel, case, parity_device, parity_recorder)


@pytest.mark.parametrize(("kernel", "case"), quant_params(STAGE, *SIZED, dtypes=[InputDtype.BF16]))
def test_shapes(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """From no token to 4096, from one group to the hidden size of DeepSeek-V3."""
    expect(kernel, case, parity_device, parity_recorder)
