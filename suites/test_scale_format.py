"""The scale formats of a layer: every row of the table, and the bits that come of it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from moe_parity.harness.checks.compare import comparable
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, ScaleFormat
from moe_parity.references.recipes.ours import OURS
from moe_parity.references.stages.layer.inputs import layer_inputs
from moe_parity.references.stages.layer.reference import layer
from moe_parity.suites.scale_formats import (
    CHECKPOINTS,
    DEEP_GEMM,
    EVERY,
    FORMATS,
    ROWS,
    TRITON,
    Row,
    setting_default,
)

moe = pytest.importorskip("moe_parity.kernels.ours.moe", reason="needs Triton")
scale_format = pytest.importorskip("moe_parity.kernels.ours.scale_format", reason="needs Triton")

CASE = Case(m=1, h=128, i=128)
UE8M0 = CHECKPOINTS["ue8m0"]


def row_of(setting: tuple[str, ...]) -> Row:
    """Return the one row that a setting belongs to."""
    (row,) = [row for row in ROWS if setting in set(row.settings())]
    return row


def resolved(which: str, setting: tuple[str, ...], **more: Any) -> Any:
    """Resolve a setting of one quantization, with whatever is set for the other one."""
    own, layer, checkpoint, backend, default = setting
    return scale_format.resolve(
        None if backend == "none" else backend, CHECKPOINTS[checkpoint], default,
        layer=layer or None, **{which: own or None}, **more,
    )  # fmt: skip


default = pytest.fixture(setting_default)


# --- the table -----------------------------------------------------------------------------------


def test_every_setting_has_one_row():
    every = list(EVERY.settings())
    assert len(every) == len(set(every)) == 3 * 3 * 3 * 5 * 2
    assert sorted(s for row in ROWS for s in row.settings()) == sorted(every)


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize(("which", "other"), [("act", "mid"), ("mid", "act")])
def test_row(which: str, other: str, row: Row):
    """Whatever is set for the other quantization, which has the row of its own setting."""
    for setting in row.settings():
        for beside in (None, *FORMATS):
            found = resolved(which, setting, **{other: beside})
            assert getattr(found, which) == row.found
            assert row.because.format(which=which) in found.reason
            assert getattr(found, other) == row_of((beside or "", *setting[1:])).found
            assert found.reason.endswith(".")


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_what_arrives_quantized_has_the_format_of_the_activations(row: Row):
    """Another one is said where it does no harm, and refused where a power of two is read."""
    for setting in row.settings():
        plain = resolved("act", setting)
        same = resolved("act", setting, arriving=row.found)
        assert same == plain
        assert "; the activations arrive quantized so." in same.reason
        if row.found == "fp32":
            powers = resolved("act", setting, arriving="ue8m0")
            assert powers == plain
            assert "; the activations arrive with powers of two, which are" in powers.reason
        else:
            with pytest.raises(ParityError, match="arrive with fp32 scales at a layer of powers"):
                resolved("act", setting, arriving="fp32")


def test_what_arrives_says_nothing_of_the_second_quantization():
    found = scale_format.resolve("deep_gemm", mid="fp32", arriving="ue8m0")
    assert (found.act, found.mid) == ("ue8m0", "fp32")


def test_every_backend_has_rows():
    assert {str(backend) for backend in scale_format.Backend} == {*TRITON, *DEEP_GEMM}


REFUSED = [
    (("marlin",), {}, "backend must be one of 'triton', 'batched_triton', 'deep_gemm', 'batched_"),
    ((None, {"scale_fmt": "e5m2"}), {}, "scale_fmt must be 'ue8m0' or left out, got 'e5m2'"),
    ((None, {"quantization_config": UE8M0}), {}, "a whole config: pass its 'quantization_config'"),
    ((None, "ue8m0"), {}, "checkpoint must be a quantization config, got 'ue8m0'"),
    ((None, None, "bf16"), {}, "default must be one of 'fp32', 'ue8m0', got 'bf16'"),
    *(
        ((), {word: "ue8m0packed"}, f"{word} must be one of 'fp32', 'ue8m0', got 'ue8m0packed'")
        for word in ("layer", "act", "mid", "arriving")
    ),
]


@pytest.mark.parametrize(("given", "named", "sentence"), REFUSED)
def test_an_unknown_word_is_refused_with_those_that_are_known(given, named, sentence):
    with pytest.raises(ParityError, match=sentence):
        scale_format.resolve(*given, **named)


def test_formats_are_compared_without_their_reasons():
    one = scale_format.resolve("triton")
    assert one == scale_format.LayerFormats(act="fp32", mid=ScaleFormat.FP32)
    assert one.reason == "the triton backend reads fp32 scales."
    with pytest.raises(ParityError, match="scale format: mid must be one of 'fp32', 'ue8m0'"):
        scale_format.LayerFormats(act="fp32", mid="ue8m0packed")


# --- the global default --------------------------------------------------------------------------


def test_the_default_is_read_once(default, monkeypatch):
    default("1")
    assert scale_format.default_format() is ScaleFormat.UE8M0
    monkeypatch.setenv(scale_format.DEFAULT, "0")
    assert scale_format.default_format() is scale_format.resolve().act is ScaleFormat.UE8M0
    default("0")
    assert scale_format.default_format() is scale_format.resolve().mid is ScaleFormat.FP32
    default("yes")
    with pytest.raises(ParityError, match="MOE_PARITY_UE8M0 must be 0 or 1, got 'yes'"):
        scale_format.default_format()


def test_the_default_is_fp32(default, monkeypatch):
    default("1")
    monkeypatch.delenv(scale_format.DEFAULT)
    scale_format.default_format.cache_clear()
    assert scale_format.default_format() is ScaleFormat.FP32


# --- the bits of a layer -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(parity_device: str):
    return layer_inputs(CASE, parity_device)


def run(made, **options):
    batch = made.batch
    return moe.run_stages(batch.x, batch.ids, batch.weights, made.experts, **options)


def expected(made, act: str, mid: str):
    asked = dataclasses.replace(made.asked, scale=ScaleFormat(act), mid=ScaleFormat(mid))
    return layer(dataclasses.replace(made, asked=asked), OURS)


def same(got, want) -> bool:
    """Whether every tensor of two traces has the same bits."""
    pairs = zip(vars(got).values(), vars(want).values(), strict=True)
    return all(torch.equal(comparable(one), comparable(other)) for one, other in pairs)


def test_the_formats_show_in_these_inputs(made):
    """No two of the four answers have the same scales in both places."""
    traces = [expected(made, *both) for both in itertools.product(FORMATS, repeat=2)]
    found = {tuple(float(x) for x in (t.act_scales, t.mid_scales)) for t in traces}
    assert len(found) == 4


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize(("which", "other"), [("act", "mid"), ("mid", "act")])
def test_the_bits_of_a_row(which: str, other: str, row: Row, made):
    """The scales of a row's format come out of ``run_moe``, those of the other one beside them."""
    setting = list(row.settings())[-1]
    beside = "fp32" if row.found == "ue8m0" else "ue8m0"
    found = resolved(which, setting, **{other: beside})
    want = expected(made, **{which: row.found, other: beside})
    assert same(run(made, formats=found), want)


