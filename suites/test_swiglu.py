"""Stages ``swiglu`` and ``swiglu_quant``: the gated activation, with and without quantization."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch

from moe_parity.harness.cases.grid import params
from moe_parity.harness.checks.expect import Recorder, expect
from moe_parity.harness.session import environment
from moe_parity.kernels import Kernel, find
from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import BLOCK, f32_to_bf16
from moe_parity.references.language import Case, Gate, Hazard, ScaleFormat, ScaleLayout, Values
from moe_parity.references.stages import SWIGLU, SWIGLU_QUANT
from moe_parity.references.stages.swiglu.aims import LOW_LIMIT
from moe_parity.references.stages.swiglu.pools import pool

GATES = ((None, Gate.SILU), (7.0, Gate.SILU), (9.97, Gate.SILU), (7.0, Gate.SWIGLUOAI))
BASE = Case(e=5, i=512, values=Values.AIMED)


def whole_pool(case: Case) -> int:
    """Return the rows that hold the pool once, whole tiles of 128; a part of it on a CPU."""
    if not environment.gpu():
        return 64
    rows = -(-pool(case).shape[0] * BLOCK // case.i)
    return -(-rows // 128) * 128


def cases() -> Iterator[Case]:
    """All aimed groups, each limit and gate, formats and layouts, tiles of every fill."""
    for (clamp, gate), scale in itertools.product(GATES, ScaleFormat):
        case = dataclasses.replace(BASE, clamp=clamp, gate=gate, scale=scale)
        yield dataclasses.replace(case, m=whole_pool(case))
        if scale is ScaleFormat.FP32:  # the second pool's special numbers meet every format
            yield dataclasses.replace(case, m=32, values=Values.SPECIAL)
    for scale, (m, i) in itertools.product(ScaleFormat, ((1, 640), (37, 640), (130, 128))):
        yield dataclasses.replace(BASE, m=m, scale=scale, i=i)
    for clamp, gate in ((None, Gate.SILU), (LOW_LIMIT, Gate.SILU), (LOW_LIMIT, Gate.SWIGLUOAI)):
        second = dataclasses.replace(BASE, clamp=clamp, gate=gate, pool=2)
        yield dataclasses.replace(second, m=whole_pool(second))
    for scale, clamp in itertools.product(ScaleFormat, (None, 9.97)):
        special = dataclasses.replace(BASE, clamp=clamp, scale=scale, values=Values.SPECIAL)
        yield dataclasses.replace(special, m=64, pool=2)
    yield dataclasses.replace(BASE, m=28, layout=ScaleLayout.COLUMN)
    yield dataclasses.replace(BASE, m=24, group=64)
    yield dataclasses.replace(BASE, m=12, i=4096)
    yield dataclasses.replace(BASE, m=12, i=4096, scale=ScaleFormat.UE8M0)
    for hazard in (Hazard.STRIDED, Hazard.TRANSPOSED):
        yield dataclasses.replace(BASE, m=24, hazard=hazard)


@pytest.mark.parametrize(("kernel", "case"), params(SWIGLU_QUANT, cases()))
def test_quantized(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """SiLU's forms, the limit, and behind a gate of 32 every decision of the quantizer."""
    aimed = case.values is Values.AIMED
    expect(kernel, case, parity_device, parity_recorder, power=aimed)


def plain_cases() -> Iterator[Case]:
    """Yield the same without scales, and widths that are no multiple of 128."""
    for clamp, gate in GATES:
        case = dataclasses.replace(BASE, clamp=clamp, gate=gate)
        yield dataclasses.replace(case, m=whole_pool(case))
        yield dataclasses.replace(case, m=32, values=Values.SPECIAL)
    for clamp, gate in ((None, Gate.SILU), (LOW_LIMIT, Gate.SWIGLUOAI)):
        second = dataclasses.replace(BASE, clamp=clamp, gate=gate, pool=2)
        yield dataclasses.replace(second, m=whole_pool(second))
    yield from (dataclasses.replace(BASE, m=m, i=640) for m in (0, 1, 37, 130))
    yield dataclasses.replace(BASE, m=64, i=100)
    yield dataclasses.replace(BASE, m=64, i=100, clamp=9.97)
    for hazard in (Hazard.STRIDED, Hazard.TRANSPOSED):
        yield dataclasses.replace(BASE, m=24, hazard=hazard)


@pytest.mark.parametrize(("kernel", "case"), params(SWIGLU, plain_cases()))
def test_plain(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """SiLU's forms and the limit, rounded to BF16."""
    expect(kernel, case, parity_device, parity_recorder, power=True)


def test_rows_that_are_nobodys_are_neither_read_nor_written(parity_device: str):
    """Those of other ranks hold NaN; what is beside the own rows stays as it was."""
    activation = pytest.importorskip("moe_parity.kernels.ours.activation", reason="needs Triton")
    ids = torch.tensor([[4], [3], [-1], [5], [6], [4]], dtype=torch.int32, device=parity_device)
    own = torch.tensor([0, 3, 5], device=parity_device)
    rows = torch.full((6, 512), float("nan"), dtype=torch.bfloat16, device=parity_device)
    rows[own] = f32_to_bf16(random_bits.normal(3, "rows", 3, 512, device=parity_device))
    out = torch.full((6, 256), -7.0, dtype=torch.bfloat16, device=parity_device)
    codes = torch.full((6, 256), 0x5C, dtype=torch.uint8, device=parity_device)
    scales = torch.full((6, 2), -7.0, device=parity_device)
    activation.swiglu(rows, ids, 4, 2, activation.Activation(), out)
    activation.swiglu_quant(rows, ids, 4, 2, activation.Activation(), codes=codes, scales=scales)
    foreign = torch.ones(6, dtype=torch.bool, device=parity_device)
    foreign[own] = False
    assert bool((out[foreign] == -7.0).all())
    assert bool((codes[foreign] == 0x5C).all())
    assert bool((scales[foreign] == -7.0).all())
    assert bool((out[own] != -7.0).all())
    assert bool((scales[own] > 0).all())
    assert not bool((codes[own] == 0x5C).all(1).any())


@pytest.mark.parametrize("name", ["ours_swiglu_quant", "ours_swiglu_quant_scalar"])
def test_our_swiglu_declines_what_it_cannot_do(name: str):
    """A kernel that declined more would leave the grid, and nobody would see it."""
    kernel = find(name)
    for scale, layout, group in itertools.product(ScaleFormat, ScaleLayout, (64, 128)):
        case = Case(i=640, scale=scale, layout=layout, group=group)
        assert kernel.declines(case, "cpu") is None
    for wrong, sentence in (
        ({"i": 200}, "swiglu_quant has whole groups: I = 200 is not a multiple of 128."),
        ({"group": 32}, "the group must be 64 or 128, not 32."),
    ):
        assert str(kernel.declines(Case(**wrong), "cpu")) == sentence
    for name in ("ours_swiglu_quant_after", "ours_swiglu_quant_limits"):
        declined = find(name).declines(Case(layout=ScaleLayout.COLUMN), "cpu")
        assert str(declined) == "formats and layouts are ours_swiglu_quant's."
