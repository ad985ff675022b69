"""Production kernels of the middle stages: DeepGEMM's GEMMs, vLLM's ops and Triton kernels.

Bits, write sets, a second call on other memory; on a CPU the Triton kernels run on the virtual GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

import pytest

from moe_parity.harness.expect import Recorder
from moe_parity.harness.expect_stage import expect_stage
from moe_parity.harness.stages import MIDDLE, gate_up_pool
from moe_parity.kernels import Kernel, all_kernels
from moe_parity.references.language import (
    Case,
    Gate,
    Routing,
    ScaleFormat,
    ScaleLayout,
    Stage,
    Values,
)

GEMMS = (Stage.FC1, Stage.FC2)
ACTIVATIONS = (Stage.SWIGLU, Stage.SWIGLU_QUANT)
ROUTED = (Stage.ALIGN, Stage.PERMUTE, Stage.COMBINE)


def params(stages: Iterable[Stage], cases: Iterable[Case]):
    """Return (kernel, case) parameters; of a kernel that cannot run here, one case."""
    found = []
    cases = list(cases)
    for kernel in all_kernels():
        if kernel.stage not in stages:
            continue
        # What it declines on a GPU it declines everywhere.
        own = [c for c in cases if not kernel.supports(c, "cuda")]
        found += [_param(kernel, c) for c in (own[:1] if kernel.unavailable() else own)]
    return found


def _param(kernel: Kernel, case: Case):
    mark = pytest.mark.moe(
        kernel=kernel.name, stage=kernel.stage.value, scale=case.scale.value, clamp=case.clamp,
        layout=case.layout.value, ep=case.ep_size > 1,
    )  # fmt: skip
    return pytest.param(kernel, case, id=f"{kernel.name}-{case.id}", marks=mark)


def gemm_cases() -> Iterator[Case]:
    """Aimed values around every edge: 64 and 65 tokens, one expert, ranks, ragged N and K."""
    base = Case(e=8, k=2, h=512, i=256, values=Values.AIMED)
    for scale, m in itertools.product((ScaleFormat.FP32, ScaleFormat.UE8M0), (1, 16, 64, 65, 200)):
        yield dataclasses.replace(base, m=m, scale=scale)
    one = Case(e=1, k=1, h=512, i=256, values=Values.AIMED)
    yield from (dataclasses.replace(one, m=m) for m in (1, 7, 64, 128, 130))
    yield dataclasses.replace(base, m=33, ep_rank=1, ep_size=4)
    yield dataclasses.replace(base, m=300, routing=Routing.ONE)
    yield dataclasses.replace(base, m=40, routing=Routing.REPEATED, values=Values.NORMAL)
    yield dataclasses.replace(base, m=24, h=336, i=180, values=Values.NORMAL)
    yield dataclasses.replace(one, m=24, h=336, i=180, values=Values.NORMAL)


@pytest.mark.parametrize(("kernel", "case"), params(GEMMS, gemm_cases()))
def test_gemm(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """Small differences of large sums; padding and experts without rows hold NaN."""
    expect_stage(kernel, case, parity_device, parity_recorder, power=True)


def activation_cases() -> Iterator[Case]:
    """All aimed groups, each limit and gate, formats and layouts, tiles of every fill."""
    base = Case(e=5, i=512, values=Values.AIMED)
    gates = ((None, Gate.SILU), (7.0, Gate.SILU), (9.97, Gate.SILU), (7.0, Gate.SWIGLUOAI))
    for (clamp, gate), scale in itertools.product(gates, ScaleFormat):
        case = dataclasses.replace(base, clamp=clamp, gate=gate, scale=scale)
        rows = -(-gate_up_pool(case).shape[0] * 128 // case.i)
        yield dataclasses.replace(case, m=-(-rows // 128) * 128)
        yield dataclasses.replace(case, m=128, values=Values.SPECIAL)
    for scale, m in itertools.product(ScaleFormat, (1, 37, 130)):
        yield dataclasses.replace(base, m=m, scale=scale, i=640)
    yield dataclasses.replace(base, m=128, layout=ScaleLayout.COLUMN)
    yield dataclasses.replace(base, m=96, group=64)
    yield dataclasses.replace(base, m=64, i=4096)
    yield dataclasses.replace(base, m=64, i=4096, scale=ScaleFormat.UE8M0)
    yield dataclasses.replace(base, m=64, i=100)
    yield dataclasses.replace(base, m=64, i=100, clamp=9.97)


@pytest.mark.parametrize(("kernel", "case"), params(ACTIVATIONS, activation_cases()))
def test_activation(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """SiLU's forms, the limit, and behind a gate of 32 every decision of the quantizer."""
    expect_stage(kernel, case, parity_device, parity_recorder, power=True)


def routed_cases() -> Iterator[Case]:
    """Tokens around the tiles, every top-k that has a path of its own, ranks, odd expert counts."""
    for m, k in itertools.product((1, 17, 64, 65), (1, 2, 6, 8, 9)):
        yield Case(m=m, e=72, k=k, h=256, values=Values.AIMED)
    yield Case(m=33, e=64, k=22, h=256, values=Values.AIMED)
    yield Case(m=200, e=7, k=3, h=384, values=Values.AIMED)
    yield Case(m=50, e=8, k=4, h=256, values=Values.AIMED, ep_rank=1, ep_size=2)
    yield Case(m=130, e=256, k=8, h=256, values=Values.AIMED, ep_rank=3, ep_size=8)
    yield Case(m=40, e=8, k=4, h=256, routing=Routing.REPEATED)
    yield Case(m=40, e=8, k=4, h=256, routing=Routing.ONE)


@pytest.mark.parametrize(("kernel", "case"), params(ROUTED, routed_cases()))
def test_routed(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """Alignment, permutation and the top-k sum; rows of other ranks hold NaN."""
    expect_stage(kernel, case, parity_device, parity_recorder, power=True)


def test_every_middle_stage_has_a_production_kernel():
    """The families above leave no middle stage out."""
    assert {*GEMMS, *ACTIVATIONS, *ROUTED} == set(MIDDLE)
    assert {kernel.stage for kernel in all_kernels()} >= set(MIDDLE)
