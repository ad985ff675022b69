"""torch's own ``silu(gate) * up``, two roundings: its recipe, its adapter, our kernels' form of it.

On a CPU the adapter is judged by a stand-in; with a GPU torch's kernels are, over every BF16 gate.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from moe_parity.harness.calling.run import run
from moe_parity.harness.checks.compare import comparable
from moe_parity.harness.checks.flow import check
from moe_parity.kernels import Kernel, find
from moe_parity.kernels.vendors.torch_ops import silu_mul as adapter
from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import (
    ScaleFormat,
    ScaleLayout,
    f32_to_bf16,
    from_bits,
    to_f32,
)
from moe_parity.references.chips import special
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Gate, Hazard, Values, Why
from moe_parity.references.recipes.ours import OURS
from moe_parity.references.recipes.pytorch import SILU_AND_MUL
from moe_parity.references.stages import SWIGLU
from moe_parity.references.stages.swiglu.decisions import SwigluRecipe
from moe_parity.references.stages.swiglu.reference import swiglu as swiglu_reference
from moe_parity.references.stages.swiglu.silu import Silu, silu

own = pytest.importorskip("moe_parity.kernels.ours.activation", reason="needs Triton")
fallbacks = pytest.importorskip("moe_parity.kernels.ours.silu_mul_quant", reason="needs Triton")

from moe_parity.kernels.ours import ops, sorted_rows, steps  # noqa: E402
from moe_parity.suites.test_fused import quantized  # noqa: E402

NAME = "torch_silu_mul"
PART = SILU_AND_MUL.of("swiglu", SwigluRecipe)
AIMED = Case(m=64, e=3, i=256, values=Values.AIMED)


def every_gate(device: str, *ups: float) -> Tensor:
    """Rows [256 * ups, 2 * 256]: each of the 65,536 BF16 gates with each up."""
    word = (torch.arange(1 << 16, dtype=torch.int64) << 16).int().view(256, 256)
    parts = [torch.cat((from_bits(word), torch.full((256, 256), up)), 1) for up in ups]
    return torch.cat(parts).to(torch.bfloat16).to(device)


def wanted(rows: Tensor, part: SwigluRecipe = PART) -> Tensor:
    return comparable(f32_to_bf16(swiglu_reference(rows, part)))


# --- torch's kernels ------------------------------------------------------------------------------

UPS = (1.0, -1.0, 1.0078125, 1.2890625, -1.9921875, 3.0e38, 1.0e-38, 0.0)


def test_torchs_silu_of_every_gate_has_the_recipes_bits(parity_gpu: str):
    """One kernel: the quotient rounded to BF16.  Then both, with ups that need the second one."""
    rows = every_gate(parity_gpu, *UPS)
    gate = rows[:256, :256].contiguous()
    want = comparable(f32_to_bf16(silu(to_f32(gate), Silu.DIV)))
    assert torch.equal(comparable(torch.nn.functional.silu(gate)), want)
    assert torch.equal(comparable(adapter.silu_mul(rows)), wanted(rows))


def test_our_form_of_every_gate_has_torchs_bits_on_a_gpu(parity_gpu: str):
    """Our kernel and torch's two, neither by way of the recipe."""
    rows = every_gate(parity_gpu, *UPS)
    got = own.swiglu(rows, None, 0, 1, own.Activation(form="torch"))
    assert torch.equal(comparable(got), comparable(adapter.silu_mul(rows)))


def test_the_recipe_rounds_twice_and_divides():
    """By torch's own sum, division, product and roundings.

    One rounding is told from two; the quotient from a product with a reciprocal is not: behind the
    rounding of SiLU to BF16 no gate of all 65,536 tells them.
    """
    rows = every_gate("cpu", 1.2890625)
    gate, up = (half.float() for half in rows.chunk(2, 1))
    # The exponential alone is the model's: that of a CPU is another function.
    quotient = gate / (1.0 + special.cuda_expf(-gate))
    twice = (quotient.bfloat16().float() * up).bfloat16()
    assert torch.equal(comparable(twice), wanted(rows))
    assert int((wanted(rows, OURS.of("swiglu", SwigluRecipe)) != wanted(rows)).sum()) > 1000
    assert torch.equal(wanted(rows, dataclasses.replace(PART, silu=Silu.MUL_RECIP)), wanted(rows))


