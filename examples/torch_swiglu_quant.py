"""torch_swiglu_quant: a kernel of the stage swiglu_quant (docs/your-kernel.md).

call.inputs, of a plain case
    rows  bfloat16 [M, 2 * I]
    counts  int32 [E]
    expert  int64 [M]
    limit = None
    alpha = 1.0
    beta = 0.0
outputs, in order, as call.new makes them
    codes  uint8 [M, I]
    scales  float32 [M, I / 128]
"""

import torch

from moe_parity.kernels import register
from moe_parity.references.chips.special import cuda_expf
from moe_parity.references.recipes import recipe_named

# HERE: what is rounded, and where: every decision and its options are in docs/recipes.md
QUANTIZER = {
    "quant.floor": "amax_1e-4", "quant.zero_group": "as_floored", "quant.scale_form": "div_448",
    "quant.apply": "mul_recip", "quant.nan_amax": "propagate",
}  # fmt: skip
RECIPE = recipe_named("ours").changed("torch_swiglu_quant_recipe", QUANTIZER)


@register("torch_swiglu_quant", stage="swiglu_quant", recipes=RECIPE,
          supports=lambda case, device: None if case.scale == "fp32" else "fp32 only.")  # fmt: skip
def torch_swiglu_quant(call):
    given, codes, scales = call.inputs, call.new("codes"), call.new("scales")
    # HERE: your code, which writes codes and scales
    gate, up = given.rows.float().chunk(2, 1)
    if given.limit is not None:
        limit = torch.tensor(given.limit, device=gate.device)
        gate, up = gate.fmin(limit), up.fmin(limit).fmax(-limit)
    silu = gate * (1 / (1 + cuda_expf(-(given.alpha * gate))))  # CUDA's own expf, on a CPU too
    value = (silu * (up + given.beta if given.beta else up)).bfloat16().float()
    x = value.unflatten(1, (-1, call.case.group))
    scales.copy_(x.abs().amax(2).clamp(1e-4) / torch.tensor(448.0, device=x.device))
    return codes.view(torch.float8_e4m3fn).copy_((x * (1 / scales[..., None])).flatten(1)), scales
