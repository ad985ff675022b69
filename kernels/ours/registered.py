"""Our Triton kernels as the harness sees them."""

from __future__ import annotations

import importlib.util

from torch import Tensor

from moe_parity.kernels.call import Call
from moe_parity.kernels.registry import register
from moe_parity.references.language import Case, ScaleFormat, ScaleLayout, Stage


def unavailable() -> str | None:
    """Return None where Triton is installed, else what to do."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (it exists for Linux only); references need none."
    return None


def _weights(case: Case, device: str) -> str | None:  # noqa: ARG001
    if case.scale is ScaleFormat.UE8M0_PACKED:
        return "packed exponents are a format of activations."
    if case.layout is not ScaleLayout.ROW:
        return "weight scales are row-major."
    if case.group != 128:
        return "weights are quantized in tiles of 128 x 128."
    return None


def _activations(case: Case, device: str) -> str | None:  # noqa: ARG001
    if case.group not in (64, 128):
        return f"the group must be 64 or 128, not {case.group}."
    if case.h % case.group:
        return f"K = {case.h} is not a multiple of the group, {case.group}."
    return None


@register(
    "ours_act_quant",
    stage=Stage.ACT_QUANT,
    recipes="ours",
    supports=_activations,
    unavailable=unavailable,
    triton=True,
)
def ours_act_quant(call: Call) -> tuple[Tensor, Tensor]:
    """Our Triton activation quantizer."""
    from moe_parity.kernels.ours import quant

    codes, scales = call.new_codes(), call.new_scales()
    quant.act_quant_out(call.x, codes, scales, call.case.group, call.case.scale.is_power_of_two)
    return codes, scales


@register(
    "ours_weight_quant",
    stage=Stage.WEIGHT_QUANT,
    recipes="ours",
    supports=_weights,
    unavailable=unavailable,
    triton=True,
)
def ours_weight_quant(call: Call) -> tuple[Tensor, Tensor]:
    """Our Triton weight quantizer, 128 x 128 tiles."""
    from moe_parity.kernels.ours import quant

    codes, scales = call.new_codes(), call.new_scales()
    quant.weight_quant_out(call.x, codes, scales, call.case.scale.is_power_of_two)
    return codes, scales
