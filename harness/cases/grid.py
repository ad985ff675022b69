"""The grid of a quantization suite: kernels by scale format, layout and input type."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet

from moe_parity.kernels import Kernel, all_kernels
from moe_parity.references.language import Case, InputDtype, ScaleFormat, ScaleLayout, Stage

FULL = tuple(InputDtype)


def quant_params(
    stage: Stage, *bases: Case, dtypes: Iterable[InputDtype] = FULL, layouts: bool = True
) -> list[ParameterSet]:
    """Return (kernel, case) parameters around each of ``bases``, with ids and ``moe`` marks.

    Combinations that a kernel supports nowhere are left out; a kernel that cannot run here keeps
    one, so that the report says why.
    """
    params = []
    for kernel in all_kernels(stage):
        cases = [c for base in bases for c in _supported(kernel, base, tuple(dtypes), layouts)]
        params += [_param(kernel, case) for case in (cases[:1] if kernel.unavailable() else cases)]
    return params


def _supported(
    kernel: Kernel, base: Case, dtypes: tuple[InputDtype, ...], layouts: bool
) -> Iterable[Case]:
    grid = itertools.product(ScaleFormat, ScaleLayout, dtypes)
    for scale, layout, dtype in grid:
        if layout is not ScaleLayout.ROW and (not layouts or scale is ScaleFormat.UE8M0_PACKED):
            continue  # packed exponents have one layout
        case = dataclasses.replace(base, scale=scale, layout=layout, dtype=dtype)
        if not all(kernel.supports(case, device) for device in ("cpu", "cuda")):
            yield case


def _param(kernel: Kernel, case: Case) -> ParameterSet:
    mark = pytest.mark.moe(
        kernel=kernel.name,
        stage=kernel.stage.value,
        scale=case.scale.value,
        layout=case.layout.value,
        dtype=case.dtype.value,
    )
    return pytest.param(kernel, case, id=f"{kernel.name}-{case.id}", marks=mark)
