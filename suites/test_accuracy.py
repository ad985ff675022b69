"""The accuracy table of seed 000 and its near-tolerance shape: their layers, norms and data."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from moe_parity.harness.cases.shapes import MODELS
from moe_parity.harness.evidence import accuracy, near_tolerance
from moe_parity.harness.evidence.accuracy import Error, Setting, errors, subjects
from moe_parity.harness.evidence.near_tolerance import BF16_SILU, FP32_SILU, How, Sizes
from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import E4M3, ScaleFormat, f32_to_bf16, to_f32
from moe_parity.references.errors import ParityError
from moe_parity.references.stages.layer.operands import Asked, Experts, LayerInputs, Routed
from moe_parity.references.stages.layer.reference import layer

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs/measurements/data/accuracy-2026-11-30.jsonl"
NEAR = ROOT / "docs/measurements/data/near-tolerance-2026-11-30.jsonl"
CUT = Setting(h=1024, i=256, e=8, k=4, w=6**0.5 / 15)
"""Part of the seed's shape; the weights are larger, so that gates are as at H = 6144."""


def lower_everywhere(found: list[Error]) -> list[str]:
    """Return where fp32 scales have no lower error than powers of two in the same layer."""
    by = {(e.subject, e.m, e.against, e.scale): e.l2 for e in found}
    own = {key[:3] for key in by if key[3] == "ue8m0"}
    return [
        f"{name} at M = {m} against {against}"
        for name, m, against in sorted(own)
        if not by[name, m, against, "fp32"] < by[name, m, against, "ue8m0"]
    ]


# --- the table ----------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def cut() -> list[Error]:
    """Return the errors of the cut at 8 and 32 tokens."""
    return list(errors(CUT, list(subjects([8, 32], [8])), sample=32))


def test_fp32_scales_have_the_lower_error_on_a_cut_of_the_shape():
    computed = {(e.subject, e.m) for e in cut()}
    assert computed >= {("vllm_triton", 8), ("vllm_triton", 32), ("ours", 8)}
    assert lower_everywhere(cut()) == []


def test_fp32_scales_have_the_lower_error_at_every_m_of_the_committed_table():
    found = accuracy.read(DATA)
    assert {e.m for e in found} == set(accuracy.TOKENS)
    assert lower_everywhere(found) == []


def test_the_committed_table_is_what_the_program_computes():
    """One token at the full shape, eight of the 256 experts: to the digits of the page."""
    asked = [s for s in subjects([1], []) if s.name == "vllm_triton"]
    made = {(e.scale, e.against): e.l2 for e in errors(Setting(), asked)}
    kept = {
        (e.scale, e.against): e.batches[0]
        for e in accuracy.read(DATA) if (e.subject, e.m) == ("vllm_triton", 1)
    }  # fmt: skip
    assert {key: f"{value:.4f}" for key, value in made.items()} == {
        key: f"{value:.4f}" for key, value in kept.items()
    }


def test_the_norms_are_those_of_their_words():
    got = torch.tensor([[3.0, 0.0], [1.0, -2.0]]).double()
    want = torch.tensor([[3.0, 4.0], [0.0, 0.0]]).double()
    subject = next(subjects([2], []))
    error = accuracy._error(subject, 2, "bf16", [(got, want)])
    assert (error.l2, error.mean, error.max) == ((16 + 1 + 4) ** 0.5 / 5, 7 / 7, 4 / 4)
    twice = accuracy._error(subject, 2, "bf16", [(got, want), (want, want)])
    assert twice.batches == (error.l2, 0.0)
    assert twice.l2 == error.l2 / 2
    assert twice.max == 0.5


def test_a_batch_is_the_start_of_a_larger_one():
    """What M = 8 alone gives is the first of its batches beside 32 tokens."""
    alone = list(errors(CUT, list(subjects([8], [8]))))
    beside = {(e.subject, e.scale, e.against): e for e in cut() if e.m == 8}
    assert len(alone) == len(beside) == 10
    for error in alone:
        assert len(error.batches) == 1
        other = beside[error.subject, error.scale, error.against]
        assert f"{error.batches[0]:.4f}" == f"{other.batches[0]:.4f}", error
    assert {len(e.batches) for e in beside.values() if e.subject != "ours"} == {4}


def test_a_large_batch_is_sampled_evenly():
    assert list(accuracy.sampled(5, 8)) == [0, 1, 2, 3, 4]
    assert list(accuracy.sampled(16, 4)) == [0, 4, 8, 12]
    tokens = torch.tensor([0, 1, 2, 3, 4, 8, 12])
    assert [part.tolist() for part in accuracy._batches(tokens, 16, 4)] == [[0, 4, 5, 6]]
    assert [part.tolist() for part in accuracy._batches(tokens, 2, 4)] == [[0, 1], [2, 3]]


