"""The whole layer: the stages one after the other, and two yardsticks.

Rows of every stage between the two quantizations are in (token, k) order.  A pair that this rank
does not own has no row: its entries are zeros here and nothing may read them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import BLOCK, f32_to_bf16, to_f32
from moe_parity.references.language.recipe import Recipe
from moe_parity.references.stages.combine import CombineRecipe, combine, in_epilogue
from moe_parity.references.stages.gemm.decisions import GemmRecipe
from moe_parity.references.stages.gemm.reference import biased, grouped, hit
from moe_parity.references.stages.layer.operands import Asked, Experts, LayerInputs, Routed, Trace
from moe_parity.references.stages.quant.decisions import QuantRecipe
from moe_parity.references.stages.quant.reference import act_quant
from moe_parity.references.stages.routing import local_expert
from moe_parity.references.stages.swiglu.decisions import SwigluRecipe
from moe_parity.references.stages.swiglu.reference import swiglu


def layer(inputs: LayerInputs, recipe: Recipe) -> Trace:
    """Run every stage of a recipe, each on the one before."""
    batch, experts, asked, expert = inputs.batch, inputs.experts, inputs.asked, inputs.expert
    gemm, summing = recipe.of("gemm", GemmRecipe), recipe.of("combine", CombineRecipe)
    owned, k = (expert >= 0)[:, None], batch.ids.shape[1]

    def kept(rows: Tensor) -> Tensor:
        return torch.where(owned, rows, torch.zeros_like(rows))

    act_codes, act_scales = batch.x, inputs.x_scale
    if act_scales is None:
        start = recipe.of("act_quant", QuantRecipe)
        act = act_quant(batch.x, start, scale=asked.scale, form=asked.form)
        act_codes, act_scales = act.codes, act.scales
    rows = grouped(
        act_codes.repeat_interleave(k, 0), act_scales.repeat_interleave(k, 0), experts.w13,
        experts.w13_scale, expert, gemm,
    )  # fmt: skip
    first = kept(biased(rows, experts.bias13, expert, gemm))
    how = recipe.of("swiglu", SwigluRecipe)
    y = swiglu(first, how, limit=asked.limit, alpha=asked.alpha, beta=asked.beta)
    last = recipe.of("swiglu_quant", QuantRecipe)
    mid = act_quant(y, last, scale=asked.mid, form=asked.form)
    codes, scales = kept(mid.codes), kept(mid.scales)
    rows = grouped(codes, scales, experts.w2, experts.w2_scale, expert, gemm)
    weight = in_epilogue(batch.weights, summing)
    second = kept(biased(rows, experts.bias2, expert, gemm, weight))
    shaped = second.view(*batch.ids.shape, second.shape[-1])
    mine = (expert >= 0).view(batch.ids.shape)
    out = combine(shaped, batch.weights, mine, summing, asked.dtype)
    return Trace(
        act_codes=act_codes, act_scales=act_scales, fc1=first, mid_codes=codes, mid_scales=scales,
        fc2=second, out=out,
    )  # fmt: skip


def layer_float64(
    batch: Routed, experts: Experts, asked: Asked, *, through_bf16: bool = False
) -> Tensor:
    """Return float64 [M, H] with the dequantized weights and nothing else quantized.

    The yardstick of a PR's "relative error"; ``through_bf16`` rounds FC1, SwiGLU and FC2 to BF16,
    as an unquantized BF16 layer does.
    """

    def step(value: Tensor) -> Tensor:
        return to_f32(f32_to_bf16(value.float())).double() if through_bf16 else value

    expert = local_expert(batch.ids, experts.first, experts.count).view(batch.ids.shape)
    x = to_f32(batch.x).double()
    out = torch.zeros_like(x)
    for index in hit(expert):
        token, slot = (expert == index).nonzero(as_tuple=True)
        w13, w2 = (
            asked.form.dequantized(codes[index], scales[index], BLOCK, BLOCK)
            for codes, scales in ((experts.w13, experts.w13_scale), (experts.w2, experts.w2_scale))
        )
        gate, up = step(x[token] @ w13.t()).chunk(2, dim=1)
        if asked.limit is not None:
            gate, up = gate.clamp(max=asked.limit), up.clamp(-asked.limit, asked.limit)
        y = step(gate * torch.sigmoid(asked.alpha * gate) * (up + asked.beta))
        rows = step(y @ w2.t())
        if batch.weights is not None:
            rows = rows * batch.weights[token, slot, None].double()
        out.index_add_(0, token, rows)
    return out
