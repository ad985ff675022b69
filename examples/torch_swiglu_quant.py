"""SwiGLU with a limit and quantization in plain torch: CUDA's exponential, all else torch's own."""

import torch

from moe_parity.kernels import register
from moe_parity.references.chips.special import cuda_expf
from moe_parity.references.language import Recipe
from moe_parity.references.recipes.deepgemm import DEEPGEMM
from moe_parity.references.stages.swiglu.decisions import SwigluRecipe

PARTS = {"swiglu": SwigluRecipe(), "swiglu_quant": DEEPGEMM.parts["act_quant"]}
PLAIN = Recipe(name="plain_swiglu", source="SiLU by CUDA's expf, DeepGEMM's quantizer", parts=PARTS)


@register("torch_swiglu_quant", stage="swiglu_quant", recipes=PLAIN,
          supports=lambda case, device: None if case.scale == "fp32" else "fp32 only.")  # fmt: skip
def torch_swiglu_quant(call):
    given, codes, scales = call.inputs, call.new("codes"), call.new("scales")
    gate, up = given.rows.float().chunk(2, 1)
    if given.limit is not None:
        limit = torch.tensor(given.limit, device=gate.device)
        gate, up = gate.fmin(limit), up.fmin(limit).fmax(-limit)
    silu = gate * (1 / (1 + cuda_expf(-(given.alpha * gate))))
    value = (silu * (up + given.beta if given.beta else up)).bfloat16()
    x = value.float().unflatten(1, (-1, call.case.group))
    scales.copy_(x.abs().amax(2).clamp(1e-4) / torch.tensor(448.0, device=x.device))
    return codes.view(torch.float8_e4m3fn).copy_((x * (1 / scales[..., None])).flatten(1)), scales