# --- the adapter ----------------------------------------------------------------------------------


def here(patch: pytest.MonkeyPatch) -> Kernel:
    """Return the adapter as a kernel of a CPU, on a SiLU with a GPU's bits."""

    def stand_in(gate: Tensor) -> Tensor:
        assert gate.dtype is torch.bfloat16
        return f32_to_bf16(silu(to_f32(gate), Silu.DIV))

    patch.setattr(torch.nn.functional, "silu", stand_in)
    return dataclasses.replace(find(NAME), needs_gpu=False, unavailable=lambda: None)


@pytest.mark.parametrize(
    "case",
    [AIMED, dataclasses.replace(AIMED, values=Values.SPECIAL), dataclasses.replace(AIMED, m=0),
     dataclasses.replace(AIMED, i=100, hazard=Hazard.STRIDED),
     dataclasses.replace(AIMED, hazard=Hazard.TRANSPOSED)],
)  # fmt: skip
def test_the_adapter_of_torchs_silu_keeps_every_promise(case: Case, monkeypatch):
    """On a stand-in for one of torch's two kernels, with torch's own product."""
    assert not [v.message for v in check(here(monkeypatch), case, "cpu") if v.failed]


def test_halves_exchanged_by_the_adapter_are_red(monkeypatch):
    kernel = here(monkeypatch)

    def exchanged(rows: Tensor) -> Tensor:
        up, gate = rows.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    monkeypatch.setattr(adapter, "silu_mul", exchanged)
    got = run(kernel, AIMED, SWIGLU.inputs(AIMED)).outputs["rows"]
    assert not torch.equal(comparable(got), wanted(SWIGLU.inputs(AIMED).rows))
    assert next(check(kernel, AIMED, "cpu")).failed


def test_torchs_silu_says_where_it_does_not_run(monkeypatch):
    kernel = find(NAME)
    assert str(kernel.declines(AIMED, "cpu")) == "it needs a GPU."
    for words in ({"clamp": 7.0}, {"gate": Gate.SWIGLUOAI}):
        declined = kernel.declines(dataclasses.replace(AIMED, **words), "cuda")
        assert str(declined) == "torch's SiLU has no limit, no alpha and no beta."
    assert kernel.declines(AIMED, "cuda") is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = adapter.unavailable()
    assert found is not None
    assert found.why is Why.NEEDS_GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for version, why in ((None, Why.NEEDS_GPU), ("13.0", None)):
        monkeypatch.setattr(torch.version, "cuda", version)
        found = adapter.unavailable()
        assert (found and found.why) == why


# --- our kernels' form ----------------------------------------------------------------------------

OPTIONS = list(itertools.product((64, 128), ScaleFormat, ScaleLayout))


def some_rows(count: int, width: int, device: str) -> Tensor:
    return f32_to_bf16(2.0 * random_bits.normal(5, "rows", count, 2 * width, device=device))


def test_torchs_form_of_every_gate_has_the_recipes_bits(parity_device: str):
    """Subnormal gates, whose SiLU is a subnormal, and those where the exponential overflows."""
    rows = every_gate(parity_device, 1.2890625, -1.9921875)
    got = comparable(own.swiglu(rows, None, 0, 1, own.Activation(form="torch")))
    assert torch.equal(got, wanted(rows))
    plain = comparable(own.swiglu(rows, None, 0, 1, own.Activation()))
    assert torch.equal(plain, wanted(rows, OURS.of("swiglu", SwigluRecipe)))
    assert int((got != plain).sum()) > 1000


