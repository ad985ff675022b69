"""The whole layer, stage by stage and end to end, on both paths, bit for bit."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from moe_parity.harness.cases.grid import param, params, taken
from moe_parity.harness.cases.shapes import ODD
from moe_parity.harness.checks.expect import Recorder, expect
from moe_parity.kernels import Kernel, all_kernels
from moe_parity.references.language import Case, Gate, Hazard, Routing, ScaleFormat, Values
from moe_parity.references.stages import LAYER

KERNELS = all_kernels(LAYER)
SMALL = Case(m=3, e=8, k=2, h=256, i=256)
FORMATS = (ScaleFormat.FP32, ScaleFormat.UE8M0)
MIXED = ((ScaleFormat.FP32, ScaleFormat.UE8M0), (ScaleFormat.UE8M0, ScaleFormat.FP32))

GRID = [
    param(kernel, dataclasses.replace(SMALL, scale=scale, clamp=clamp, values=values, **ep))
    for kernel, scale, clamp, values, ep in itertools.product(
        KERNELS,
        FORMATS,
        (None, 7.0),
        (Values.NORMAL, Values.AIMED),
        ({}, {"ep_rank": 2, "ep_size": 4, "m": 9}),
    )
]


@pytest.mark.parametrize(("kernel", "case"), GRID)
def test_grid(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """Formats, clamps, expert parallelism, ordinary and aimed values; experts not hit hold NaN."""
    aimed = case.values is Values.AIMED  # the others' power is known to be small
    expect(kernel, case, parity_device, parity_recorder, power=aimed)


TWO_FORMATS = [
    dataclasses.replace(SMALL, scale=scale, mid_scale=mid, clamp=clamp, values=Values.AIMED)
    for (scale, mid), clamp in itertools.product(MIXED, (None, 7.0))
]


@pytest.mark.parametrize(("kernel", "case"), params(LAYER, TWO_FORMATS))
def test_two_scale_formats(
    kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder
):
    """One format in front of each GEMM: fp32 then powers of two, and the other way round."""
    expect(kernel, case, parity_device, parity_recorder, power=True)


ASKED = [
    dataclasses.replace(SMALL, gate=Gate.SWIGLUOAI, clamp=7.0),
    Case(m=2, e=2, clamp=0.5),  # a limit that is reached
    *(dataclasses.replace(SMALL, i=128, hazard=h) for h in (Hazard.STRIDED, Hazard.TRANSPOSED)),
]


@pytest.mark.parametrize(("kernel", "case"), params(LAYER, ASKED))
def test_what_else_is_asked(
    kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder
):
    """Alpha and beta; activations that are not contiguous are refused or right."""
    expect(kernel, case, parity_device, parity_recorder)


ROUTED = [
    param(kernel, dataclasses.replace(SMALL, m=10, i=128, routing=routing, ep_rank=1, ep_size=2))
    for kernel, routing in itertools.product(KERNELS, Routing)
]


@pytest.mark.parametrize(("kernel", "case"), ROUTED)
def test_routing(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """One expert takes all, repeated experts, -1 and foreign ids, on rank 1 of 2."""
    expect(kernel, case, parity_device, parity_recorder)


SHAPES = [
    param(kernel, shape.case(Case(values=Values.AIMED), m=4 if shape.k < 9 else 1))
    for kernel, shape in itertools.product(KERNELS, ODD)
]
SHAPES += [
    param(kernel, Case(m=m, e=16, k=1, h=128, i=128))
    for kernel, m in itertools.product(KERNELS, (127, 128, 129))
]


@pytest.mark.parametrize(("kernel", "case"), SHAPES)
def test_odd_shapes(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """72 and 5 experts, k = 1, 6, 9 and 22; 127, 128 and 129 pairs."""
    expect(kernel, case, parity_device, parity_recorder)


def test_experts_that_are_not_hit_hold_nan():
    """The inputs are what the other tests say they are."""
    case = dataclasses.replace(SMALL, ep_rank=2, ep_size=4, m=9)
    made = LAYER.inputs(case)
    untouched = set(range(2)) - set(made.expert[made.expert >= 0].tolist())
    assert made.experts.first == 4
    assert bool((made.expert < 0).any())
    for expert in range(2):
        assert bool(torch.isnan(made.experts.w13_scale[expert]).all()) == (expert in untouched)


@pytest.mark.parametrize("path", ["decode", "large"])
def test_our_layer_declines_what_it_cannot_do(path: str):
    """A kernel that declined more would leave the grid, and nobody would see it."""
    (kernel,) = [kernel for kernel in KERNELS if kernel.name == f"ours_{path}"]
    assert kernel.declines(SMALL, "cpu") is None
    for size in ({"h": 200}, {"i": 200}):
        case = dataclasses.replace(SMALL, **size)
        ((name, width),) = size.items()
        sentence = f"layer has whole groups: {name.upper()} = {width} is not a multiple of 128."
        assert str(kernel.declines(case, "cpu")) == sentence
    reason = kernel.declines(dataclasses.replace(SMALL, gate=Gate.SWIGLUOAI), "cpu")
    assert str(reason) == {"decode": "alpha and beta take the large path.", "large": "None"}[path]


def test_every_case_is_taken_by_our_large_path():
    """A grid whose cases nobody takes would be green for nothing."""
    (large,) = [kernel for kernel in KERNELS if kernel.name == "ours_large"]
    for case in (*TWO_FORMATS, *ASKED):
        assert taken(large, case), case.id
