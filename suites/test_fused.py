"""Our fused SwiGLU and quantization: both ways to the rows, every format, layout and fallback."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_parity.harness.checks.compare import comparable
from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import (
    ScaleFormat,
    ScaleLayout,
    f32_to_bf16,
    pack_ue8m0,
    to_f32,
    ue8m0_encode,
)
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case
from moe_parity.references.recipes.ours import OURS, OURS_AFTER
from moe_parity.references.stages.layer.inputs import layer_inputs
from moe_parity.references.stages.quant.decisions import QuantRecipe
from moe_parity.references.stages.quant.reference import act_quant
from moe_parity.references.stages.swiglu.decisions import SwigluRecipe
from moe_parity.references.stages.swiglu.reference import swiglu

own = pytest.importorskip("moe_parity.kernels.ours.activation", reason="needs Triton")
fallbacks = pytest.importorskip("moe_parity.kernels.ours.silu_mul_quant", reason="needs Triton")
moe = pytest.importorskip("moe_parity.kernels.ours.moe", reason="needs Triton")
virtual_gpu = pytest.importorskip("moe_parity.kernels.virtual_gpu", reason="needs Triton")

WORDS = {"limit": None, "alpha": 1.0, "beta": 0.0}


def gate_up(rows: int, width: int, device: str) -> Tensor:
    return f32_to_bf16(4.0 * random_bits.normal(7, "fused", rows, 2 * width, device=device))


def quantized(y: Tensor, group: int, scale: ScaleFormat) -> tuple[Tensor, Tensor]:
    """Return codes and scales, as the format stores them, of fp32 rows whose last group is ragged.

    A ragged group is one with zeros in the places that it lacks.
    """
    width = y.shape[1]
    whole = torch.nn.functional.pad(y, (0, -width % group))
    made = act_quant(whole, OURS.of("swiglu_quant", QuantRecipe), group=group, scale=scale)
    scales = pack_ue8m0(ue8m0_encode(made.scales)) if scale.is_packed else made.scales
    return made.codes[:, :width], scales


def products(x: Tensor, clamp: str = "before", **words: Any) -> Tensor:
    recipe = OURS_AFTER if clamp == "after" else OURS
    return swiglu(x, recipe.of("swiglu", SwigluRecipe), **{**WORDS, **words})


def padding_fault(scales: Tensor) -> str:
    """Return what is wrong with the rows that TMA reads beside the live ones, or nothing."""
    rows, pitch = scales.shape[0], scales.stride(1)
    if pitch != -(-rows // 4) * 4:
        return f"the pitch of {rows} rows is {pitch}."
    whole = torch.as_strided(scales, (pitch, scales.shape[1]), (1, pitch))
    return "" if not bool(whole[rows:].any()) else "the padding is not 0."


LAID = [(s, y) for s, y in itertools.product(ScaleFormat, ScaleLayout)]


@pytest.mark.parametrize(("scale", "layout"), LAID, ids=lambda word: word.value)
@pytest.mark.parametrize("group", [64, 128])
def test_vectors_and_scalars_agree_in_every_format_and_layout(
    group: int, scale: ScaleFormat, layout: ScaleLayout, parity_device: str
):
    """Five rows of five groups: no whole tile, no whole word, three rows of padding."""
    x = gate_up(5, 5 * group, parity_device)
    codes, scales = quantized(products(x, limit=9.97), group, scale)
    how = own.Activation(clamp="before", limit=9.97)
    _, strides, dtype = scale.stored(5, 5, layout)
    for vector in (True, False):
        got = own.swiglu_quant(
            x, None, 0, 1, how, group=group, scale=scale, layout=layout, vector=vector
        )
        assert torch.equal(got[0], codes)
        assert torch.equal(comparable(got[1]), comparable(scales))
        assert (got[1].dtype, got[1].stride()) == (dtype, strides)
        if scale.is_packed or layout is ScaleLayout.TMA:
            assert padding_fault(got[1]) == ""


@pytest.mark.parametrize("clamp", ["before", "after"])
@pytest.mark.parametrize("limit", [0.1, 1.0115, 7.0])
def test_the_limit_of_both_ways_is_no_bf16_number(clamp: str, limit: float, parity_device: str):
    x = gate_up(3, 128, parity_device)
    codes, scales = quantized(products(x, clamp, limit=limit), 128, ScaleFormat.FP32)
    for vector in (True, False):
        how = own.Activation(clamp=clamp, limit=limit)
        got = own.swiglu_quant(x, None, 0, 1, how, vector=vector)
        assert torch.equal(got[0], codes)
        assert torch.equal(comparable(got[1]), comparable(scales))


def laid(x: Tensor, how: str) -> Tensor:
    """Return the same rows elsewhere in memory, NaN between them."""
    rows, width = x.shape
    if how == "columns":
        return x.t().contiguous().t()
    start, pitch = {"offset": (1, width), "pitch": (0, width + 3), "gaps": (0, width + 8)}[how]
    memory = torch.full((start + rows * pitch,), float("nan"), dtype=x.dtype, device=x.device)
    view = memory[start:].view(rows, pitch)[:, :width]
    view.copy_(x)
    return view


@pytest.mark.parametrize("how", ["offset", "pitch", "gaps", "columns"])
def test_fused_rows_lie_anywhere(how: str, parity_device: str):
    """What vectors do not reach is read by scalars, with the bits of contiguous rows."""
    x = gate_up(5, 256, parity_device)
    rows = laid(x, how)
    assert own.takes_vectors(rows, 128) == (how == "gaps")
    want = own.swiglu_quant(x, None, 0, 1, own.Activation())
    with virtual_gpu.record() as tape:
        got = own.swiglu_quant(rows, None, 0, 1, own.Activation())
    assert [launch.options["VECTOR"] for launch in tape.launches] == [how == "gaps"]
    for one, other in zip(got, want, strict=True):
        assert torch.equal(comparable(one), comparable(other))
    plain = [comparable(own.swiglu(r, None, 0, 1, own.Activation())) for r in (rows, x)]
    assert torch.equal(*plain)
    if how != "gaps":
        with pytest.raises(ParityError, match="vectors need whole groups of 128 in contiguous"):
            own.swiglu_quant(rows, None, 0, 1, own.Activation(), vector=True)


@pytest.mark.parametrize("width", [1, 63, 200])
def test_scalars_of_the_fused_kernel_take_any_width(width: int, parity_device: str):
    x = gate_up(3, width, parity_device)
    for scale in (ScaleFormat.FP32, ScaleFormat.UE8M0_PACKED):
        codes, scales = quantized(products(x), 64, scale)
        got = own.swiglu_quant(x, None, 0, 1, own.Activation(), group=64, scale=scale)
        assert torch.equal(got[0], codes)
        assert torch.equal(comparable(got[1]), comparable(scales))


@pytest.mark.parametrize("vector", [True, False], ids=["vector", "scalar"])
@pytest.mark.parametrize("scale", list(ScaleFormat), ids=lambda s: s.value)
def test_fused_outputs_of_the_caller_keep_their_strides_and_surroundings(
    scale: ScaleFormat, vector: bool, parity_device: str
):
    """Rows of codes with gaps, scales of an odd pitch: nothing beside their elements changes."""
    x = gate_up(5, 256, parity_device)
    wanted = quantized(products(x), 64, scale)
    shape, _, dtype = scale.stored(5, 4, ScaleLayout.ROW)
    memory = torch.full((5, 300), 0x5C, dtype=torch.uint8, device=parity_device)
    wide = torch.full((shape[1], 11), -7, dtype=dtype, device=parity_device)
    codes, scales = memory[:, :256], wide.t()[2:7]
    own.swiglu_quant(
        x, None, 0, 1, own.Activation(), group=64, scale=scale, codes=codes, scales=scales,
        vector=vector,
    )  # fmt: skip
    assert torch.equal(codes, wanted[0])
    assert torch.equal(comparable(scales), comparable(wanted[1]))
    assert bool((memory[:, 256:] == 0x5C).all())
    assert bool((wide[:, :2] == -7).all())
    assert bool((wide[:, 7:] == -7).all())


def test_fused_outputs_that_do_not_fit_are_refused():
    x, how = gate_up(4, 128, "cpu"), own.Activation()
    for words, sentence in (
        ({"group": 32}, "swiglu_quant: group must be 64 or 128, got 32"),
        ({"codes": torch.zeros(4, 64).byte()}, r"codes must be torch.uint8 \[4, 128\]"),
        ({"scales": torch.zeros(4, 1).int()}, r"scales must be torch.float32 \[4, 1\]"),
        ({"scales": torch.zeros(1, 1).expand(4, 1)}, "elements of scales overlap"),
    ):
        with pytest.raises(ParityError, match=sentence):
            own.swiglu_quant(x, None, 0, 1, how, **words)
    with pytest.raises(ParityError, match=r"rows must be bfloat16 \[P, 2 I\]"):
        own.swiglu_quant(x.float(), None, 0, 1, how)
    with pytest.raises(ParityError, match="there are 4 rows and 3 ids"):
        own.swiglu_quant(x, torch.zeros(3).int(), 0, 1, how)
    with pytest.raises(ParityError, match="a limit for each expert needs the ids"):
        own.swiglu(x, None, 0, 1, own.Activation(clamp="before", limits=torch.ones(1)))
    with pytest.raises(ParityError, match="group must be a positive number, got 0"):
        own.quant_rows(x, None, 0, 1, group=0)


# --- what is not fused --------------------------------------------------------------------------


def gelu(x: Tensor) -> Tensor:
    """By its definition, in float64: torch's fp32 function rounds to the same BF16 numbers here."""
    gate, up = to_f32(x).double().chunk(2, dim=1)
    value = (gate * 0.5 * (1.0 + torch.erf(gate / 2.0**0.5))).float()
    return to_f32(f32_to_bf16(value * up.float()))


