"""The layer on a real GPU: model shapes, CUDA graphs, no waiting, no compilation while serving."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch

from moe_parity.harness.calling.run import run
from moe_parity.harness.cases.shapes import DECODE_TOKENS, MODELS, Shape
from moe_parity.harness.checks.compare import comparable
from moe_parity.harness.checks.expect import Recorder, claim, record
from moe_parity.harness.checks.flow import check
from moe_parity.harness.checks.verdict import found
from moe_parity.kernels import find
from moe_parity.references.arithmetic.formats import bits_of
from moe_parity.references.language import (
    Case,
    Check,
    Contract,
    ScaleFormat,
    Values,
    neighbours,
)
from moe_parity.references.stages import LAYER
from moe_parity.references.stages.gemm import reference as gemm
from moe_parity.references.stages.gemm.aims import cancelling_gemm
from moe_parity.references.stages.gemm.decisions import GemmRecipe
from moe_parity.references.stages.layer.inputs import (
    asked_of,
    batch_of,
    experts_of,
    layer_inputs,
    poison,
)
from moe_parity.references.stages.layer.operands import LayerInputs

moe = pytest.importorskip("moe_parity.kernels.ours.moe", reason="needs Triton")

FORMATS = (ScaleFormat.FP32, ScaleFormat.UE8M0)


def test_the_gpu_form_of_the_reference_is_the_plain_one(parity_gpu: str):
    """Every GEMM recipe beside the plain loop, on small differences of large sums."""
    made = cancelling_gemm(0)
    a, a_scale, w, w_scale = (t.to(parity_gpu) for t in (made.a, made.a_scale, made.w, made.w_scale))  # fmt: skip  # noqa: E501
    w, w_scale = torch.stack([w, w.roll(1, 1)]), torch.stack([w_scale, w_scale * 1.5])
    expert = torch.arange(a.shape[0], device=parity_gpu) % 3 - 1
    for recipe in [GemmRecipe(), *(r for _, _, r in neighbours(GemmRecipe()))]:
        fast = gemm.grouped(a, a_scale, w, w_scale, expert, recipe)
        plain = gemm.grouped_plain(a, a_scale, w, w_scale, expert, recipe)
        assert torch.equal(bits_of(fast), bits_of(plain)), recipe


def batches(case: Case, device: str):
    """Yield (case, inputs) for every number of tokens; the experts are made once."""
    kept, asked = experts_of(case, device), asked_of(case)
    for m in DECODE_TOKENS:
        sized = dataclasses.replace(case, m=m)
        batch = batch_of(sized, device)
        experts = dataclasses.replace(
            kept, w13=kept.w13.clone(), w13_scale=kept.w13_scale.clone(), w2=kept.w2.clone(),
            w2_scale=kept.w2_scale.clone(),
        )  # fmt: skip
        poison(batch, experts, case.codes.nan)
        yield sized, LayerInputs(batch=batch, experts=experts, asked=asked)


@pytest.mark.parametrize("scale", FORMATS, ids=lambda s: s.value)
@pytest.mark.parametrize("shape", MODELS, ids=lambda s: s.name)
def test_model_shapes(shape: Shape, scale: ScaleFormat, parity_gpu: str, parity_recorder: Recorder):
    """Every stage of the decode path, and the large path equal to it, at 1 to 64 tokens."""
    clamp = 7.0 if scale is ScaleFormat.UE8M0 else None
    base = shape.case(Case(scale=scale, values=Values.AIMED, clamp=clamp), m=1)
    decode, large = find("ours_decode"), find("ours_large")
    # Where every stage has the bits of the reference on those before it, so has the whole.
    stages = dataclasses.replace(decode, contract=Contract(checks=frozenset({Check.EXACT})))
    for case, inputs in batches(base, parity_gpu):
        record(
            stages,
            case,
            parity_gpu,
            check(stages, case, parity_gpu, inputs=inputs),
            parity_recorder,
        )
        left, right = (run(kernel, case, inputs).outputs for kernel in (decode, large))
        live = LAYER.live(case, inputs)
        wrong = compared = 0
        for name, one in left.items():
            rows = live.get(name, torch.ones(one.shape[0], dtype=torch.bool, device=one.device))
            wrong += int((comparable(one)[rows] != comparable(right[name])[rows]).sum())
            compared += int(rows.sum()) * one.shape[1]
        fault = f"{wrong} of {compared} outputs differ between the paths at m = {case.m}."
        verdict = found("paths_agree", fault if wrong else "", compared=compared, differing=wrong)
        record(large, case, parity_gpu, [verdict], parity_recorder)


GRAPHED = Case(m=8, e=32, k=4, h=512, i=256, ep_rank=1, ep_size=2)


def compiled_kernels() -> int:
    """Count the binaries of all our kernels."""
    from triton import JITFunction

    from moe_parity.kernels.ours import align_kernels, layer_kernels, quant_kernels

    kernels = {
        id(value): value
        for module in (align_kernels, layer_kernels, quant_kernels)
        for value in vars(module).values()
        if isinstance(value, JITFunction)
    }
    return sum(len(cache[0]) for k in kernels.values() for cache in k.device_caches.values())


def test_nothing_is_compiled_and_nothing_waits(parity_gpu: str, parity_recorder: Recorder):
    """After ``prewarm`` every batch of 1 to 70 tokens runs as it is, without a host sync."""
    made = layer_inputs(dataclasses.replace(GRAPHED, m=70), parity_gpu, spoil=False)
    experts = made.experts
    moe.prewarm(experts, topk=GRAPHED.k)
    warmed = compiled_kernels()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        for m in range(71):
            batch = made.batch
            moe.run_moe(batch.x[:m], batch.ids[:m], batch.weights[:m], experts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    grown = compiled_kernels() - warmed
    fault = f"{grown} kernels were compiled while serving, after {warmed} in prewarm."
    assert warmed > 0
    claim(
        parity_recorder, "no_recompile", fault if grown else "", kernel="run_moe", stage="layer",
        compared=71, differing=grown, device="cuda",
    )  # fmt: skip
