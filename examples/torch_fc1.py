"""FC1 in plain torch: exact dot products of 128 codes, scaled and added block by block."""

import torch

from moe_parity.kernels import register
from moe_parity.references.language import Recipe
from moe_parity.references.stages.gemm.decisions import Accumulate, DotUnit, GemmRecipe

GEMM = GemmRecipe(unit=DotUnit.EXACT, accumulate=Accumulate.MUL_ADD)
PLAIN = Recipe(name="plain_fc1", source="float64 dots of 128", parts={"gemm": GEMM})


@register("torch_fc1", stage="fc1", recipes=PLAIN)
def torch_fc1(call):
    given, rows = call.inputs, call.new("rows")
    for expert in given.expert[given.expert >= 0].unique().tolist():
        pairs = (given.expert == expert).nonzero()[:, 0]
        source = given.source[pairs]
        a, s_a = given.a[source].view(torch.float8_e4m3fn), given.a_scale[source]
        w, s_w = given.w[expert].view(torch.float8_e4m3fn), given.w_scale[expert]
        s_w = s_w.repeat_interleave(128, 0)[: len(w)]
        total = torch.zeros(len(a), len(w), device=a.device)
        for b, (x, y) in enumerate(zip(a.split(128, 1), w.split(128, 1), strict=True)):
            dot = (x.double() @ y.double().T).float()
            total = total + dot * (s_a[:, b, None] * s_w[:, b])
        rows[pairs] = total.bfloat16()
    return rows
