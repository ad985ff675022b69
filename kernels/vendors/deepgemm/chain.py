"""A whole layer with DeepGEMM's GEMMs between our quantizers and our top-k sum."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from moe_parity.kernels.call import Call
from moe_parity.kernels.registry import register
from moe_parity.kernels.vendors.deepgemm import api as deep_gemm
from moe_parity.kernels.vendors.deepgemm.casts import versions
from moe_parity.kernels.vendors.deepgemm.gemms import (
    expected,
    gathered,
    masked_slots,
    owners,
    padded,
)
from moe_parity.references.stages.routing import place

LAYOUTS = ("contiguous", "masked", "psum")


class Rows:
    """The pairs of a batch in one layout: how rows go in and come out."""

    def __init__(self, layout: str, expert: Tensor, experts: int) -> None:
        """Place the rows once for both GEMMs."""
        self.layout, self.experts = layout, experts
        self.expected = expected(expert, experts)
        if layout == "masked":
            self.slot, self.counts, self.max_m = masked_slots(expert, experts)
            self.rows = experts * self.max_m
            return
        placed = place(expert, experts, deep_gemm.ALIGNMENT)
        self.slot, self.rows, self.ends = placed.slot, deep_gemm.rows_of(placed), placed.ends
        self.indices = owners(expert, self.slot, self.rows)

    def gemm(self, codes: Tensor, scales: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
        """Return bf16 [P, N] of canonical rows [P, K]; padding holds NaN codes."""
        a, scale = padded(codes, scales, self.slot, self.rows + 1)
        a, scale = a[:-1], scale[:-1]
        out = torch.empty((self.rows, w.shape[1]), dtype=torch.bfloat16, device=codes.device)
        if self.layout == "masked":
            shape = (self.experts, self.max_m, -1)
            deep_gemm.masked(
                a.view(shape), scale.view(shape), w, w_scale, out.view(shape), self.counts,
                expected=self.expected,
            )  # fmt: skip
        else:
            psum = self.layout == "psum"
            layout = self.ends if psum else self.indices
            deep_gemm.grouped(a, scale, w, w_scale, out, layout, psum=psum)
        return gathered(out, self.slot)


def run(call: Call, layout: str) -> dict[str, Tensor]:
    """Run the layer and return what every stage left behind."""
    from moe_parity.kernels.ours import activation, quant, steps

    batch, experts, asked = call.inputs.batch, call.inputs.experts, call.inputs.asked
    expert, k, count = call.inputs.expert, batch.ids.shape[1], experts.count
    codes, scales = quant.act_quant(batch.x, scale=asked.scale)
    rows = Rows(layout, expert, count)
    first = rows.gemm(
        codes.repeat_interleave(k, 0), scales.repeat_interleave(k, 0), experts.w13,
        experts.w13_scale,
    )  # fmt: skip
    how = activation.Activation(
        clamp="none" if asked.limit is None else "before", limit=asked.limit or 0.0,
        alpha=asked.alpha, beta=asked.beta,
    )  # fmt: skip
    mid, mid_scale = activation.swiglu_quant(
        first, batch.ids, experts.first, count, how, scale=asked.mid
    )
    second = rows.gemm(mid, mid_scale, experts.w2, experts.w2_scale)
    out = torch.empty(batch.x.shape, dtype=asked.dtype, device=batch.x.device)
    steps.combine(second, batch.weights, batch.ids, experts.first, count, out)
    return {
        "act_codes": codes, "act_scales": scales, "fc1": first, "mid_codes": mid,
        "mid_scales": mid_scale, "fc2": second, "out": out,
    }  # fmt: skip


def _register(layout: str) -> None:
    @register(
        f"deepgemm_chain_{layout}", stage="layer", recipes="ours",
        unavailable=partial(deep_gemm.lacking, "masked" if layout == "masked" else "contiguous"),
        needs_gpu=True, versions=versions,
        note=f"DeepGEMM's {layout} GEMMs with our quantizers and top-k sum.",
    )  # fmt: skip
    def layer(call: Call) -> dict[str, Tensor]:
        return run(call, layout)


for _layout in LAYOUTS:
    _register(_layout)
