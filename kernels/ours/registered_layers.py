"""Our layer as the harness sees it, once for each path."""

from __future__ import annotations

import torch

from moe_parity.kernels.layer_call import LayerCall
from moe_parity.kernels.ours.registered import unavailable
from moe_parity.kernels.registry import register
from moe_parity.references.language import Case, Contract, QuantOutput, ScaleFormat, Stage, Trace
from moe_parity.references.layer import local_experts


def _supports(case: Case, device: str) -> str | None:  # noqa: ARG001
    if case.h % 128 or case.i % 128:
        return f"H = {case.h} and I = {case.i} must be multiples of 128."
    if case.scale is ScaleFormat.UE8M0_PACKED:
        return "SM90 GEMMs read fp32 scales; packed exponents are for other chips."
    return None


def run_path(call: LayerCall, path: str, clamp: str = "before") -> Trace:
    """Run one path and return its trace; rows of pairs that are not owned are zeroed."""
    from moe_parity.kernels.ours import moe

    experts, asked = call.experts, call.asked
    weights = moe.ExpertWeights(
        w13=experts.w13, w13_scale=experts.w13_scale, w2=experts.w2, w2_scale=experts.w2_scale,
        first=experts.first, bias13=experts.bias13, bias2=experts.bias2,
    )  # fmt: skip
    ran = moe.run_stages(
        call.batch.x, call.batch.ids, call.batch.weights, weights, limit=asked.limit, clamp=clamp,
        alpha=asked.alpha, beta=asked.beta, power_of_two=asked.ue8m0, out_dtype=asked.dtype,
        path=path,
    )  # fmt: skip
    owned = (local_experts(call.batch.ids, experts) >= 0)[:, None]

    def kept(rows: torch.Tensor) -> torch.Tensor:
        return torch.where(owned, rows, torch.zeros_like(rows))

    return Trace(
        act=QuantOutput(codes=ran.act_codes, scales=ran.act_scales),
        fc1=kept(ran.fc1),
        mid=QuantOutput(codes=kept(ran.mid_codes), scales=kept(ran.mid_scales)),
        fc2=kept(ran.fc2),
        out=ran.out,
    )


def _register(path: str) -> None:
    @register(
        f"ours_{path}",
        stage=Stage.LAYER,
        recipes="ours",
        supports=_supports,
        unavailable=unavailable,
        contract=Contract(),
        triton=True,
        note=f"Our layer, the {path} path.",
    )
    def layer(call: LayerCall) -> Trace:
        return run_path(call, path)


_register("decode")
_register("large")
