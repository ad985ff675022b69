"""The whole layer, stage by stage and end to end, on both paths, bit for bit."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_parity.harness.cases.shapes import ODD
from moe_parity.harness.expect import Recorder
from moe_parity.harness.expect_layer import expect_layer
from moe_parity.kernels import Kernel, all_kernels
from moe_parity.references.language import Case, Routing, ScaleFormat, Stage, Values

KERNELS = all_kernels(Stage.LAYER)
SMALL = Case(m=3, e=8, k=2, h=256, i=256)
FORMATS = (ScaleFormat.FP32, ScaleFormat.UE8M0)


def _param(kernel: Kernel, case: Case, *extra: str):
    mark = pytest.mark.moe(
        kernel=kernel.name, stage="layer", scale=case.scale.value, clamp=case.clamp,
        ep=case.ep_size > 1,
    )  # fmt: skip
    return pytest.param(kernel, case, id="-".join([kernel.name, case.id, *extra]), marks=mark)


GRID = [
    _param(kernel, dataclasses.replace(SMALL, scale=scale, clamp=clamp, values=values, **ep))
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
    expect_layer(kernel, case, parity_device, parity_recorder, power=True)


ROUTED = [
    _param(kernel, dataclasses.replace(SMALL, m=10, i=128, routing=routing, ep_rank=1, ep_size=2))
    for kernel, routing in itertools.product(KERNELS, Routing)
]


@pytest.mark.parametrize(("kernel", "case"), ROUTED)
def test_routing(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """One expert takes all, repeated experts, -1 and foreign ids, on rank 1 of 2."""
    expect_layer(kernel, case, parity_device, parity_recorder)


SHAPES = [
    _param(kernel, shape.case(Case(values=Values.AIMED), m=4 if shape.k < 9 else 2))
    for kernel, shape in itertools.product(KERNELS, ODD)
]


SHAPES += [
    _param(kernel, Case(m=m, e=16, k=1, h=128, i=128))
    for kernel, m in itertools.product(KERNELS, (127, 128, 129))
]


@pytest.mark.parametrize(("kernel", "case"), SHAPES)
def test_odd_shapes(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """72 and 5 experts, k = 1, 6, 9 and 22; 127, 128 and 129 pairs."""
    expect_layer(kernel, case, parity_device, parity_recorder)


@st.composite
def layer_cases(draw: st.DrawFn) -> Case:
    """Draw a small layer."""
    ranks = draw(st.sampled_from([1, 2, 4]), label="ranks")
    e = ranks * draw(st.integers(1, 6), label="experts per rank")
    return Case(
        m=draw(st.one_of(st.sampled_from([0, 1, 2, 17]), st.integers(0, 6)), label="m"),
        e=e,
        k=draw(st.integers(1, min(4, e)), label="k"),
        h=128 * draw(st.integers(1, 2), label="h"),
        i=128 * draw(st.integers(1, 2), label="i"),
        scale=draw(st.sampled_from(FORMATS), label="scale"),
        clamp=draw(st.sampled_from([None, 1.0, 9.97]), label="clamp"),
        ep_size=ranks,
        ep_rank=draw(st.integers(0, ranks - 1), label="rank"),
        routing=draw(st.sampled_from(list(Routing)), label="routing"),
        values=draw(st.sampled_from([Values.NORMAL, Values.AIMED]), label="values"),
        seed=draw(st.integers(0, 2**32), label="seed"),
    )


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@settings(max_examples=max(5, settings().max_examples // 2))
@given(case=layer_cases())
def test_drawn(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """Drawn sizes, ranks, routings, clamps."""
    expect_layer(kernel, case, parity_device, parity_recorder)


def test_experts_that_are_not_hit_hold_nan():
    """The inputs are what the other tests say they are."""
    from moe_parity.harness.layer_inputs import layer_inputs
    from moe_parity.references.layer import local_experts

    case = dataclasses.replace(SMALL, ep_rank=2, ep_size=4, m=9)
    made = layer_inputs(case)
    local = local_experts(made.batch.ids, made.experts)
    untouched = set(range(2)) - set(local[local >= 0].tolist())
    assert made.experts.first == 4
    assert bool((local < 0).any())
    for expert in range(2):
        assert bool(torch.isnan(made.experts.w13_scale[expert]).all()) == (expert in untouched)