@pytest.mark.parametrize(("group", "scale", "layout"), OPTIONS)
def test_torchs_form_fused_has_the_bits_of_the_two_launches(
    group: int, scale: ScaleFormat, layout: ScaleLayout, parity_device: str
):
    """Vectors and scalars, five groups; and both have the recipe's."""
    rows, how = some_rows(5, 5 * group, parity_device), own.Activation(form="torch")
    words = {"group": group, "scale": scale, "layout": layout}
    apart = own.quant_rows(own.swiglu(rows, None, 0, 1, how), None, 0, 1, **words)
    codes, scales = quantized(swiglu_reference(rows, PART), group, scale)
    assert torch.equal(apart[0], codes)
    assert torch.equal(comparable(apart[1]), comparable(scales))
    for vector in (True, False):
        codes, scales = own.swiglu_quant(rows, None, 0, 1, how, vector=vector, **words)
        assert torch.equal(codes, apart[0])
        assert torch.equal(comparable(scales), comparable(apart[1]))
        assert scales.stride() == apart[1].stride()


def test_torchs_form_of_sorted_rows_is_that_of_the_routed_ones(parity_device: str):
    ids = torch.tensor([0, 2, 1, 2, 9], dtype=torch.int32, device=parity_device)[:, None]
    rows, how = some_rows(5, 128, parity_device), own.Activation(form="torch")
    aligned = steps.align(ids, 0, 3, 16)
    made = sorted_rows.swiglu_quant_sorted(rows, aligned, how, True)
    codes, scales = own.swiglu_quant(rows, ids, 0, 3, how, scale=ScaleFormat.UE8M0)
    want = sorted_rows.sort_rows(codes, scales, aligned)
    used = int((aligned.block_expert >= 0).sum())
    assert torch.equal(made.codes[: used * 16], want.codes[: used * 16])
    assert torch.equal(made.scales[:used], want.scales[:used])


@pytest.mark.parametrize(
    "words",
    [{}, {"group": 32}, {"with_activation": True}],
    ids=["fused", "another group", "with the activation"],
)
def test_silu_mul_quant_has_torchs_form_fused_and_not(words: dict, parity_device: str):
    rows = some_rows(3, 256, parity_device)
    codes, scales, *rest = fallbacks.silu_mul_quant(rows, form="torch", **words)
    y = swiglu_reference(rows, PART)
    want = quantized(y, words.get("group", 128), ScaleFormat.FP32)
    assert torch.equal(codes, want[0])
    assert torch.equal(comparable(scales), comparable(want[1]))
    assert [comparable(one).tolist() for one in rest] == [wanted(rows).tolist()] * len(rest)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"form": "two"}, "SwiGLU: form must be 'ours' or 'torch', got 'two'."),
        ({"form": "torch", "limit": 7.0}, "SwiGLU: the form 'torch' takes no clamp, alpha or beta"),
        ({"form": "torch", "alpha": 1.5}, "SwiGLU: the form 'torch' takes no clamp, alpha or beta"),
        ({"form": "torch", "beta": 1.0}, "SwiGLU: the form 'torch' takes no clamp, alpha or beta"),
        ({"form": "torch", "activation": "gelu"},
         "silu_mul_quant: the form 'torch' is SiLU's own, gelu has none."),
    ],
)  # fmt: skip
def test_what_torchs_form_does_not_take_is_said(words: dict, sentence: str):
    with pytest.raises(ParityError, match=f"^{sentence}"):
        fallbacks.silu_mul_quant(some_rows(2, 128, "cpu"), **words)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_ops_and_their_fakes_refuse_a_clamp_of_torchs_form(device: str):
    called = getattr(torch.ops, ops.NAMESPACE)
    rows = torch.zeros(2, 256, dtype=torch.bfloat16, device=device)
    codes = torch.zeros(2, 128, dtype=torch.uint8, device=device)
    scales = torch.zeros(2, 1, device=device)
    how, stored = (None, 0, 1, "before", 7.0, None, 1.0, 0.0), (128, "fp32", "row")
    sentence = "^SwiGLU: the form 'torch' takes no clamp"
    with pytest.raises(ParityError, match=sentence):
        called.swiglu(rows, *how, form="torch")
    with pytest.raises(ParityError, match=sentence):
        called.swiglu_quant(rows, *how, *stored, form="torch")
    with pytest.raises(ParityError, match=sentence):
        called.swiglu_quant_out(rows, *how, *stored, codes, scales, form="torch")
