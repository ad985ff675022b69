"""Stages ``fc1`` and ``fc2``: grouped GEMMs, ours, DeepGEMM's in every layout, vLLM's."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
from _pytest.mark import ParameterSet

from moe_parity.harness.calling.run import on_device
from moe_parity.harness.cases import budget
from moe_parity.harness.cases.grid import param, params
from moe_parity.harness.checks.expect import Recorder, expect
from moe_parity.harness.session import environment
from moe_parity.kernels import Kernel, find
from moe_parity.references.arithmetic import random_bits
from moe_parity.references.chips.hopper import WGMMA_FP8
from moe_parity.references.language import (
    Case,
    Check,
    Contract,
    Hazard,
    Routing,
    ScaleFormat,
    Values,
)
from moe_parity.references.stages import FC1, FC2, STAGES

BASE = Case(e=8, k=2, h=256, i=256, values=Values.AIMED)
ONE = dataclasses.replace(BASE, e=1, k=1)
SMALL = Case(m=24, e=4, k=2, h=256, i=256, values=Values.AIMED)


def cases() -> Iterator[Case]:
    """Aimed values around every edge: 64 and 65 tokens, one expert, ranks, ragged N and K."""
    many = 200 if environment.gpu() else 80
    for scale, m in itertools.product((ScaleFormat.FP32, ScaleFormat.UE8M0), (1, 16, 64, 65, many)):
        yield dataclasses.replace(BASE, m=m, scale=scale)
    yield from (dataclasses.replace(ONE, m=m) for m in (1, 7, 64, 128, 130))
    yield dataclasses.replace(BASE, m=33, ep_rank=1, ep_size=4)
    yield dataclasses.replace(BASE, m=many + 100, routing=Routing.ONE)
    yield dataclasses.replace(BASE, m=40, routing=Routing.REPEATED, values=Values.NORMAL)
    yield dataclasses.replace(BASE, m=24, routing=Routing.HOLES, h=512, i=384)
    yield dataclasses.replace(BASE, m=24, h=336, i=180, values=Values.NORMAL)
    yield dataclasses.replace(ONE, m=24, h=336, i=180, values=Values.NORMAL)
    yield dataclasses.replace(SMALL, pool=2)
    for hazard in (Hazard.STRIDED, Hazard.TRANSPOSED):
        yield dataclasses.replace(SMALL, hazard=hazard)


@pytest.mark.parametrize(("kernel", "case"), params((FC1, FC2), cases()))
def test_gemm(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """Small differences of large sums; padding and experts without rows hold NaN."""
    expect(kernel, case, parity_device, parity_recorder, power=True)


def sizes() -> Iterator[Case]:
    """N alone ragged, 2 I in fc1 and H in fc2; no power of two; tiles that are not full."""
    # Every expert is hit: the last one ends where the memory does.
    yield Case(m=1, e=3, k=3, h=128, i=180)
    yield Case(m=1, e=3, k=3, h=336, i=128)
    yield Case(m=17, e=1, k=1, h=384, i=384)


@pytest.mark.parametrize(("kernel", "case"), params((FC1, FC2), sizes()))
def test_sizes(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """Ragged N, H and I of three blocks, a tile of one token more.  Their bits alone."""
    bits = dataclasses.replace(kernel, contract=Contract(checks=frozenset({Check.EXACT})))
    expect(bits, case, parity_device, parity_recorder)


OURS = ("ours_fc1_decode", "ours_fc1_large", "ours_fc2_decode", "ours_fc2_large")


RAGGED = Case(m=1, e=3, k=3, h=336, i=180)


def biased() -> Iterator[ParameterSet]:
    """Yield whole tiles of N, and an N that ends inside one."""
    for name in OURS:
        whole = {"h": 128} if find(name).stage is FC1 else {"i": 128}
        yield param(find(name), SMALL, "bias")
        yield param(find(name), dataclasses.replace(RAGGED, **whole), "bias")


@pytest.mark.parametrize(("kernel", "case"), list(biased()))
def test_bias(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """A bias that is no BF16 number; before or after the rounding is told apart."""
    inputs = kernel.stage.inputs(case, parity_device)
    shape = inputs.w.shape[:2]
    bias = random_bits.normal(1, "bias", *shape, device=parity_device)
    biased = dataclasses.replace(inputs, bias=bias)
    power = case is SMALL
    expect(kernel, case, parity_device, parity_recorder, power=power, inputs=biased)


@pytest.mark.parametrize("block", [16, 64])
def test_the_gemm_runs_on_fp8_wgmma(block: int):
    """Read from the PTX that Triton compiles for sm_90, on either side of the threshold."""
    virtual_gpu = pytest.importorskip("moe_parity.kernels.virtual_gpu", reason="needs Triton")
    steps = pytest.importorskip("moe_parity.kernels.ours.steps", reason="needs Triton")
    made = FC1.inputs(dataclasses.replace(ONE, m=4, h=256))
    aligned = steps.align(made.ids, 0, 1, block)
    with virtual_gpu.record() as tape:
        steps.grouped_gemm(made.a, made.a_scale, made.w, made.w_scale, aligned, 4, 1)
    (launch,), (report,) = tape.launches, tape.reports
    assert report.dot_unit is WGMMA_FP8
    text = virtual_gpu.ptx(launch.kernel, *launch.args, **launch.options)
    assert "wgmma.mma_async.sync.aligned" in text
    assert "mma.sync.aligned" not in text.replace("wgmma.mma_async.sync.aligned", "")
    assert text.count("mul.rn.f32") + text.count("mul.f32") >= 1, "the scales' product"
    assert "fma.rn.f32" in text


@pytest.mark.parametrize("name", OURS)
def test_our_gemms_take_every_size(name: str):
    """A kernel that declined one would leave the grid, and nobody would see it."""
    kernel = find(name)
    ragged = ("h", 336) if kernel.stage is FC1 else ("i", 180)  # what is K there
    for case in sizes():
        reason = budget.skip_of(kernel, case, "cpu")
        if getattr(case, ragged[0]) == ragged[1]:
            assert str(reason) == f"{name}: K = {ragged[1]} must be a multiple of 128."
        else:
            assert reason is None


@pytest.mark.parametrize(("name", "block"), [(n, 16 if "decode" in n else 64) for n in OURS])
def test_a_path_has_its_own_blocks(name: str, block: int):
    """Both give the same bits, so that a kernel under the other's name would be green."""
    virtual_gpu = pytest.importorskip("moe_parity.kernels.virtual_gpu", reason="needs Triton")
    with virtual_gpu.record() as tape:
        on_device(find(name), Case(m=2, e=2, k=1), "cpu")
    assert [launch.options["BLOCK"] for launch in tape.launches] == [block] * 2


def test_every_stage_has_our_kernel():
    from moe_parity.kernels import all_kernels

    ours = {kernel.stage.name for kernel in all_kernels() if kernel.name.startswith("ours_")}
    assert ours == set(STAGES)
    assert {kernel.stage.name for kernel in all_kernels()} == set(STAGES)


def test_wide_and_narrow_ids_align_alike(parity_device: str):
    """Ids of 64 bits give the alignment that ids of 32 bits give."""
    steps = pytest.importorskip("moe_parity.kernels.ours.steps", reason="needs Triton")
    ids = random_bits.integers(3, "ids", 40, 6, below=20, device=parity_device) - 3
    for most in (0, 1 << 20 if ids.numel() <= 128 else 0):
        narrow, wide = (steps.align(i, 2, 9, 16, most=most) for i in (ids.int(), ids))
        used = int((narrow.block_expert >= 0).sum())
        assert torch.equal(narrow.block_expert, wide.block_expert)
        assert torch.equal(narrow.slots[: used * 16], wide.slots[: used * 16])
