"""Grids of test parameters: kernels of a stage by cases, with ids and marks that say so."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from moe_parity.kernels import Kernel, all_kernels
from moe_parity.references.language import Case, InputDtype, ScaleFormat, ScaleLayout, Stage

FULL = tuple(InputDtype)


def params(stages: Stage[Any] | Iterable[Stage[Any]], cases: Iterable[Case]) -> list[ParameterSet]:
    """Return (kernel, case) parameters for all kernels of some stages.

    Cases that a kernel takes nowhere are left out; a kernel that cannot run here keeps one, so that
    the report says why.
    """
    wanted = [stages] if isinstance(stages, Stage) else list(stages)
    listed = list(cases)
    found = []
    for kernel in all_kernels():
        if kernel.stage in wanted:
            own = [case for case in listed if taken(kernel, case)]
            found += [param(kernel, case) for case in (own[:1] if kernel.unavailable() else own)]
    return found


def each(stage: Stage[Any]) -> list[ParameterSet]:
    """Return a parameter for each kernel of a stage, for tests that choose their own cases."""
    return [
        pytest.param(
            kernel, id=kernel.name, marks=pytest.mark.moe(kernel=kernel.name, stage=stage.name)
        )
        for kernel in all_kernels(stage)
    ]


def taken(kernel: Kernel, case: Case) -> bool:
    """Whether a kernel takes a case on some machine."""
    return any(kernel.declines(case, device) is None for device in ("cpu", "cuda"))


def formats(
    stage: Stage[Any],
    *bases: Case,
    dtypes: Iterable[InputDtype] = FULL,
    layouts: Iterable[ScaleLayout] = tuple(ScaleLayout),
) -> Iterator[Case]:
    """Yield ``bases`` in every scale format, layout and dtype that the stage reads."""
    chosen = tuple(dtypes) if "dtype" in stage.reads else FULL[:1]
    kept = tuple(layouts) if "layout" in stage.reads else (ScaleLayout.ROW,)
    for base, scale, layout, dtype in itertools.product(bases, ScaleFormat, kept, chosen):
        if scale.is_packed and layout is not ScaleLayout.ROW:
            continue  # packed exponents have one layout
        case = dataclasses.replace(base, scale=scale, layout=layout, dtype=dtype)
        if stage.refusal(case) is None:
            yield case


def param(kernel: Kernel, case: Case, *extra: str) -> ParameterSet:
    """Return one (kernel, case) with its id and its ``moe`` mark."""
    mark = pytest.mark.moe(**labels(kernel, case))
    return pytest.param(kernel, case, id="-".join([kernel.name, case.id, *extra]), marks=mark)


def labels(kernel: Kernel, case: Case) -> dict[str, Any]:
    """Return what a test of a kernel on a case is about, as marks and records say it."""
    return {"kernel": kernel.name, **words_of(kernel.stage, case)}


def words_of(stage: Stage[Any], case: Case) -> dict[str, Any]:
    """Return the stage, and the words of a case that it reads, as marks and records say them."""
    words = {"scale": case.scale.value, "layout": case.layout.value, "dtype": case.dtype.value}
    said = {word: value for word, value in words.items() if word in stage.reads}
    if case.mid_scale is not None:
        said["mid"] = case.mid_scale.value
    ep = f"{case.ep_rank}of{case.ep_size}" if case.ep_size > 1 else ""
    return {"stage": stage.name, **said, "clamp": case.clamp, "ep": ep}
