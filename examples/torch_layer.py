"""torch_layer: a kernel of the stage layer (docs/your-kernel.md).

call.inputs, of a plain case
    batch.x  bfloat16 [M, H]
    batch.ids  int32 [M, k]
    batch.weights  float32 [M, k]
    experts.w13  uint8 [E, 2 * I, H]
    experts.w13_scale  float32 [E, 2 * I / 128, H / 128]
    experts.w2  uint8 [E, H, I]
    experts.w2_scale  float32 [E, H / 128, I / 128]
    experts.first = 0
    experts.bias13 = None
    experts.bias2 = None
    experts.count = 3
    asked.scale = fp32
    asked.mid = fp32
    asked.limit = None
    asked.alpha = 1.0
    asked.beta = 0.0
    asked.dtype = bfloat16
    expert  int64 [P]
    x_scale = None
outputs, in order, as call.new makes them
    act_codes  uint8 [M, H]
    act_scales  float32 [M, H / 128]
    fc1  bfloat16 [P, 2 * I]
    mid_codes  uint8 [P, I]
    mid_scales  float32 [P, I / 128]
    fc2  bfloat16 [P, H]
    out  bfloat16 [M, H]
"""

import torch

from moe_parity.kernels import register
from moe_parity.references.chips.special import cuda_expf
from moe_parity.references.recipes import recipe_named

# HERE: what is rounded, and where: every decision and its options are in docs/recipes.md
RECIPE = recipe_named("ours").changed("torch_layer_recipe", {
    "quant.floor": "amax_1e-4", "quant.zero_group": "as_floored", "quant.scale_form": "div_448",
    "quant.apply": "mul_recip", "quant.nan_amax": "propagate",
    "gemm.unit": "exact", "gemm.accumulate": "mul_add", "combine.step": "mul_add",
})  # fmt: skip


def _quantize(x, scale):
    x = x.float().unflatten(1, (-1, 128))
    scales = x.abs().amax(2).clamp(1e-4) / torch.tensor(448.0, device=x.device)
    if scale == "ue8m0":  # up to the next power of two
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
    silu = gate * (1 / (1 + cuda_expf(-(alpha * gate))))  # CUDA's own expf, on a CPU too
    return (silu * (up + beta if beta else up)).bfloat16()


@register("torch_layer", stage="layer", recipes=RECIPE)
def torch_layer(call):
    batch, experts, asked = call.inputs.batch, call.inputs.experts, call.inputs.asked
    # HERE: your code, which computes the rows of every pair and adds them up
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
