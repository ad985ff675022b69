"""DeepGEMM's quantizer in plain torch: a kernel of your own, fp32 scales only."""

import torch

from moe_parity.kernels import register


@register("torch_act_quant", stage="act_quant", recipes="deepgemm",
          supports=lambda case, device: None if case.scale == "fp32" else "fp32 only.")  # fmt: skip
def torch_act_quant(call):
    codes, scales = call.new("codes"), call.new("scales")
    x = call.inputs.x.float().unflatten(1, (-1, call.case.group))
    scales.copy_(x.abs().amax(2).clamp(1e-4) / torch.tensor(448.0, device=x.device))
    return codes.view(torch.float8_e4m3fn).copy_((x * (1 / scales[..., None])).flatten(1)), scales
