"""The virtual GPU gives the bits of the compiled kernels: both run on the same inputs."""

from __future__ import annotations

import pytest

from moe_parity.harness.compare import compare
from moe_parity.harness.expect import Recorder, fields
from moe_parity.harness.grid import quant_params
from moe_parity.harness.run import make_input, run
from moe_parity.harness.verdict import Verdict
from moe_parity.kernels import Kernel
from moe_parity.references.spec import Case, Stage, Values

CASES = [
    *quant_params(Stage.ACT_QUANT, Case(m=480, h=512, values=Values.AIMED), layouts=False),
    *quant_params(Stage.ACT_QUANT, Case(m=33, h=512, values=Values.SPECIAL), layouts=False),
    *quant_params(Stage.WEIGHT_QUANT, Case(i=700, h=500, values=Values.AIMED)),
]
TRITON = [
    param for param in CASES if isinstance(param.values[0], Kernel) and param.values[0].triton
]


@pytest.mark.parametrize(("kernel", "case"), TRITON)
def test_same_bits(kernel: Kernel, case: Case, parity_gpu: str, parity_recorder: Recorder):
    """Compiled and interpreted results are equal, every bit."""
    x = make_input(kernel, case, "cpu")
    compiled = run(kernel, case, x.to(parity_gpu)).result
    interpreted = run(kernel, case, x).result
    found = compare(interpreted, compiled, kernel.stage)
    message = f"{kernel.name}: the virtual GPU differs from the GPU {found.first}."
    verdict = Verdict(
        check="virtual_gpu",
        verdict="pass" if found.equal else "fail",
        message="" if found.equal else message,
        compared=found.compared,
        differing=found.differing,
    )
    parity_recorder.add(fields(kernel, case, parity_gpu, verdict, 0.0))
    assert found.equal, message
