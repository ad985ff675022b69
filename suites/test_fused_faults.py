"""Faults put into our fused SwiGLU and quantization: each is red, and named."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_parity.harness.checks.flow import check
from moe_parity.kernels import find
from moe_parity.references.arithmetic.formats import ScaleFormat, ScaleLayout
from moe_parity.references.language import Case, Values

own = pytest.importorskip("moe_parity.kernels.ours.activation", reason="needs Triton")

from moe_parity.suites.test_fused import gate_up, padding_fault  # noqa: E402

AIMED = Case(m=64, i=256, values=Values.AIMED)


def other_source(old: str, new: str, folder: Path) -> Any:
    """Return the module of the kernels with one line changed."""
    source = Path(own.activation_kernels.__file__).read_text()
    assert old in source
    path = folder / "mutant_fused.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def damaged(monkeypatch: pytest.MonkeyPatch, change: Callable[..., tuple[Any, tuple, dict]]):
    plain = own.dispatch

    def dispatch(kernel, grid, *args, **options):
        kernel, args, options = change(kernel, args, options)
        return plain(kernel, grid, *args, **options)

    monkeypatch.setattr(own, "dispatch", dispatch)


def verdict(name: str, case: Case):
    return next(check(find(name), case, "cpu"))


def test_a_scalar_way_that_divides_is_named(monkeypatch, tmp_path):
    """The vectors beside it stay right."""
    bad = other_source(
        "code = (y * multiplier[:, None])", "code = tl.math.div_rn(y, scale[:, None])", tmp_path
    )

    def change(kernel, args, options):
        return (kernel if options["VECTOR"] else bad.swiglu_quant_kernel), args, options

    damaged(monkeypatch, change)
    case = dataclasses.replace(AIMED, m=160)
    red = verdict("ours_swiglu_quant_scalar", case)
    assert red.verdict == "fail"
    assert "quant.apply=divide" in red.causes, red.message
    assert verdict("ours_swiglu_quant", case).verdict == "pass"


def no_flag(kernel, args, options):
    return kernel, args, {**options, "POWER_OF_TWO": False}


def row_major(kernel, args, options):
    words = 1 if options["PACKED"] else options["WIDTH"] // options["G"]
    return kernel, (*args[:-2], words, 1), options


IGNORED = {
    "format": (no_flag, dataclasses.replace(AIMED, scale=ScaleFormat.UE8M0), "power_lost"),
    "layout": (
        row_major,
        dataclasses.replace(AIMED, layout=ScaleLayout.COLUMN),
        "transposed_scales",
    ),
}


@pytest.mark.parametrize("what", IGNORED)
@pytest.mark.parametrize("name", ["ours_swiglu_quant", "ours_swiglu_quant_scalar"])
def test_a_fused_op_that_ignores_something_is_named(name: str, what: str, monkeypatch):
    change, case, named = IGNORED[what]
    damaged(monkeypatch, change)
    red = verdict(name, case)
    assert red.verdict == "fail"
    assert named in red.causes, red.message


def test_fused_bytes_in_the_wrong_order_are_named(monkeypatch, tmp_path):
    bad = other_source("<< (8 * part)", "<< (24 - 8 * part)", tmp_path)
    damaged(monkeypatch, lambda kernel, args, options: (bad.swiglu_quant_kernel, args, options))
    red = verdict(
        "ours_swiglu_quant",
        dataclasses.replace(AIMED, i=512, scale=ScaleFormat.UE8M0_PACKED),
    )
    assert red.verdict == "fail"
    assert "byte_order" in red.causes, red.message


def test_fused_padding_that_is_not_written_is_named(monkeypatch):
    """The memory that is new held something else before."""
    plain = torch.empty_strided

    def dirty(*args, **words):
        return plain(*args, **words).fill_(7)

    monkeypatch.setattr(torch, "empty_strided", dirty)
    x = gate_up(5, 128, "cpu")

    def scales():
        return own.swiglu_quant(x, None, 0, 1, own.Activation(), layout=ScaleLayout.TMA)[1]

    assert padding_fault(scales()) == ""
    damaged(
        monkeypatch,
        lambda kernel, args, options: (kernel, (*args[:6], args[5], *args[7:]), options),
    )
    assert padding_fault(scales()) == "the padding is not 0."
