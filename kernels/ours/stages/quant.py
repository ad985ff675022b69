"""Our quantizers as the harness sees them."""

from __future__ import annotations

from torch import Tensor

from moe_parity.kernels.call import Call
from moe_parity.kernels.ours.stages import ours
from moe_parity.references.language import Case
from moe_parity.references.stages import ACT_QUANT, WEIGHT_QUANT


def _activations(case: Case, device: str) -> str | None:
    if case.group not in (64, 128):
        return f"the group must be 64 or 128, not {case.group}."
    return None


@ours("ours_act_quant", ACT_QUANT, supports=_activations)
def ours_act_quant(call: Call) -> tuple[Tensor, Tensor]:
    """Our Triton activation quantizer."""
    from moe_parity.kernels.ours import quant

    codes, scales, case = call.new("codes"), call.new("scales"), call.case
    quant.act_quant_out(call.inputs.x, codes, scales, case.group, case.scale.is_power_of_two)
    return codes, scales


@ours("ours_weight_quant", WEIGHT_QUANT)
def ours_weight_quant(call: Call) -> tuple[Tensor, Tensor]:
    """Our Triton weight quantizer, 128 x 128 tiles."""
    from moe_parity.kernels.ours import quant

    codes, scales = call.new("codes"), call.new("scales")
    quant.weight_quant_out(call.inputs.x, codes, scales, call.case.scale.is_power_of_two)
    return codes, scales
