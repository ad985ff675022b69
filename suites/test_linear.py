"""Our dense block-FP8 linear: its bits, its launches, what it refuses, and faults put into it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

from moe_parity.harness.cases.grid import param
from moe_parity.harness.cases.shapes import LINEARS
from moe_parity.harness.checks.compare import comparable
from moe_parity.harness.checks.expect import Recorder, expect
from moe_parity.harness.checks.flow import check
from moe_parity.kernels import Call, Kernel, find
from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import f32_to_bf16
from moe_parity.references.chips.hopper import WGMMA_FP8
from moe_parity.references.errors import ParityError
from moe_parity.references.language import (
    Case,
    Hazard,
    ScaleFormat,
    ScaleLayout,
    Values,
)
from moe_parity.references.recipes.ours import OURS
from moe_parity.references.stages import FC1
from moe_parity.references.stages.gemm import reference as gemm
from moe_parity.references.stages.gemm.decisions import GemmRecipe
from moe_parity.references.stages.quant import reference as quant
from moe_parity.references.stages.quant.decisions import QuantRecipe
from moe_parity.suites.planted import kernel_of

ours = pytest.importorskip("moe_parity.kernels.ours.linear", reason="needs Triton")
virtual_gpu = pytest.importorskip("moe_parity.kernels.virtual_gpu", reason="needs Triton")

ONE = Case(m=24, e=1, k=1, h=256, i=65, values=Values.AIMED)
"""N = 130: one tile of the weight and two columns of the next."""


# --- bits ---------------------------------------------------------------------------------------


def cases() -> Iterator[Case]:
    """Rows around every tile, ragged N, both formats, operands that lie elsewhere."""
    for m in (1, 16, 33, 65):
        yield dataclasses.replace(ONE, m=m)
    yield dataclasses.replace(ONE, m=17, scale=ScaleFormat.UE8M0)
    yield dataclasses.replace(ONE, m=5, i=4, h=384, values=Values.NORMAL)
    yield dataclasses.replace(ONE, m=5, values=Values.SCALES)
    for words in ({"hazard": Hazard.STRIDED}, {"layout": ScaleLayout.TMA}):
        yield dataclasses.replace(ONE, m=9, **words)
    # as deep as the seed's shape whose outputs lie near its tolerance
    yield dataclasses.replace(ONE, m=2, h=7168, i=16)


def every_case() -> Iterator[ParameterSet]:
    kernel = find("ours_linear")
    yield from (param(kernel, case) for case in cases())
    # over the CPU's budget: for a GPU
    for shape in LINEARS:
        yield from (param(kernel, shape.case(ONE, m), shape.name) for m in (1, 64))


@pytest.mark.parametrize(("kernel", "case"), list(every_case()))
def test_linear(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    expect(kernel, case, parity_device, parity_recorder)


def operands(m: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Return x bf16 [m, 256] with tiny rows, codes [130, 256] and their scales."""
    x = f32_to_bf16(random_bits.normal(3, "x", m, 256, device=device))
    x[::3] *= 2.0**-100
    made = FC1.inputs(dataclasses.replace(ONE, m=1), device)
    return x, made.w[0], made.w_scale[0]


@pytest.mark.parametrize("power_of_two", [False, True], ids=["fp32", "ue8m0"])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_quantizes_by_our_recipe(power_of_two: bool, biased: bool, parity_device: str):
    """Quantizer, chain, bias and one rounding, each by its reference, into memory of the caller."""
    x, w, w_scale = operands(7, parity_device)
    bias = random_bits.normal(1, "bias", 1, 130, device=parity_device)[0] if biased else None
    out = torch.full((7, 130), float("nan"), dtype=torch.bfloat16, device=parity_device)
    got = ours.linear(x, w, w_scale, power_of_two=power_of_two, bias=bias, out=out)
    assert got is out
    scale = ScaleFormat.UE8M0 if power_of_two else ScaleFormat.FP32
    act = quant.act_quant(x, OURS.of("act_quant", QuantRecipe), scale=scale)
    chain = OURS.of("gemm", GemmRecipe)
    rows = gemm.gemm(act.codes, act.scales, w, w_scale, chain)
    assert torch.equal(comparable(got), comparable(gemm.finish(rows, bias, chain)))


