"""The numbers of docs/findings.md, computed by the recipes that were proven on the real kernels."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch
from torch import Tensor

from moe_parity.harness.calling.run import run
from moe_parity.harness.checks.compare import comparable
from moe_parity.harness.checks.expect import Recorder, claim, needs
from moe_parity.harness.checks.flow import check
from moe_parity.harness.session.skips import skip_test
from moe_parity.kernels import Kernel, find
from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import f32_to_bf16, from_bits, round_bf16
from moe_parity.references.arithmetic.rounding import ceil_pow2, div_rn, f32
from moe_parity.references.language import (
    Case,
    Check,
    Contract,
    Hazard,
    Recipe,
    ScaleFormat,
    ScaleLayout,
)
from moe_parity.references.recipes.vllm import (
    VLLM_BATCHED,
    VLLM_CUDA_UE8M0,
    VLLM_CUDA_UE8M0_GENERIC,
    VLLM_FUSED_SILU,
    VLLM_TRITON,
    VLLM_TRITON_QUANT,
)
from moe_parity.references.stages.quant.decisions import PowerOfTwo, QuantRecipe
from moe_parity.references.stages.quant.reference import act_quant
from moe_parity.references.stages.swiglu.decisions import SwigluRecipe
from moe_parity.references.stages.swiglu.reference import swiglu
from moe_parity.references.stages.swiglu.stage import GateUpRows
from moe_parity.references.stages.swiglu.telling import BIG_GATE


def every_amax() -> Tensor:
    """Return every positive normal BF16 number whose 32nd is one too, and below 2^120, fp32."""
    word = torch.arange(0x0600, 0x7B80, dtype=torch.int32) << 16
    return from_bits(word)


def groups_of(amax: Tensor) -> Tensor:
    """Return bf16 rows [A, 256] that SwiGLU turns into groups of one amax and smaller values."""
    share = (torch.arange(128) + 1.0) / 128.0
    y = round_bf16(amax[:, None] * share)
    return f32_to_bf16(torch.cat([torch.full_like(y, BIG_GATE), y / BIG_GATE], 1))


UE8M0 = ScaleFormat.UE8M0


def part(recipe: Recipe) -> QuantRecipe:
    return recipe.of("act_quant", QuantRecipe)


def activated(rows: Tensor, recipe: Recipe, scale: ScaleFormat):
    y = swiglu(rows, recipe.of("swiglu", SwigluRecipe))
    return act_quant(y, recipe.of("swiglu_quant", QuantRecipe), scale=scale)


def right_power(amax: Tensor) -> Tensor:
    """Return the smallest power of two s with amax / s at most 448."""
    return ceil_pow2(div_rn(amax, f32(448.0, amax)))


def test_persistent_masked_takes_an_exponent_too_small():
    """The logarithm is rounded to BF16 before the ceiling: 3,026 of 30,080 BF16 amax saturate."""
    amax = every_amax()
    out = activated(groups_of(amax), VLLM_BATCHED, UE8M0)
    short = out.scales[:, 0] < right_power(amax)
    assert (int(short.sum()), amax.numel()) == SHORT
    assert bool((out.scales[short, 0] * 2 == right_power(amax[short])).all())
    one = amax[short & (amax >= 1.0)][0]
    assert float(one) == SMALLEST_FROM_ONE
    row = int((amax == one).nonzero()[0, 0])
    assert float(out.scales[row, 0]) == float(right_power(one.reshape(1))) / 2
    assert int(out.codes[row, -1]) == 0x7E


SHORT = (3026, 30080)
SMALLEST_FROM_ONE = 1.7578125


@pytest.mark.parametrize("scale", [ScaleFormat.FP32, ScaleFormat.UE8M0])
def test_every_amax_on_the_real_op(
    scale: ScaleFormat, parity_device: str, parity_recorder: Recorder
):
    """_C.persistent_masked_m_silu_mul_quant gives the recipe's bits for every BF16 amax."""
    kernel = find("vllm_persistent_masked_silu_mul_quant")
    amax = every_amax()
    case = Case(m=amax.numel(), i=128, scale=scale)
    needs(kernel, case, parity_device)
    rows = groups_of(amax).to(parity_device)
    counts = torch.tensor([amax.numel()], dtype=torch.int32, device=parity_device)
    inputs = GateUpRows(
        rows=rows, counts=counts, expert=torch.zeros_like(rows[:, 0], dtype=torch.int64),
        limit=None, alpha=1.0, beta=0.0,
    )  # fmt: skip
    got = run(kernel, case, inputs).outputs
    want = activated(rows, VLLM_BATCHED, scale)
    wrong = int((comparable(got["codes"]) != comparable(want.codes)).sum())
    wrong += int((comparable(got["scales"]) != comparable(want.scales)).sum())
    total = want.codes.numel() + want.scales.numel()
    fault = f"{kernel.name}: {wrong} of {total} outputs differ over every amax." if wrong else ""
    claim(
        parity_recorder, "every_amax", fault, kernel=kernel.name, recipe=VLLM_BATCHED.name,
        stage="swiglu_quant", scale=scale.value, device=parity_device, compared=total,
        differing=wrong,
    )  # fmt: skip


