"""SwiGLU with quantization, the GEMM's bias and the top-k sum alone, on the inputs that tell."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moe_parity.harness.checks.layer import words
from moe_parity.harness.expect import Recorder
from moe_parity.references import aims_layer, combine, gemm, quant
from moe_parity.references.arithmetic.formats import f32_to_bf16
from moe_parity.references.chips import tensor_core
from moe_parity.references.language import neighbours
from moe_parity.references.language.layer_decisions import ClampOrder
from moe_parity.references.language.recipe import CombineRecipe, GemmRecipe, SwigluRecipe
from moe_parity.references.language.recipes import OURS
from moe_parity.references.language.stage import Stage
from moe_parity.references.swiglu import swiglu

stages = pytest.importorskip("moe_parity.kernels.ours.steps", reason="needs Triton")


def record(recorder: Recorder, stage: str, shape: str, device: str, wrong: int, of: int, told: int):
    __tracebackhide__ = True
    message = f"ours: {stage} differs in {wrong} of {of} outputs."
    recorder.add(
        {
            "check": "exact", "verdict": "fail" if wrong else "pass", "kernel": f"ours_{stage}",
            "recipe": "ours", "stage": stage, "shape": shape, "bound": "exact", "compared": of,
            "device": "virtual_gpu" if device == "cpu" else device, "differing": wrong,
            "could_show": told, "message": message if wrong else "",
        }
    )  # fmt: skip
    assert not wrong, message


def union(masks: list[torch.Tensor]) -> int:
    """Count the outputs that at least one mutant changes."""
    return int(torch.stack(masks).any(0).sum())


def ids_of(rows: int, device: str) -> torch.Tensor:
    return torch.zeros((rows, 1), dtype=torch.int32, device=device)


CLAMPS = ("none", "before", "after")


@pytest.mark.parametrize("power_of_two", [False, True], ids=["fp32", "ue8m0"])
@pytest.mark.parametrize("tensor_limit", [False, True], ids=["scalar", "tensor"])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (1.702, 1.0)])
@pytest.mark.parametrize("clamp", CLAMPS)
def test_swiglu_quant(
    clamp: str,
    alpha: float,
    beta: float,
    tensor_limit: bool,
    power_of_two: bool,
    parity_device: str,
    parity_recorder: Recorder,
):
    """Gates on which SiLU's forms differ, gates and ups at the limit, special values."""
    odd = torch.tensor([[0.0, -0.0, 7.0, -7.0, 1e30, -1e30, float("inf"), -float("inf"), float("nan")]])  # fmt: skip  # noqa: E501
    special = odd.repeat(2, 29)[:, :256]
    x = torch.cat([aims_layer.every_gate(0), aims_layer.gates_at_the_limit(0), special])
    rows = f32_to_bf16(x)
    limit = aims_layer.LIMIT
    order = ClampOrder.AFTER if clamp == "after" else ClampOrder.BEFORE
    recipe = dataclasses.replace(OURS.layer[1], clamp_order=order)
    asked = None if clamp == "none" else limit
    part = OURS.of(Stage.SWIGLU_QUANT)

    def reference(changed: SwigluRecipe):
        y = swiglu(rows, changed, limit=asked, alpha=alpha, beta=beta)
        return quant.act_quant(y, part, ue8m0=power_of_two)

    how = stages.Activation(
        clamp=clamp, limit=0.0 if tensor_limit else limit, alpha=alpha, beta=beta,
        limits=torch.full((1,), limit, device=parity_device) if tensor_limit else None,
    )  # fmt: skip
    ids = ids_of(rows.shape[0], parity_device)
    codes, scales = stages.swiglu_quant(rows.to(parity_device), ids, 0, 1, how, power_of_two)
    want = reference(recipe)
    wrong = int((words(codes.cpu()) != words(want.codes)).sum())
    wrong += int((words(scales.cpu()) != words(want.scales)).sum())
    told = union([words(reference(r).codes) != words(want.codes) for _, _, r in neighbours(recipe)])
    record(parity_recorder, "swiglu_quant", f"m{rows.shape[0]}-i128", parity_device, wrong, codes.numel() + scales.numel(), told)  # fmt: skip  # noqa: E501


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["weights", "none", "zero", "unowned"])
def test_combine(kind: str, dtype: torch.dtype, parity_device: str, parity_recorder: Recorder):
    """Cancelling rows; weights, none (ones), zeros, and rows of NaN that are not owned."""
    made = aims_layer.cancelling_rows(0)
    rows = f32_to_bf16(made.rows)
    tokens, k, columns = rows.shape
    weights = None if kind == "none" else made.weights.clone()
    ids = torch.zeros((tokens, k), dtype=torch.int32)
    if kind == "zero":
        weights[:, ::2] = 0.0
    if kind == "unowned":
        ids[:, 1::3] = -1
        rows[:, 1::3] = float("nan")
        weights[:, 1::3] = float("nan")
    recipe = OURS.layer[2]
    want = combine.combine(rows, weights, ids >= 0, recipe, dtype)
    out = torch.full((tokens, columns), float("nan"), dtype=dtype, device=parity_device)
    there = None if weights is None else weights.to(parity_device)
    flat = rows.reshape(tokens * k, columns).to(parity_device)
    stages.combine(flat, there, ids.to(parity_device), 0, 1, out)
    wrong = int((words(out.cpu()) != words(want)).sum())
    masks = []
    for _, _, changed in neighbours(CombineRecipe()):
        other = combine.combine(rows, weights, ids >= 0, changed, dtype)
        masks.append(words(other) != words(want))
    told = union(masks)
    record(parity_recorder, "combine", f"m{tokens}-k{k}-h{columns}", parity_device, wrong, out.numel(), told)  # fmt: skip  # noqa: E501


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_gemm(biased: bool, block: int, parity_device: str, parity_recorder: Recorder):
    """Small differences of large sums, with and without a bias, in blocks of 16 and 64 tokens."""
    made = aims_layer.biased_gemm(0) if biased else aims_layer.cancelling_gemm(0)
    recipe = OURS.layer[0]
    want = gemm.finish(gemm.gemm(made.a, made.a_scale, made.w, made.w_scale, recipe), made.bias, recipe)  # fmt: skip  # noqa: E501
    rows = made.a.shape[0]
    ids = ids_of(rows, parity_device)
    aligned = stages.align(ids, 0, 1, block)
    bias = None if made.bias is None else made.bias[None].contiguous().to(parity_device)
    out = stages.grouped_gemm(
        made.a.to(parity_device), made.a_scale.to(parity_device), made.w[None].to(parity_device),
        made.w_scale[None].to(parity_device), aligned, rows, 1, bias,
    )  # fmt: skip
    wrong = int((words(out.cpu()) != words(want)).sum())
    masks = []
    for _, _, changed in neighbours(GemmRecipe()):
        other = gemm.gemm(made.a, made.a_scale, made.w, made.w_scale, changed)
        masks.append(words(gemm.finish(other, made.bias, changed)) != words(want))
    told = union(masks)
    record(parity_recorder, "gemm", f"m{rows}-n{want.shape[1]}-k{made.a.shape[1]}", parity_device, wrong, out.numel(), told)  # fmt: skip  # noqa: E501


@pytest.mark.parametrize("block", [16, 64])
def test_the_gemm_runs_on_fp8_wgmma(block: int):
    """Read from the PTX that Triton compiles for sm_90, on either side of the threshold."""
    virtual_gpu = pytest.importorskip("moe_parity.kernels.virtual_gpu", reason="needs Triton")
    made = aims_layer.cancelling_gemm(0)
    aligned = stages.align(ids_of(4, "cpu"), 0, 1, block)
    with virtual_gpu.record() as tape:
        stages.grouped_gemm(made.a, made.a_scale, made.w[None], made.w_scale[None], aligned, 4, 1)
    (launch,), (report,) = tape.launches, tape.reports
    assert report.dot_unit is tensor_core.WGMMA_FP8
    text = virtual_gpu.ptx(launch.kernel, *launch.args, **launch.options)
    assert "wgmma.mma_async.sync.aligned" in text
    assert "mma.sync.aligned" not in text.replace("wgmma.mma_async.sync.aligned", "")
    assert text.count("mul.rn.f32") + text.count("mul.f32") >= 1, "the scales' product"
    assert "fma.rn.f32" in text
