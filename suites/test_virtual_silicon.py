"""The virtual GPU gives the bits of the compiled kernels: both run on the same inputs."""

from __future__ import annotations

import dataclasses

import pytest

from moe_parity.harness.cases.grid import quant_params
from moe_parity.harness.checks.layer import words
from moe_parity.harness.checks.stage import run_stage
from moe_parity.harness.compare import compare
from moe_parity.harness.expect import Recorder, fields
from moe_parity.harness.expect_stage import fields as stage_fields
from moe_parity.harness.run import make_input, run
from moe_parity.harness.stages import stage_inputs
from moe_parity.harness.verdict import Verdict
from moe_parity.kernels import Kernel, find
from moe_parity.references.language import Case, ScaleFormat, Stage, Values

CASES = [
    *quant_params(Stage.ACT_QUANT, Case(m=480, h=512, values=Values.AIMED), layouts=False),
    *quant_params(Stage.ACT_QUANT, Case(m=33, h=512, values=Values.SPECIAL), layouts=False),
    *quant_params(Stage.WEIGHT_QUANT, Case(i=700, h=500, values=Values.AIMED)),
]
TRITON = [
    param for param in CASES if isinstance(param.values[0], Kernel) and param.values[0].triton
]


MIDDLE = {
    "vllm_fused_moe_fc1": [Case(m=m, e=4, k=2, h=512, i=256) for m in (1, 8, 64, 65)],
    "vllm_fused_moe_fc2": [Case(m=m, e=4, k=2, h=256, i=512) for m in (1, 8, 64, 65)],
    "vllm_silu_mul_colmajor": [Case(m=256, i=256), Case(m=256, i=256, clamp=9.97)],
    "vllm_silu_mul_colmajor_ends": [Case(m=200, e=5, i=256, scale=ScaleFormat.UE8M0)],
    "vllm_silu_mul_packed": [Case(m=256, i=256, scale=ScaleFormat.UE8M0_PACKED)],
    "vllm_silu_mul_packed_ends": [Case(m=200, e=5, i=256, scale=ScaleFormat.UE8M0_PACKED)],
    "vllm_ep_scatter": [Case(m=20, e=8, k=4, h=256)],
    "vllm_ep_scatter_psum": [Case(m=20, e=8, k=4, h=256)],
    "vllm_ep_gather": [Case(m=20, e=8, k=8, h=512)],
}
"""The stages in between: both scale orders on either side of 64 tokens, and all that goes round."""


def _aimed(name: str, case: Case):
    aimed = dataclasses.replace(case, values=Values.AIMED)
    return pytest.param(find(name), aimed, id=f"{name}-{aimed.id}")


@pytest.mark.parametrize(
    ("kernel", "case"), [_aimed(name, case) for name, cases in MIDDLE.items() for case in cases]
)
def test_same_bits_in_the_middle(
    kernel: Kernel, case: Case, parity_gpu: str, parity_recorder: Recorder
):
    """Compiled with contraction, as vLLM launches it, and interpreted: equal, every bit."""
    reason = kernel.why_not(case, parity_gpu)
    if reason:
        pytest.skip(f"{kernel.name}: {reason}")
    made = {
        device: run_stage(kernel, case, stage_inputs(kernel.stage, case, device)).produced.outputs
        for device in (parity_gpu, "cpu")
    }
    wrong = compared = 0
    for name, compiled in made[parity_gpu].items():
        wrong += int((words(compiled.cpu()) != words(made["cpu"][name])).sum())
        compared += compiled.numel()
    message = (
        f"{kernel.name}: the virtual GPU differs from the GPU in {wrong} of {compared} outputs."
    )
    verdict = Verdict(
        check="virtual_gpu", verdict="fail" if wrong else "pass", compared=compared,
        differing=wrong, message=message if wrong else "",
    )  # fmt: skip
    parity_recorder.add(stage_fields(kernel, case, parity_gpu, verdict, 0.0))
    assert not wrong, message


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
