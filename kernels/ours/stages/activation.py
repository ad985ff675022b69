"""Our activations as the harness sees them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_parity.kernels.call import Call
from moe_parity.kernels.ours.stages import ours
from moe_parity.references.language import Case, ScaleLayout
from moe_parity.references.recipes.ours import OURS, OURS_AFTER
from moe_parity.references.stages import SWIGLU, SWIGLU_QUANT


def _how(call: Call, clamp: str, tensor: bool) -> Any:
    from moe_parity.kernels.ours.activation import Activation

    inputs = call.inputs
    limits = None
    if tensor and inputs.limit is not None:
        shape = (inputs.counts.numel(),)
        limits = torch.full(shape, inputs.limit, device=inputs.rows.device)
    return Activation(
        clamp="none" if inputs.limit is None else clamp,
        limit=0.0 if tensor else inputs.limit or 0.0, limits=limits, alpha=inputs.alpha,
        beta=inputs.beta,
    )  # fmt: skip


def _quantized_rows(case: Case, device: str) -> str | None:
    if case.group not in (64, 128):
        return f"the group must be 64 or 128, not {case.group}."
    return None


def _as_our_gemm_reads(case: Case, device: str) -> str | None:
    if case.scale.is_packed or case.layout is not ScaleLayout.ROW:
        return "formats and layouts are ours_swiglu_quant's."
    return _quantized_rows(case, device)


def _swiglu(call: Call) -> Tensor:
    from moe_parity.kernels.ours import activation as own

    inputs = call.inputs
    how, count = _how(call, "before", False), inputs.counts.numel()
    return own.swiglu(inputs.rows, inputs.expert, 0, count, how, call.new("rows"))


ours("ours_swiglu", SWIGLU, note="Our SwiGLU alone, rounded to BF16 once.")(_swiglu)


def _register_activation(
    name: str, note: str, clamp: str = "before", *, tensor: bool = False, vector: bool | None = None
) -> None:
    recipe = OURS_AFTER if clamp == "after" else OURS

    plain = clamp == "before" and not tensor
    supports = _quantized_rows if plain else _as_our_gemm_reads

    @ours(name, SWIGLU_QUANT, supports=supports, recipe=recipe, note=note)
    def activation(call: Call) -> tuple[Tensor, Tensor]:
        from moe_parity.kernels.ours import activation as own

        inputs = call.inputs
        return own.swiglu_quant(
            inputs.rows, inputs.expert, 0, inputs.counts.numel(), _how(call, clamp, tensor),
            group=call.case.group, scale=call.case.scale, layout=call.case.layout,
            codes=call.new("codes"), scales=call.new("scales"), vector=vector,
        )  # fmt: skip


_register_activation("ours_swiglu_quant", "Our SwiGLU with quantization.")
_register_activation(
    "ours_swiglu_quant_scalar", "The same, element by element: any strides.", vector=False
)
_register_activation("ours_swiglu_quant_after", "The same, the limit after SiLU.", "after")
_register_activation("ours_swiglu_quant_limits", "The same, a limit for each expert.", tensor=True)