@pytest.mark.parametrize("word", ["0", "1"])
def test_what_is_not_said_is_the_default(word: str, default, made):
    """Of either quantization, and of both; what is said of one is that."""
    default(word)
    form = FORMATS[int(word)]
    assert same(run(made), expected(made, form, form))
    other = FORMATS[1 - int(word)]
    said = run(made, mid_power_of_two=other == "ue8m0")
    assert same(said, expected(made, form, other))


@pytest.mark.parametrize("formats", list(itertools.product(FORMATS, repeat=2)), ids="-".join)
def test_an_explicit_layer_is_the_same_under_both_defaults(formats, default, made):
    """Said as formats of the layer, or as flags of the call."""
    act, mid = formats
    want = expected(made, act, mid)
    flags = {"power_of_two": act == "ue8m0", "mid_power_of_two": mid == "ue8m0"}
    for word in ("0", "1"):
        default(word)
        assert same(run(made, formats=scale_format.resolve(act=act, mid=mid)), want)
        assert same(run(made, **flags), want)


def test_a_call_says_its_formats_in_one_way(made):
    formats = scale_format.resolve("triton")
    for flag in ("power_of_two", "mid_power_of_two"):
        with pytest.raises(ParityError, match="formats says both scale formats; leave out power_"):
            run(made, formats=formats, **{flag: False})
    with pytest.raises(ParityError, match="formats must be LayerFormats, got 'fp32'"):
        run(made, formats="fp32")