def relu2(x: Tensor) -> Tensor:
    gate, up = to_f32(x).chunk(2, dim=1)
    value = torch.where(gate > 0, gate, torch.zeros_like(gate))
    return to_f32(f32_to_bf16(value * value * up))


UNFUSED: dict[str, tuple[int, dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "activation": (128, {"activation": "relu2"}, relu2),
    "with_activation": (128, {"with_activation": True}, products),
    "group": (96, {"group": 48}, products),
    "ragged": (200, {}, products),
}


def test_every_fallback_of_the_fused_op_is_tested():
    assert [one.name for one in fallbacks.FALLBACKS] == list(UNFUSED)


@pytest.mark.parametrize("name", UNFUSED)
def test_a_fallback_of_the_fused_op_says_why_once_and_stays_right(
    name: str, parity_device: str, caplog: pytest.LogCaptureFixture
):
    width, words, reference = UNFUSED[name]
    x = gate_up(5, width, parity_device)
    fallbacks.log_once.cache_clear()
    for scale in ScaleFormat:
        with caplog.at_level(logging.INFO, logger="moe_parity"):
            codes, scales, *rest = fallbacks.silu_mul_quant(x, scale=scale, layout="tma", **words)
        y = reference(x)
        want = quantized(y, words.get("group", 128), scale)
        assert torch.equal(codes, want[0])
        assert torch.equal(comparable(scales), comparable(want[1]))
        assert padding_fault(scales) == ""
        assert [torch.equal(to_f32(rows), y) for rows in rest] == [True] * len(rest)
        assert len(rest) == (name == "with_activation")
    (line,) = [record.getMessage() for record in caplog.records]
    reason = next(one.reason for one in fallbacks.FALLBACKS if one.name == name)
    assert line == f"silu_mul_quant runs unfused: {reason}."


def test_what_the_fused_op_can_do_is_fused(parity_device: str, caplog: pytest.LogCaptureFixture):
    """One launch and no word of it; a fallback has two, or one where torch computes the gate."""
    x = gate_up(3, 128, parity_device)
    fallbacks.log_once.cache_clear()
    options = {"limit": 0.1, "clamp": "after", "alpha": 1.702, "beta": 1.0, "group": 64}
    with caplog.at_level(logging.INFO, "moe_parity"), virtual_gpu.record() as tape:
        codes, scales = fallbacks.silu_mul_quant(x, **options)
    assert [launch.kernel.fn.__name__ for launch in tape.launches] == ["swiglu_quant_kernel"]
    assert not caplog.records
    y = products(x, "after", limit=0.1, alpha=1.702, beta=1.0)
    want = quantized(y, 64, ScaleFormat.FP32)
    assert torch.equal(codes, want[0])
    assert torch.equal(comparable(scales), comparable(want[1]))
    with virtual_gpu.record() as tape:
        fallbacks.silu_mul_quant(x, **options, with_activation=True)
    names = [launch.kernel.fn.__name__ for launch in tape.launches]
    assert names == ["swiglu_kernel", "quant_rows_kernel"]


def test_other_activations_of_the_unfused_op_clamp_and_shift(parity_device: str):
    x = gate_up(3, 128, parity_device)
    codes, _ = fallbacks.silu_mul_quant(x, activation="gelu")
    assert torch.equal(codes, quantized(gelu(x), 128, ScaleFormat.FP32)[0])
    gate, up = to_f32(x).chunk(2, dim=1)
    up = torch.minimum(torch.maximum(up, torch.tensor(-3.0)), torch.tensor(3.0)) + 1.0
    for clamp in ("before", "after"):
        positive = torch.where(gate > 0, gate, torch.zeros_like(gate))
        if clamp == "before":
            positive = torch.where(positive > 3.0, torch.tensor(3.0), positive)
        value = positive * positive
        if clamp == "after":
            value = torch.where(value > 3.0, torch.tensor(3.0), value)
        y = to_f32(f32_to_bf16(value * up))
        got = fallbacks.silu_mul_quant(x, activation="relu2", limit=3.0, clamp=clamp, beta=1.0)
        assert torch.equal(got[0], quantized(y, 128, ScaleFormat.FP32)[0])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"activation": "tanh"}, "activation must be one of 'silu', 'gelu', 'relu2', got 'tanh'"),
        ({"activation": "gelu", "alpha": 2.0}, "alpha is SiLU's own, gelu has none"),
        ({"limit": 0.0}, "limit must be positive, got 0.0"),
        ({"clamp": "never"}, "clamp must be 'before' or 'after', got 'never'"),
        ({"group": 0}, "group must be a positive number, got 0"),
        ({"scale": "fp8"}, "scale must be one of"),
    ],
)
def test_what_the_fused_op_refuses(words: dict[str, Any], sentence: str):
    with pytest.raises(ParityError, match=f"^silu_mul_quant: {sentence}"):
        fallbacks.silu_mul_quant(gate_up(2, 128, "cpu"), **words)
    with pytest.raises(ParityError, match=r"^silu_mul_quant: x must be bfloat16 \[P, 2 I\]"):
        fallbacks.silu_mul_quant(torch.zeros(2, 256))


