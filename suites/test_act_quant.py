"""Stage ``act_quant``: every kernel, format, layout and input type, bit for bit."""

from __future__ import annotations

import pytest

from moe_parity.harness.cases.grid import formats, params
from moe_parity.harness.checks.expect import Recorder, expect
from moe_parity.harness.session import environment
from moe_parity.kernels import Kernel, find
from moe_parity.references.language import Case, Hazard, InputDtype, ScaleLayout, Values
from moe_parity.references.stages import ACT_QUANT
from moe_parity.references.stages.quant.inputs import aimed_rows

ROW = (ScaleLayout.ROW,)
BF16 = (InputDtype.BF16,)
# The whole pool on a GPU, a quarter of its groups on a CPU.
AIMED = Case(m=aimed_rows(512, 1 if environment.gpu() else 4), h=512, values=Values.AIMED)
EVERY = Case(m=128, h=512, values=Values.EVERY_BF16)
BROKEN_UP = [
    Case(m=33, h=512, values=Values.WIDE, hazard=hazard)
    for hazard in (Hazard.STRIDED, Hazard.TRANSPOSED)
]
SIZED = [Case(m=m, h=h, values=Values.WIDE) for m in (0, 1, 7) for h in (128, 512, 7168)]
SIZED += [Case(m=4096, h=h, values=Values.WIDE) for h in (128, 512)]
TALL = Case(m=2048 if environment.gpu() is None else 4096, h=7168, values=Values.WIDE)


def grid(*bases: Case, **chosen):
    return params(ACT_QUANT, formats(ACT_QUANT, *bases, **chosen))


@pytest.mark.parametrize(("kernel", "case"), grid(AIMED, layouts=ROW))
def test_aimed(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """The aimed inputs of every decision; the record counts the outputs that could be red."""
    expect(kernel, case, parity_device, parity_recorder, power=True)


@pytest.mark.parametrize(("kernel", "case"), grid(EVERY, dtypes=BF16, layouts=ROW))
def test_every_bf16(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """All 2^16 BF16 values, a group for each sign and exponent."""
    expect(kernel, case, parity_device, parity_recorder, power=True)


@pytest.mark.parametrize(("kernel", "case"), grid(*BROKEN_UP, dtypes=BF16, layouts=ROW))
def test_not_contiguous(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """Input with gaps, and transposed input, is refused or quantized right."""
    expect(kernel, case, parity_device, parity_recorder)


@pytest.mark.parametrize(("kernel", "case"), grid(*SIZED, dtypes=BF16))
def test_shapes(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """From no token to 4096, from one group to the hidden size of DeepSeek-V3."""
    expect(kernel, case, parity_device, parity_recorder)


@pytest.mark.parametrize(("kernel", "case"), params(ACT_QUANT, [TALL]))
def test_a_large_batch(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """Thousands of tokens of the hidden size of DeepSeek-V3, in one format."""
    expect(kernel, case, parity_device, parity_recorder)


def test_our_quantizer_of_activations_declines_what_it_cannot_do():
    """A kernel that declined more would leave every grid, and nobody would see it."""
    kernel = find("ours_act_quant")
    for group, h in ((64, 64), (64, 192), (128, 128), (128, 7168)):
        assert kernel.declines(Case(group=group, h=h), "cpu") is None
    for group, h, sentence in (
        (32, 128, "the group must be 64 or 128, not 32."),
        (128, 192, "act_quant has whole groups: H = 192 is not a multiple of 128."),
    ):
        assert str(kernel.declines(Case(group=group, h=h), "cpu")) == sentence