@pytest.mark.parametrize("act", FORMATS)
def test_activations_that_arrive_quantized_are_taken_as_they_are(act: str, made):
    """The same bits as if the layer had quantized them; the second format is the layer's own."""
    want = expected(made, act, "ue8m0")
    batch = dataclasses.replace(made.batch, x=want.act_codes)
    arrived = dataclasses.replace(made, batch=batch)
    formats = scale_format.resolve(act=act, mid="ue8m0", arriving=act)
    got = run(arrived, x_scale=want.act_scales, formats=formats, validate=True)
    assert same(got, want)


def test_fp32_scales_that_arrive_at_a_layer_of_powers_are_one_error(made):
    """Only where values are looked at: a call that looks at none waits for no GPU."""
    quantized = expected(made, "fp32", "fp32")
    batch = dataclasses.replace(made.batch, x=quantized.act_codes)
    arrived, scales = dataclasses.replace(made, batch=batch), quantized.act_scales
    formats = scale_format.resolve("deep_gemm")
    run(arrived, x_scale=scales, formats=formats)
    bits = int(scales.view(torch.int32)[0, 0])
    words = (
        rf"^x_scale\[0, 0\] is .* \(0x{bits:08x}\), expected a power of two, the format of the "
        r"layer's activations: the deep_gemm backend reads powers of two\.$"
    )
    with pytest.raises(ParityError, match=words):
        run(arrived, x_scale=scales, formats=formats, validate=True)
    powers = expected(made, "ue8m0", "ue8m0").act_scales
    run(arrived, x_scale=powers, formats=scale_format.resolve("triton"), validate=True)


# --- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["w13", "w2"])
def test_a_checkpoint_that_says_ue8m0_and_holds_none_is_one_error(name: str, parity_device: str):
    """Named by the expert's global id, the tile, the value and its bits."""
    case = Case(e=4, i=128, h=256, ep_rank=1, ep_size=2, scale=ScaleFormat.UE8M0)
    experts = layer_inputs(case, parity_device, spoil=False).experts
    for checkpoint in CHECKPOINTS.values():
        assert moe.register_experts(experts, checkpoint) is experts
    scales = getattr(experts, f"{name}_scale").clone()
    scales[1, 1, 0] = 0.01171875  # 0x3c400000, half-way between two powers
    broken = dataclasses.replace(experts, **{f"{name}_scale": scales})
    sentence = (
        rf"^{name}_scale\[1, 1, 0\] is 0\.0117188 \(0x3c400000\), expected a power of two in tile "
        r"\[1, 0\] of expert 3: the checkpoint says scale_fmt ue8m0\.$"
    )
    with pytest.raises(ParityError, match=sentence):
        moe.register_experts(broken, UE8M0)
    assert moe.register_experts(broken, CHECKPOINTS["silent"]) is broken
    assert moe.register_experts(broken) is broken


def test_the_smallest_exponent_of_a_checkpoint_is_a_power_of_two(parity_device: str):
    """Byte 0 of UE8M0 is 2^-127, subnormal in fp32; 2^-128 is no byte's."""
    experts = layer_inputs(
        dataclasses.replace(CASE, scale=ScaleFormat.UE8M0), parity_device
    ).experts
    for power, fits in ((-126, True), (-127, True), (-128, False)):
        scales = torch.full_like(experts.w2_scale, 2.0**power)
        small = dataclasses.replace(experts, w2_scale=scales)
        if fits:
            assert moe.register_experts(small, UE8M0) is small
        else:
            with pytest.raises(ParityError, match="expected a power of two in tile"):
                moe.register_experts(small, UE8M0)
