"""Stages ``swiglu`` and ``swiglu_quant``: the gated activation, with and without quantization."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest

from moe_parity.harness.cases.grid import params
from moe_parity.harness.checks.expect import Recorder, expect
from moe_parity.harness.session import environment
from moe_parity.kernels import Kernel
from moe_parity.references.arithmetic.formats import BLOCK
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
        yield dataclasses.replace(case, m=32, values=Values.SPECIAL)
    for scale, m in itertools.product(ScaleFormat, (1, 37, 130)):
        yield dataclasses.replace(BASE, m=m, scale=scale, i=640)
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