def test_the_logarithm_misses_powers_of_two():
    """UE8M0 by log2 loses the ceiling for fp32 amax just above 448 * 2^k; BF16 amax never do."""
    edge = torch.tensor([448.0 * 2.0**k for k in range(-30, 30)])
    bits = edge.view(torch.int32)[:, None] + torch.arange(1, 9, dtype=torch.int32)
    amax = from_bits(bits.flatten())
    x = torch.zeros(amax.numel(), 128)
    x[:, 0] = amax
    generic = part(VLLM_CUDA_UE8M0_GENERIC)
    exact = dataclasses.replace(generic, power_of_two=PowerOfTwo.BIT_CEIL)
    short = act_quant(x, generic, scale=UE8M0).scales < act_quant(x, exact, scale=UE8M0).scales  # fmt: skip  # noqa: E501
    assert int(short.sum()) == LOST
    short_bf16 = every_amax()
    y = torch.zeros(short_bf16.numel(), 128)
    y[:, 0] = short_bf16
    both = [act_quant(y, how, scale=UE8M0).scales for how in (generic, exact)]
    assert torch.equal(*both)


LOST = 304
"""Of 480: the eight fp32 numbers above 448 * 2^k, k from -30 to 29."""


def test_the_compile_fusion_changes_the_format():
    """silu_and_mul then UE8M0 quantization against the op that replaces them: no scale is equal."""
    rows = f32_to_bf16(random_bits.normal(0, "fusion", 256, 2048))
    pair = swiglu(rows, VLLM_TRITON.of("swiglu", SwigluRecipe))
    before = act_quant(pair, part(VLLM_CUDA_UE8M0), scale=UE8M0)
    after = activated(rows, VLLM_FUSED_SILU, ScaleFormat.FP32)
    codes = int((before.codes != after.codes).sum())
    scales = int((before.scales != after.scales).sum())
    assert (codes, before.codes.numel()) == FUSED_CODES
    assert (scales, before.scales.numel()) == FUSED_SCALES


FUSED_CODES = (243036, 262144)
FUSED_SCALES = (2048, 2048)


def test_tiny_groups_differ_between_vllms_two_quantizers():
    """A zero group: 2^-33 from the CUDA op, 2^-42 from the Triton one that rows with gaps take."""
    zero = torch.zeros(1, 128)
    scales = [
        float(act_quant(zero, part(r), scale=UE8M0).scales[0, 0])
        for r in (VLLM_CUDA_UE8M0, VLLM_TRITON_QUANT)
    ]
    assert scales == [2.0**-33, 2.0**-42]


# --- strides that vLLM's kernels do not look at --------------------------------------------------


def unguarded(monkeypatch: pytest.MonkeyPatch, name: str, module: str, guard: str) -> Kernel:
    """Return a kernel of vLLM's whose adapter does not refuse what it would misread."""
    kernel = find(name)
    if absent := kernel.unavailable():
        skip_test(absent)
    adapter = importlib.import_module(f"moe_parity.kernels.vendors.vllm.{module}")
    monkeypatch.setattr(adapter, guard, lambda tensor, who: tensor)
    return dataclasses.replace(kernel, contract=Contract(checks=frozenset({Check.EXACT})))


def test_ep_scatter_does_not_look_at_the_last_stride(monkeypatch: pytest.MonkeyPatch):
    kernel = unguarded(monkeypatch, "vllm_ep_scatter", "triton_rows", "demand_rows")
    case = Case(m=21, e=4, k=2, h=384)
    for layout in (ScaleLayout.COLUMN, ScaleLayout.TMA):
        (verdict,) = check(kernel, dataclasses.replace(case, layout=layout), "cpu")
        assert "scale_layout_ignored" in verdict.causes
    (verdict,) = check(kernel, dataclasses.replace(case, hazard=Hazard.TRANSPOSED), "cpu")
    assert verdict.failed
    (verdict,) = check(kernel, dataclasses.replace(case, hazard=Hazard.GAPS), "cpu")
    assert not verdict.failed


def test_ep_scatter_counts_offsets_in_32_bits(monkeypatch: pytest.MonkeyPatch):
    kernel = unguarded(monkeypatch, "vllm_ep_scatter", "triton_rows", "demand_near")
    (verdict,) = check(kernel, Case(m=3, e=4, k=2, h=256, hazard=Hazard.FAR), "cpu")
    assert (verdict.cause_kind, verdict.cause) == ("memory", "out_of_bounds")
    assert "program (2, 0, 0): a load of 1 bytes" in verdict.message
    assert "2147483648 bytes before the start of recv_x" in verdict.message


def test_fused_moe_takes_weights_with_gaps_for_contiguous_ones(monkeypatch: pytest.MonkeyPatch):
    kernel = unguarded(monkeypatch, "vllm_fused_moe_fc2", "triton_gemm", "demand_contiguous")
    (verdict,) = check(kernel, Case(m=10, e=3, k=2, h=128, hazard=Hazard.GAPS), "cpu")
    assert "row_stride" in verdict.causes
    assert verdict.message.startswith("Routing weights read as if they were contiguous in fc2")