def test_its_layers_are_those_of_the_reference():
    """Expert by expert, FC1 shared where it is the same, the bits are those of the whole layer."""
    setting = Setting(h=256, i=128, e=4, k=2)
    batch = accuracy._Batch.drawn(setting, list(range(6)), 6)
    asked = list(subjects([6, 65], [6]))
    assert len({s.recipe.name for s in asked}) == 5
    runs = [accuracy._Run(subject, batch, torch.arange(6)) for subject in asked]
    made = [accuracy._Expert(setting, e) for e in range(setting.e)]
    for e, expert in enumerate(made):
        kept: dict[object, torch.Tensor] = {}
        for run in runs:
            run.add(e, expert, kept)
        assert len(kept) == 6, "two formats of three orders of scales"
    tensors = {
        f"{name}{part}": torch.stack([getattr(one.quantized[n], field) for one in made])
        for n, name in enumerate(("w13", "w2"))
        for part, field in (("", "codes"), ("_scale", "scales"))
    }
    for run in runs:
        scale = run.subject.scale
        whole = LayerInputs(
            batch=Routed(x=f32_to_bf16(batch.x), ids=batch.ids.int(), weights=batch.weights),
            experts=Experts(**tensors), asked=Asked(scale=scale, mid=scale),
        )  # fmt: skip
        assert torch.equal(run.out(), layer(whole, run.subject.recipe).out), run.subject.name


def test_the_command_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "made.jsonl"
    small = ["--h", "128", "--i", "128", "--e", "2", "--k", "1"]
    assert accuracy.main([*small, "--tokens", "1,2", "--ours", "2", "-o", str(file)]) == 0
    found = accuracy.read(file)
    assert {(e.subject, e.m) for e in found if e.scale == "ue8m0"} == {
        ("vllm_triton", 1), ("vllm_triton", 2), ("ours", 2),
    }  # fmt: skip
    printed = capsys.readouterr().out
    for row in accuracy.cells(found):
        assert all(cell in printed for cell in row)


def test_sizes_that_no_layer_has_are_refused():
    with pytest.raises(ParityError, match=r"H=100 .* H and I in 128s"):
        list(errors(Setting(h=100), list(subjects([1], []))))


def test_rows_from_any_on_are_those_of_the_whole():
    whole = random_bits.normal(3, "rows", 50, 7)
    assert torch.equal(random_bits.normal(3, "rows", 20, 7, first=30), whole[30:])
    word = random_bits.words(3, "rows", 50, 7)
    total = sum((word >> (8 * byte)) & 0xFF for byte in range(8))
    assert torch.equal(whole, (total - 1020).float() * (1.0 / 209.0))


# --- the near-tolerance shape -------------------------------------------------------------------

SMALL = Sizes(m=6, e=2, k=2, i=256, h=256)