def test_the_docs_list_what_is_not_fused():
    page = Path(__file__).resolve().parent.parent / "docs" / "dispatch.md"
    if not page.exists():
        pytest.skip("the docs are not installed with the package")
    assert fallbacks.table() in page.read_text()


# --- the layer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["decode", "large"])
def test_a_fused_layer_has_one_launch_fewer_and_the_same_bits(path: str, parity_device: str):
    """Foreign pairs among them; the second quantization has another format than the first."""
    made = layer_inputs(Case(m=5, e=4, k=2), parity_device, spoil=False)
    batch, names, traces = made.batch, [], []
    ids = batch.ids.clone()
    ids[0, 0], ids[1, 1] = -1, 9
    for fused in (True, False):
        with virtual_gpu.record() as tape:
            traces.append(
                moe.run_stages(
                    batch.x, ids, batch.weights, made.experts, path=path, limit=0.5,
                    mid_power_of_two=True, fused=fused,
                )
            )  # fmt: skip
        names.append([launch.kernel.fn.__name__ for launch in tape.launches])
    assert len(names[0]) == len(names[1]) - 1
    assert names[0].count("swiglu_quant_kernel") == 1
    assert [n for n in names[1] if n not in names[0]] == ["swiglu_kernel", "quant_rows_kernel"]
    live = ((ids >= 0) & (ids < 4)).flatten()
    for name in ("mid_codes", "mid_scales", "fc2"):
        one, two = (comparable(getattr(trace, name)[live]) for trace in traces)
        assert torch.equal(one, two), name
    assert torch.equal(comparable(traces[0].out), comparable(traces[1].out))
