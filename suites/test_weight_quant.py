"""Stage ``weight_quant``: 128 x 128 tiles, ragged edges, requantization to powers of two."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_parity.harness.cases.grid import quant_params
from moe_parity.harness.cases.strategies import quant_cases
from moe_parity.harness.compare import compare
from moe_parity.harness.expect import Recorder, expect
from moe_parity.harness.inputs import quant_input
from moe_parity.harness.run import one_nan
from moe_parity.harness.session import environment
from moe_parity.kernels import Kernel
from moe_parity.references import quant
from moe_parity.references.language import Case, Hazard, InputDtype, QuantOutput, Stage, Values
from moe_parity.references.language.recipes import OURS

STAGE = Stage.WEIGHT_QUANT
# A tile for each aimed group: 192 of them on a GPU, 48 on a CPU.
AIMED = Case(
    i=2048 if environment.gpu() else 1024, h=1536 if environment.gpu() else 768, values=Values.AIMED
)
BROKEN_UP = [
    Case(i=200, h=300, values=Values.WIDE, hazard=hazard)
    for hazard in (Hazard.STRIDED, Hazard.TRANSPOSED)
]


@pytest.mark.parametrize(("kernel", "case"), quant_params(STAGE, AIMED))
def test_aimed(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """Tiles of one aimed group each; the record counts the outputs that could be red."""
    expect(kernel, case, parity_device, parity_recorder, power=True)


@pytest.mark.parametrize(("kernel", "base"), quant_params(STAGE, Case()))
@given(data=st.data())
def test_drawn(
    kernel: Kernel, base: Case, data: st.DataObject, parity_device: str, parity_recorder: Recorder
):
    """Drawn shapes with ragged edges, values and hazards."""
    expect(kernel, data.draw(quant_cases(base, STAGE)), parity_device, parity_recorder)


@pytest.mark.parametrize(
    ("kernel", "case"), quant_params(STAGE, *BROKEN_UP, dtypes=[InputDtype.BF16])
)
def test_not_contiguous(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """Input with gaps of NaN, and transposed input, is refused or quantized right."""
    expect(kernel, case, parity_device, parity_recorder)


@pytest.mark.parametrize("values", [Values.NORMAL, Values.WIDE, Values.AIMED])
@pytest.mark.parametrize(("n", "k"), [(128, 128), (200, 300), (257, 129)])
def test_requantize(n: int, k: int, values: Values, parity_device: str, parity_recorder: Recorder):
    """Our requantization of E4M3 weights to powers of two equals its reference."""
    ours = pytest.importorskip("moe_parity.kernels.ours.quant", reason="needs Triton")
    w = quant_input(Case(i=n, h=k, values=values), STAGE)
    recipe = OURS.of(STAGE)
    old = quant.weight_quant(w, recipe)
    device = torch.device(parity_device)
    codes, scales = ours.requantize_weight(old.codes.to(device), old.scales.to(device))
    expected = one_nan(quant.requantize_weight(old.codes, old.scales, recipe))
    got = one_nan(QuantOutput(codes=codes.cpu(), scales=scales.cpu()))
    found = compare(got, expected, STAGE)
    message = f"requantize_weight differs {found.first}; {found.differing} of {found.compared}."
    parity_recorder.add(
        {
            "check": "exact",
            "verdict": "pass" if found.equal else "fail",
            "kernel": "ours_requantize_weight",
            "recipe": OURS.name,
            "stage": STAGE.value,
            "scale": "ue8m0",
            "shape": f"n{n}-k{k}",
            "compared": found.compared,
            "differing": found.differing,
            "message": "" if found.equal else message,
        }
    )
    assert found.equal, message
