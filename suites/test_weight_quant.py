"""Stage ``weight_quant``: 128 x 128 tiles, ragged edges, requantization to powers of two."""

from __future__ import annotations

import pytest

from moe_parity.harness.cases.grid import formats, params
from moe_parity.harness.checks.compare import comparable
from moe_parity.harness.checks.expect import Recorder, claim, expect
from moe_parity.harness.session import environment
from moe_parity.kernels import Kernel
from moe_parity.references.language import Case, Hazard, InputDtype, Values
from moe_parity.references.recipes.ours import OURS
from moe_parity.references.stages import WEIGHT_QUANT
from moe_parity.references.stages.quant import reference
from moe_parity.references.stages.quant.decisions import QuantRecipe

BF16 = (InputDtype.BF16,)
# A tile for each aimed group: 192 of them on a GPU, 48 on a CPU.
AIMED = Case(
    i=2048 if environment.gpu() else 1024, h=1536 if environment.gpu() else 768, values=Values.AIMED
)
BROKEN_UP = [
    Case(i=200, h=300, values=Values.WIDE, hazard=hazard)
    for hazard in (Hazard.STRIDED, Hazard.TRANSPOSED)
]


def grid(*bases: Case, **chosen):
    return params(WEIGHT_QUANT, formats(WEIGHT_QUANT, *bases, **chosen))


@pytest.mark.parametrize(("kernel", "case"), grid(AIMED))
def test_aimed(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """Tiles of one aimed group each; the record counts the outputs that could be red."""
    expect(kernel, case, parity_device, parity_recorder, power=True)


@pytest.mark.parametrize(("kernel", "case"), grid(*BROKEN_UP, dtypes=BF16))
def test_not_contiguous(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """Input with gaps, and transposed input, is refused or quantized right."""
    expect(kernel, case, parity_device, parity_recorder)


@pytest.mark.parametrize("values", [Values.NORMAL, Values.WIDE, Values.AIMED])
@pytest.mark.parametrize(("n", "k"), [(128, 128), (200, 300), (257, 129)])
def test_requantize(n: int, k: int, values: Values, parity_device: str, parity_recorder: Recorder):
    """Our requantization of E4M3 weights to powers of two equals its reference."""
    ours = pytest.importorskip("moe_parity.kernels.ours.quant", reason="needs Triton")
    w = WEIGHT_QUANT.inputs(Case(i=n, h=k, values=values)).x
    recipe = OURS.of("weight_quant", QuantRecipe)
    old = reference.weight_quant(w, recipe)
    got = ours.requantize_weight(old.codes.to(parity_device), old.scales.to(parity_device))
    want = reference.requantize_weight(old.codes, old.scales, recipe)
    pairs = zip(got, (want.codes, want.scales), strict=True)
    wrong = sum(int((comparable(a.cpu()) != comparable(b)).sum()) for a, b in pairs)
    compared = want.codes.numel() + want.scales.numel()
    fault = f"requantize_weight differs in {wrong} of {compared} outputs." if wrong else ""
    claim(
        parity_recorder, "exact", fault, kernel="ours_requantize_weight", recipe=OURS.name,
        stage="weight_quant", scale="ue8m0", shape=f"n{n}-k{k}", compared=compared,
        differing=wrong, device="virtual_gpu" if parity_device == "cpu" else parity_device,
    )  # fmt: skip
