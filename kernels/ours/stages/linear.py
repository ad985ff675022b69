"""Our dense linear as the harness sees it: a GEMM of one expert, or one of rows it quantizes."""

from __future__ import annotations

from torch import Tensor

from moe_parity.kernels.call import Call
from moe_parity.kernels.ours.stages import ours
from moe_parity.references.language import Case
from moe_parity.references.stages import FC1, QUANT_GEMM


def _supports(case: Case, device: str) -> str | None:
    if case.e != 1 or case.k != 1 or case.ep_size != 1:
        return "one expert and one choice: a dense linear."
    return f"K = {case.h} must be a multiple of 128." if case.h % 128 else None


# drawn cases took a CPU three times as long as those of the grouped GEMMs
@ours("ours_linear", FC1, supports=_supports, cost=lambda case: 2 * FC1.cost(case))
def ours_linear(call: Call) -> Tensor:
    """Our dense block-FP8 linear, on codes and scales as they come."""
    from moe_parity.kernels.ours.linear import linear

    inputs = call.inputs
    return linear(
        inputs.a, inputs.w[0], inputs.w_scale[0], x_scale=inputs.a_scale,
        bias=None if inputs.bias is None else inputs.bias[0], out=call.new("rows"),
    )  # fmt: skip


@ours("ours_quant_gemm", QUANT_GEMM, cost=lambda case: 4 * QUANT_GEMM.cost(case))
def ours_quant_gemm(call: Call) -> Tensor:
    """Our dense block-FP8 linear, on BF16 rows that it quantizes."""
    from moe_parity.kernels.ours.linear import linear

    inputs = call.inputs
    return linear(
        inputs.x, inputs.w, inputs.w_scale, power_of_two=call.case.scale.is_power_of_two,
        out=call.new("rows"),
    )  # fmt: skip
