"""The weighted sum over a token's experts in plain torch: owned pairs alone, in the order of k."""

import torch

from moe_parity.kernels import register
from moe_parity.references.language import Recipe
from moe_parity.references.stages.combine import CombineRecipe, SumStep

SUM = CombineRecipe(step=SumStep.MUL_ADD)
PLAIN = Recipe(name="plain_sum", source="products and sums apart", parts={"combine": SUM})


@register("torch_combine", stage="combine", recipes=PLAIN)
def torch_combine(call):
    given, out = call.inputs, call.new("out")
    rows, owned = given.rows.float(), (given.expert >= 0).view(given.ids.shape)
    if given.weights is not None:
        rows = rows * given.weights[..., None]
    total = torch.zeros(out.shape, device=out.device)
    for row, mine in zip(rows.unbind(1), owned.unbind(1), strict=True):
        total = torch.where(mine[:, None], total + row, total)
    return out.copy_(total)
