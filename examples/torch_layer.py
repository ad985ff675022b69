"""A whole layer in plain torch, expert by expert, with ranks too: its output alone."""

import torch

from moe_parity.kernels import register
from moe_parity.references.chips.special import cuda_expf
from moe_parity.references.language import Recipe
from moe_parity.references.recipes.deepgemm import DEEPGEMM
from moe_parity.references.stages.combine import CombineRecipe, SumStep
from moe_parity.references.stages.gemm.decisions import Accumulate, DotUnit, GemmRecipe
from moe_parity.references.stages.swiglu.decisions import SwigluRecipe

QUANTIZER = DEEPGEMM.parts["act_quant"]
PLAIN = Recipe(
    name="plain_torch",
    source="float64 dots of 128, products and sums apart",
    parts={
        "act_quant": QUANTIZER,
        "gemm": GemmRecipe(unit=DotUnit.EXACT, accumulate=Accumulate.MUL_ADD),
        "swiglu": SwigluRecipe(),
        "swiglu_quant": QUANTIZER,
        "combine": CombineRecipe(step=SumStep.MUL_ADD),
    },
)


def _quantize(x, scale):
    x = x.float().unflatten(1, (-1, 128))
    scales = x.abs().amax(2).clamp(1e-4) / torch.tensor(448.0, device=x.device)
    if scale == "ue8m0":
        scales = ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return (x * (1 / scales[..., None])).flatten(1).to(torch.float8_e4m3fn), scales


def _gemm(a, s_a, w, s_w):
    s_w = s_w.repeat_interleave(128, 0)[: len(w)]
    total = torch.zeros(len(a), len(w), device=a.device)
    blocks = zip(a.split(128, 1), w.view(torch.float8_e4m3fn).split(128, 1), strict=True)
    for b, (x, y) in enumerate(blocks):
        dot = (x.double() @ y.double().T).float()
        total = total + dot * (s_a[:, b, None] * s_w[:, b])
    return total.bfloat16().float()


def _swiglu(gate, up, limit, alpha, beta):
    if limit is not None:
        limit = torch.tensor(limit, device=gate.device)
        gate, up = gate.fmin(limit), up.fmin(limit).fmax(-limit)
    silu = gate * (1 / (1 + cuda_expf(-(alpha * gate))))
    return (silu * (up + beta if beta else up)).bfloat16()


@register("torch_layer", stage="layer", recipes=PLAIN)
def torch_layer(call):
    batch, experts, asked = call.inputs.batch, call.inputs.experts, call.inputs.asked
    codes, scales = _quantize(batch.x, asked.scale)
    owner = call.inputs.expert.view(batch.ids.shape)
    rows = torch.zeros(*owner.shape, codes.shape[1], device=codes.device)
    for e in range(experts.count):
        token, k = (owner == e).nonzero(as_tuple=True)
        fc1 = _gemm(codes[token], scales[token], experts.w13[e], experts.w13_scale[e])
        mid = _swiglu(*fc1.chunk(2, 1), asked.limit, asked.alpha, asked.beta)
        fc2 = _gemm(*_quantize(mid, asked.mid), experts.w2[e], experts.w2_scale[e])
        rows[token, k] = fc2 if batch.weights is None else fc2 * batch.weights[token, k, None]
    return sum(rows.unbind(1)).to(asked.dtype)