def test_rows_of_a_linear_keep_their_bits_in_any_batch(parity_device: str):
    """Both tiles: 33 rows are 64 to a program, one row is 16."""
    x, w, w_scale = operands(33, parity_device)
    whole = ours.linear(x, w, w_scale)
    for row in (0, 16, 32):
        alone = ours.linear(x[row : row + 1], w, w_scale)
        assert torch.equal(comparable(alone)[0], comparable(whole)[row])


def test_a_linear_of_nothing_is_empty():
    x, w, w_scale = operands(3)
    assert ours.linear(x[:0], w, w_scale).shape == (0, 130)
    assert ours.linear(x, w[:0], w_scale[:0]).shape == (3, 0)


# --- launches -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "block"), [(32, 16), (33, 64)])
def test_a_linear_is_one_launch_after_the_quantization(rows: int, block: int):
    """No alignment; the GEMM is FP8 WGMMA by the PTX that Triton compiles for sm_90."""
    x, w, w_scale = operands(rows)
    codes, scales = torch.zeros(rows, 256).byte(), torch.ones(rows, 2)
    with virtual_gpu.record() as tape:
        ours.linear(x, w, w_scale)
        ours.linear(codes, w, w_scale, x_scale=scales)
    names = [launch.kernel.__name__ for launch in tape.launches]
    assert names == ["act_quant_kernel", "gemm_kernel", "gemm_kernel"]
    launch, report = tape.launches[-1], tape.reports[-1]
    assert launch.options["BLOCK"] == block
    assert report.dot_unit is WGMMA_FP8
    text = virtual_gpu.ptx(launch.kernel, *launch.args, **launch.options)
    assert "wgmma.mma_async.sync.aligned" in text
    assert "fma.rn.f32" in text


# --- what is refused ----------------------------------------------------------------------------


def refused() -> Iterator[ParameterSet]:
    """Yield name, arguments that replace right ones, and the sentence."""
    codes, scales = torch.zeros(4, 256).byte(), torch.ones(4, 2)
    w, w_scale = torch.zeros(130, 256).byte(), torch.ones(2, 2)
    quantized = {"x": codes, "x_scale": scales}
    out = torch.zeros(4, 130, dtype=torch.bfloat16)
    inside = torch.zeros(4 * 256 + 4 * 130 * 2).byte()
    bias = torch.zeros(130)
    many: dict[str, tuple[dict[str, Any], str]] = {
        "codes_alone": (
            {"x": codes},
            "x is codes (uint8) without x_scale; give fp32 [M, K / 128].",
        ),
        "rank": ({"x": codes[0].bfloat16()}, "x must be [M, 256] as w is [130, 256], got [256]."),
        "width": (
            {"x": torch.zeros(4, 128)},
            "x must be [M, 256] as w is [130, 256], got [4, 128].",
        ),
        "fp8": ({"w": w.view(torch.float8_e4m3fn)}, "view FP8 weights as uint8."),
        "w_rows": (
            {"w": torch.zeros(256, 130).byte().t()},
            "contiguous rows, got torch.uint8 [130, 256]",
        ),
        "k": (
            {"w": w[:, :200], "x": torch.zeros(4, 200)},
            "K = 200 is not a positive multiple of 128, the scale's block.",
        ),
        "w_scale": (
            {"w_scale": w_scale[:1]},
            "w_scale must be float32 [2, 2], got torch.float32 [1, 2].",
        ),
        "w_scale_type": (
            {"w_scale": w_scale.double()},
            "w_scale must be float32 [2, 2], got torch.float64",
        ),
        "x_scale": (
            quantized | {"x_scale": scales.t()},
            "x_scale must be float32 [4, 2], got torch.float32 [2, 4].",
        ),
        "not_codes": (
            {"x": codes.bfloat16(), "x_scale": scales},
            "leave x_scale out for x that is not",
        ),
        "x_rows": (
            quantized | {"x": torch.zeros(256, 4).byte().t()},
            "quantized x must be uint8 with contiguous rows",
        ),
        "bias": (
            {"bias": bias[:128]},
            "bias must be contiguous float32 [130], got torch.float32 [128]",
        ),
        "bias_type": (
            {"bias": bias.bfloat16()},
            "bias must be contiguous float32 [130], got torch.bfloat16",
        ),
        "out": (
            {"out": out[:3]},
            "out must be contiguous bfloat16 [4, 130], got torch.bfloat16 [3, 130]",
        ),
        "out_type": (
            {"out": out.float()},
            "out must be contiguous bfloat16 [4, 130], got torch.float32",
        ),
        "out_strides": (
            {"out": torch.zeros(130, 4, dtype=torch.bfloat16).t()},
            "[4, 130] with strides (1, 4).",
        ),
        "memory": (
            quantized
            | {
                "x": inside[: 4 * 256].view(4, 256),
                "out": inside[: 4 * 130 * 2].view(torch.bfloat16).view(4, 130),
            },
            "out and x share memory; give out memory of its own.",
        ),
        "device": (
            {"w_scale": w_scale.to("meta")},
            "w_scale is on meta, w on cpu; use one device.",
        ),
    }
    for name, (changes, sentence) in many.items():
        given = {"x": codes.bfloat16(), "w": w, "w_scale": w_scale} | changes
        yield pytest.param(given, sentence, id=name)


