"""A whole layer with DeepGEMM's GEMMs between our quantizers and our top-k sum."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_parity.kernels.layer_call import LayerCall
from moe_parity.kernels.registry import register
from moe_parity.kernels.vendors.deepgemm import api as deep_gemm
from moe_parity.kernels.vendors.deepgemm.gemms import gathered, masked_slots, padded
from moe_parity.references.language import Case, QuantOutput, ScaleFormat, Stage, Trace
from moe_parity.references.layer import local_experts

LAYOUTS = ("contiguous", "masked", "psum")


def _supports(case: Case, device: str) -> str | None:
    if device != "cuda":
        return "CUDA kernels; they need a Hopper GPU."
    if case.h % 128 or case.i % 128:
        return f"H = {case.h} and I = {case.i} must be multiples of 128."
    if case.scale is ScaleFormat.UE8M0_PACKED:
        return "SM90 GEMMs read fp32 scales; packed exponents are for other chips."
    return None


class Rows:
    """The pairs of a batch in one layout: how rows go in and come out."""

    def __init__(self, layout: str, expert: Tensor, experts: int) -> None:
        """Place the rows once for both GEMMs."""
        self.layout, self.experts = layout, experts
        if layout == "masked":
            self.slot, self.counts, self.max_m = masked_slots(expert, experts)
            self.rows = experts * self.max_m
            return
        placed = deep_gemm.place(expert, experts, deep_gemm.ALIGNMENT)
        self.slot, self.rows, self.ends = placed.slot, placed.rows, placed.ends
        self.indices = torch.full((self.rows,), -1, dtype=torch.int32, device=expert.device)
        self.indices[self.slot[expert >= 0]] = expert[expert >= 0].int()

    def gemm(self, codes: Tensor, scales: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
        """Return bf16 [P, N] of canonical rows [P, K]; padding holds NaN codes."""
        a, scale = padded(codes, scales, self.slot, self.rows)
        out = torch.empty((self.rows, w.shape[1]), dtype=torch.bfloat16, device=codes.device)
        if self.layout == "masked":
            shape = (self.experts, self.max_m, -1)
            deep_gemm.masked(
                a.view(shape), scale.view(shape), w, w_scale, out.view(shape), self.counts
            )
        else:
            psum = self.layout == "psum"
            layout = self.ends if psum else self.indices
            deep_gemm.grouped(a, scale, w, w_scale, out, layout, psum=psum)
        return gathered(out, self.slot)


def run(call: LayerCall, layout: str) -> Trace:
    """Run the layer; rows of pairs that are not owned are zeros."""
    from moe_parity.kernels.ours import quant
    from moe_parity.kernels.ours import steps as stages

    batch, experts, asked = call.batch, call.experts, call.asked
    expert = local_experts(batch.ids, experts)
    k, count = batch.ids.shape[1], experts.w13.shape[0]
    form = ScaleFormat.UE8M0 if asked.ue8m0 else ScaleFormat.FP32
    codes, scales = quant.act_quant(batch.x, scale=form)
    rows = Rows(layout, expert, count)
    first = rows.gemm(
        codes.repeat_interleave(k, 0), scales.repeat_interleave(k, 0), experts.w13,
        experts.w13_scale,
    )  # fmt: skip
    clamp = "none" if asked.limit is None else "before"
    how = stages.Activation(
        clamp=clamp, limit=asked.limit or 0.0, alpha=asked.alpha, beta=asked.beta
    )
    mid, mid_scale = stages.swiglu_quant(first, batch.ids, experts.first, count, how, asked.ue8m0)
    owned = (expert >= 0)[:, None]
    mid = torch.where(owned, mid, torch.zeros_like(mid))
    mid_scale = torch.where(owned, mid_scale, torch.zeros_like(mid_scale))
    second = rows.gemm(mid, mid_scale, experts.w2, experts.w2_scale)
    out = torch.empty(batch.x.shape, dtype=asked.dtype, device=batch.x.device)
    stages.combine(second, batch.weights, batch.ids, experts.first, count, out)
    return Trace(
        act=QuantOutput(codes=codes, scales=scales),
        fc1=first,
        mid=QuantOutput(codes=mid, scales=mid_scale),
        fc2=second,
        out=out,
    )


def _register(layout: str) -> None:
    @register(
        f"deepgemm_chain_{layout}", stage=Stage.LAYER, recipes="ours", supports=_supports,
        unavailable=deep_gemm.unavailable,
        note=f"DeepGEMM's {layout} GEMMs with our quantizers and top-k sum.",
    )  # fmt: skip
    def layer(call: LayerCall) -> Trace:
        return run(call, layout)


for _layout in LAYOUTS:
    _register(_layout)
