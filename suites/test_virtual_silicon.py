"""The virtual GPU gives the bits of the compiled kernels: both run on the same inputs."""

from __future__ import annotations

import dataclasses

import pytest

from moe_parity.harness.calling.run import on_device
from moe_parity.harness.cases.grid import formats, param, params
from moe_parity.harness.checks.compare import differences
from moe_parity.harness.checks.expect import Recorder, needs, record
from moe_parity.harness.checks.verdict import found
from moe_parity.kernels import Kernel, find
from moe_parity.references.language import Case, ScaleFormat, ScaleLayout, Values
from moe_parity.references.stages import ACT_QUANT, WEIGHT_QUANT

ROW = (ScaleLayout.ROW,)
QUANTIZED = [
    *params(
        ACT_QUANT,
        formats(
            ACT_QUANT,
            Case(m=480, h=512, values=Values.AIMED),
            Case(m=33, h=512, values=Values.SPECIAL),
            layouts=ROW,
        ),
    ),
    *params(WEIGHT_QUANT, formats(WEIGHT_QUANT, Case(i=700, h=500, values=Values.AIMED))),
]
GROUPED = [Case(m=m, e=4, k=2, h=512, i=256) for m in (1, 8, 64, 65)]
SECOND = [dataclasses.replace(case, h=256, i=512) for case in GROUPED]
GATED = [Case(m=256, i=256), Case(m=256, i=256, clamp=9.97)]
ROUTED = [Case(m=20, e=8, k=4, h=256)]
MIDDLE = {
    "vllm_fused_moe_fc1": GROUPED,
    "vllm_fused_moe_fc2": SECOND,
    "vllm_silu_mul_colmajor": GATED,
    "vllm_silu_mul_colmajor_ends": [Case(m=200, e=5, i=256, scale=ScaleFormat.UE8M0)],
    "vllm_silu_mul_packed": [Case(m=256, i=256, scale=ScaleFormat.UE8M0_PACKED)],
    "vllm_silu_mul_packed_ends": [Case(m=200, e=5, i=256, scale=ScaleFormat.UE8M0_PACKED)],
    "vllm_ep_scatter": ROUTED,
    "vllm_ep_scatter_psum": ROUTED,
    "vllm_ep_gather": [Case(m=20, e=8, k=8, h=512)],
    "ours_align": [Case(m=m, e=8, k=4) for m in (20, 70)],
    "ours_align_large": [Case(m=20, e=8, k=4)],
    "ours_fc1_decode": GROUPED,
    "ours_fc1_large": GROUPED,
    "ours_fc2_decode": SECOND,
    "ours_fc2_large": SECOND,
    "ours_swiglu": GATED,
    "ours_swiglu_quant": GATED,
    "ours_swiglu_quant_scalar": GATED,
    "ours_swiglu_quant_after": GATED,
    "ours_combine": [Case(m=20, e=8, k=8, h=512)],
}
"""The stages in between: both scale orders on either side of 64 tokens, and all that goes round."""


def _middle():
    for name, cases in MIDDLE.items():
        kernel = find(name)
        for case in cases:
            aimed = "values" in kernel.stage.reads
            case = dataclasses.replace(case, values=Values.AIMED) if aimed else case
            yield param(kernel, case)


TRITON = [p for p in QUANTIZED if isinstance(p.values[0], Kernel) and p.values[0].triton]


@pytest.mark.parametrize(("kernel", "case"), [*TRITON, *_middle()])
def test_same_bits(kernel: Kernel, case: Case, parity_gpu: str, parity_recorder: Recorder):
    """Compiled, with contraction where it is launched so, and interpreted: equal, every bit."""
    needs(kernel, case, parity_gpu)
    stage, inputs = kernel.stage, kernel.stage.inputs(case)
    compiled = {n: t.cpu() for n, t in on_device(kernel, case, parity_gpu).items()}
    interpreted = on_device(kernel, case, "cpu")
    outputs, live = stage.outputs(case, inputs), stage.live(case, inputs)
    every = differences(outputs, interpreted, compiled, live)
    wrong, compared = sum(d.wrong for d in every), sum(d.of for d in every)
    fault = f"{kernel.name}: the virtual GPU differs from the GPU in {wrong} of {compared} outputs."
    verdict = found("virtual_gpu", fault if wrong else "", compared=compared, differing=wrong)
    record(kernel, case, parity_gpu, [verdict], parity_recorder)