@pytest.mark.parametrize(("given", "sentence"), list(refused()))
def test_a_linear_refuses_in_a_sentence(given: dict[str, Any], sentence: str):
    pattern = rf"^linear: .*{re.escape(sentence)}"
    with pytest.raises(ParityError, match=pattern):
        ours.linear(**given)


def test_our_linear_declines_what_is_no_dense_linear():
    kernel = find("ours_linear")
    for words in ({"e": 2}, {"k": 2, "e": 2}, {"e": 2, "ep_size": 2}):
        reason = kernel.declines(dataclasses.replace(ONE, **words), "cpu")
        assert str(reason) == "one expert and one choice: a dense linear."
    reason = kernel.declines(dataclasses.replace(ONE, h=336), "cpu")
    assert str(reason) == "K = 336 must be a multiple of 128."


# --- faults put into it -------------------------------------------------------------------------

Change = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(x, w, w_scale) of a call -> those that a wrong linear reads."""
SQUARE = Case(m=8, e=1, k=1, h=512, i=256, values=Values.AIMED)
RAGGED = Case(m=8, e=1, k=1, h=512, i=150, values=Values.AIMED)
"""N = 300: two full tiles and a ragged one."""


def transposed(x: Tensor, w: Tensor, w_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x, w, w_scale.t()


def of_the_tile_before(x: Tensor, w: Tensor, w_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Give the last tile, which is ragged, the scales of the one before."""
    return x, w, torch.cat([w_scale[:-1], w_scale[-2:-1]])


def tail_lost(x: Tensor, w: Tensor, w_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x[:, :-128], w[:, :-128], w_scale[:, :-1]


@pytest.mark.parametrize(
    ("change", "case", "name"),
    [
        (transposed, SQUARE, "transposed_scales"),
        (of_the_tile_before, RAGGED, "scale_of_neighbour"),
        (tail_lost, SQUARE, "k_tail"),
    ],
)
def test_a_wrong_linear_is_red_and_named(change: Change, case: Case, name: str):
    def wrong(call: Call) -> Tensor:
        given = call.inputs
        x, w, w_scale = change(given.a, given.w[0], given.w_scale[0])
        scales = given.a_scale[:, : x.shape[1] // 128]
        out = call.new("rows")
        ours.linear(x, w, w_scale, x_scale=scales, out=out)
        return out

    verdict = next(check(kernel_of("fc1", wrong), case, "cpu"))
    assert verdict.failed
    assert name in verdict.causes, verdict.message