def as_the_test_computes(inputs: near_tolerance.Inputs, *, fp32: bool) -> torch.Tensor:
    """Return vLLM's torch reference in plain torch, its tile products in float64."""

    def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        groups = x.unflatten(1, (-1, 128))
        scale = groups.abs().amax(2).clamp(min=1e-10).float() / 448.0
        codes = (groups.float() / scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        return codes.flatten(1).double(), scale

    def product(a: torch.Tensor, s: torch.Tensor, w: torch.Tensor, s_w: torch.Tensor):
        total = torch.zeros(a.shape[0], w.shape[0])
        values = E4M3.decode(w).double()
        for k in range(s.shape[1]):
            cut = slice(128 * k, 128 * (k + 1))
            wide = s_w[:, k].repeat_interleave(128)
            total += (a[:, cut] @ values[:, cut].t()).float() * (s[:, k, None] * wide)
        return total.bfloat16()

    rows = torch.zeros(*inputs.ids.shape, inputs.x.shape[1], dtype=torch.bfloat16)
    for e in range(inputs.w13.codes.shape[0]):
        token, slot = (inputs.ids == e).nonzero(as_tuple=True)
        a, s = quantized(inputs.x[token].bfloat16())
        gate, up = product(a, s, inputs.w13.codes[e], inputs.w13.scales[e]).chunk(2, 1)
        y = torch.nn.functional.silu(gate.float()) * up.float()
        if not fp32:
            y = torch.nn.functional.silu(gate.float()).bfloat16() * up
        a, s = quantized(y)
        rows[token, slot] = product(a, s, inputs.w2.codes[e], inputs.w2.scales[e])
    return (rows * inputs.weights.bfloat16()[..., None]).sum(dim=1)


@pytest.mark.parametrize("how", [BF16_SILU, FP32_SILU], ids=["bf16", "fp32"])
def test_the_tests_reference_is_what_its_torch_code_says(how: How):
    inputs = near_tolerance.inputs_of(SMALL)
    made = near_tolerance.Layers(inputs, ScaleFormat.FP32).outputs(how)[0]
    plain = as_the_test_computes(inputs, fp32=how is FP32_SILU)
    assert int((made != plain.float()).sum()) == 0


@pytest.mark.parametrize("scenario", near_tolerance.SCENARIOS, ids=lambda s: s.name)
def test_its_kernel_is_the_layer_of_its_recipe(scenario: near_tolerance.Scenario):
    inputs = near_tolerance.inputs_of(SMALL)
    got = near_tolerance.Layers(inputs, scenario.scale).outputs(How.of(scenario.kernel))[0]
    experts = Experts(
        w13=inputs.w13.codes, w13_scale=inputs.w13.scales, w2=inputs.w2.codes,
        w2_scale=inputs.w2.scales,
    )  # fmt: skip
    batch = Routed(x=f32_to_bf16(inputs.x), ids=inputs.ids.int(), weights=inputs.weights)
    asked = Asked(scale=scenario.scale, mid=scenario.scale)
    whole = LayerInputs(batch=batch, experts=experts, asked=asked)
    assert torch.equal(got, to_f32(layer(whole, scenario.kernel).out))


@pytest.mark.parametrize("scenario", near_tolerance.SCENARIOS, ids=lambda s: s.name)
def test_each_change_is_one_and_all_together_are_the_kernel(scenario: near_tolerance.Scenario):
    """Fields that no single change touches are the same on both sides, but for SiLU's form."""
    kernel, test = How.of(scenario.kernel), scenario.reference
    *single, (name, whole) = near_tolerance.single_changes(test, kernel)
    assert (name, whole) == ("all of them", kernel)
    assert len({label for label, _ in single}) == len(single) >= 5
    for label, how in single:
        assert how != test, label


def test_the_distance_to_the_tolerance_is_that_of_assert_close():
    want = torch.tensor([0.0, 1.0, -2.0, 4.0])
    for scale, over in ((0.999, 0), (1.001, 4)):
        got = want + scale * (0.035 + 0.035 * want.abs())
        near = near_tolerance.measure("one", "all of them", got, want)
        assert near.over == over
        assert f"{near.worst:.3f}" == f"{scale:.3f}"
        passed = torch.isclose(got, want, atol=0.035, rtol=0.035)
        assert int((~passed).sum()) == over
        assert near.small == 3, "the root mean square is 2.29"


def test_the_largest_tokens_are_those_with_the_largest_weighted_input_of_fc2():
    many = replace(SMALL, m=40)
    whole = near_tolerance.inputs_of(many)
    size = torch.zeros(many.m)
    for token, ids in enumerate(whole.ids.tolist()):
        for slot, e in enumerate(ids):
            w = E4M3.dequantized(whole.w13.codes[e], whole.w13.scales[e], 128, 128)
            gate, up = (whole.x[token].double() @ w.double().t()).chunk(2)
            y = gate * torch.sigmoid(gate) * up * whole.weights[token, slot]
            size[token] = max(size[token], y.abs().max())
    chosen = near_tolerance.inputs_of(replace(many, largest=12))
    tokens = size.topk(12).indices.sort().values
    assert torch.equal(chosen.x, whole.x[tokens])
    assert torch.equal(chosen.ids, whole.ids[tokens])
    assert torch.equal(chosen.weights, whole.weights[tokens])


def test_the_largest_flip_is_what_one_code_does():
    inputs = near_tolerance.inputs_of(SMALL)
    layers = near_tolerance.Layers(inputs, ScaleFormat.FP32)
    read = layers.outputs(BF16_SILU)[1]
    token, slot, where, column = 4, 1, 200, 131
    pair = token * SMALL.k + slot
    codes = read.codes.clone()
    codes[pair, where] ^= 0x80
    expert = int(inputs.ids[token, slot])
    w2 = E4M3.decode(inputs.w2.codes[expert, column, where]) * inputs.w2.scales[expert, 1, 1]
    y = E4M3.decode(read.codes[pair, where]) * read.scales[pair, 1]
    flipped = float((2 * y).abs() * w2.abs() * inputs.weights[token, slot])
    other = near_tolerance.QuantOutput(codes=codes, scales=read.scales)
    assert f"{layers.largest_flip(other, read, token, column):.5e}" == f"{flipped:.5e}"
    assert layers.largest_flip(other, read, token - 1, column) == 0.0


def test_the_committed_distances_are_of_the_shape_in_the_catalogue():
    shape = next(one for one in MODELS if one.name == "near_tolerance")
    lines = [json.loads(line) for line in NEAR.read_text().splitlines()]
    assert {(one["h"], one["i"]) for one in lines} == {(shape.h, shape.i)} == {(7168, 4608)}
    over = {(one["scenario"], one["changed"]): one["over"] for one in lines}
    e8m0, bf16, fp32 = (scenario.name for scenario in near_tolerance.SCENARIOS[:3])
    assert {one["scenario"] for one in lines} == {e8m0, bf16, fp32}
    failing = {key for key, count in over.items() if count}
    assert failing == {
        (bf16, "quant.apply"), (bf16, "swiglu.product_rounding"), (bf16, "all of them"),
        (fp32, "quant.apply"), (fp32, "all of them"),
    }  # fmt: skip
    for one in lines:
        assert (one["worst"] > 1) == (one["over"] > 0), one
