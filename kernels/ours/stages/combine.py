"""Our top-k sum as the harness sees it."""

from __future__ import annotations

from torch import Tensor

from moe_parity.kernels.call import Call
from moe_parity.kernels.ours.stages import ours
from moe_parity.references.stages import COMBINE


@ours("ours_combine", COMBINE)
def ours_combine(call: Call) -> Tensor:
    """Our top-k sum."""
    from moe_parity.kernels.ours import steps

    inputs, out = call.inputs, call.new("out")
    steps.combine(inputs.rows, inputs.weights, inputs.ids, inputs.first, inputs.experts, out)
    return out
