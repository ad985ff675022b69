"""Faults of arithmetic: quantizers, powers of two, scales as they come, rounding, sums."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from moe_parity.kernels import Call
from moe_parity.references.arithmetic.formats import ScaleFormat, bits_of, from_bits
from moe_parity.references.language import Case
from moe_parity.references.stages.quant.decisions import Apply, Floor, PowerOfTwo, ScaleForm
from moe_parity.references.stages.swiglu.decisions import ClampOrder, ProductRounding
from moe_parity.suites.faulty.planting import (
    Outputs,
    Run,
    case_is,
    fault,
    given,
    layer_with,
    right,
    with_parts,
    written,
    wrong,
)

UE8M0 = case_is(lambda c: c.scale == "ue8m0")
FP32 = case_is(lambda c: c.scale == "fp32")
TINY = 2.0**-126


def _quantizer(name: str, **changes: Any) -> Any:
    return with_parts(**{name: changes})


def _half_the_amax(call: Call, made: Outputs) -> Outputs:
    """Take maxima of the even elements alone."""
    x = call.inputs.x.clone()
    odd = x[:, 1::2].clone()
    x[:, 1::2] = 0
    scales = right(call, given(call, x=x))
    x[:, 1::2] = odd
    return {"codes": made["codes"], "scales": scales["scales"]}


def _payload(call: Call, made: Outputs) -> Outputs:
    """Round scales to powers of two after the codes are made."""
    words = {"scale": ScaleFormat.FP32}
    return made | {"codes": right(call, **words)["codes"]}


def _of_scales(change: Any, *names: str) -> Any:
    def make(call: Call) -> Any:
        return given(call, **{name: change(getattr(call.inputs, name)) for name in names})

    return make


def _flushed(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale.abs() < TINY, torch.zeros_like(scale), scale)


def _capped(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale >= 2.0**127, torch.full_like(scale, 2.0**126), scale)


def _nan_is_one(scale: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(scale, nan=1.0, posinf=torch.inf, neginf=-torch.inf)


def _zero_is_one(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _halved(scale: torch.Tensor) -> torch.Tensor:
    """Round a power of two down where it should be left: an exponent that is one less."""
    return from_bits(bits_of(scale) - (1 << 23))


def _as_row_major(scale: torch.Tensor) -> torch.Tensor:
    """Read memory of another layout as if rows came one after the other."""
    if scale.is_contiguous() or scale.numel() == 0:
        return scale
    flat = scale.as_strided((scale.shape[0] * scale.shape[1],), (1,))
    return flat.view(scale.shape)


def _ignoring_gaps(name: str) -> Any:
    """Read an input as if there were nothing between its rows."""

    def make(call: Call) -> Any:
        value = getattr(call.inputs, name)
        if value.is_contiguous() or value.numel() == 0:
            return call.inputs
        shape, stride = value.shape, [1]
        for size in reversed(shape[1:]):
            stride.insert(0, stride[0] * size)
        return given(call, **{name: value.as_strided(shape, stride)})

    return make


def _rounded_down_base(name: str) -> Any:
    """Read an input from the multiple of 16 bytes below its first byte."""

    def make(call: Call) -> Any:
        value = getattr(call.inputs, name)
        past = value.data_ptr() % 16 // value.element_size()
        at = value.storage_offset() - past
        if not past or at < 0 or value.numel() == 0:
            return call.inputs
        return given(call, **{name: value.as_strided(value.shape, value.stride(), at)})

    return make


def _bf16_sum(call: Call) -> Any:
    rows, owned = call.inputs.rows, (call.inputs.expert >= 0).view(call.inputs.ids.shape)
    total = torch.zeros(rows.shape[0], rows.shape[2], dtype=torch.bfloat16)
    for n in range(rows.shape[1]):
        row = rows[:, n].float()
        if call.inputs.weights is not None:
            row = row * call.inputs.weights[:, n, None]
        total = torch.where(owned[:, n, None], (total.float() + row).bfloat16(), total)
    return written(call, {"out": total.to(right(call)["out"].dtype)})


def _squared(call: Call) -> Any:
    weights = call.inputs.weights
    return call.inputs if weights is None else given(call, weights=weights * weights)


def _layer_squared(call: Call) -> Any:
    weights = call.inputs.batch.weights
    own = weights if weights is None else weights * weights
    return layer_with(call, batch={"weights": own})


def _layer_swapped(call: Call) -> Any:
    own = call.inputs.experts
    half = own.w13.shape[1] // 2
    scale = own.w13_scale
    mid = scale.shape[1] // 2
    if own.w13.shape[1] % 256:
        return call.inputs
    return layer_with(call, experts={
        "w13": torch.cat([own.w13[:, half:], own.w13[:, :half]], 1),
        "w13_scale": torch.cat([scale[:, mid:], scale[:, :mid]], 1),
    })  # fmt: skip


def _layer_unlimited(call: Call) -> Any:
    return layer_with(call, asked={"limit": None})


def _format(scale: ScaleFormat) -> Run:
    """Return a quantizer that makes scales of one format whatever is asked."""

    def run(call: Call) -> Any:
        case: Case = dataclasses.replace(call.case, scale=scale)
        return written(call, dict(call.stage.reference(case, call.inputs, right_of(call))))

    return run


def right_of(call: Call) -> Any:
    """Return our recipe."""
    return with_parts()


DIVIDE = {"apply": Apply.DIVIDE}
BELOW = {"power_of_two": PowerOfTwo.BIT_CEIL}
FAULTS = [
    # --- quantizers ---
    fault("quant_divides", "div-recip", "act_quant",
          wrong(recipe=_quantizer("act_quant", **DIVIDE)), "quant.apply=divide",
          "it divides where the recipe multiplies by an inverse"),
    fault("gate_quant_divides", "div-recip", "swiglu_quant",
          wrong(recipe=_quantizer("swiglu_quant", **DIVIDE)), "quant.apply=divide",
          "it divides where the recipe multiplies by an inverse"),
    fault("quant_scale_divided", "div-recip", "weight_quant",
          wrong(recipe=_quantizer("weight_quant", scale_form=ScaleForm.DIV_448)),
          "quant.scale_form=div_448", "the stored scale is amax / 448, not 1 / (448 / amax)"),
    fault("gate_rounds_twice", "double-round fusion-swap", "swiglu_quant",
          wrong(recipe=with_parts(swiglu={"product_rounding": ProductRounding.TWICE})),
          "swiglu.product_rounding=twice", "silu is rounded to BF16 before the product"),
    fault("gate_rounds_never", "double-round fusion-swap", "layer",
          wrong(recipe=with_parts(swiglu={"product_rounding": ProductRounding.NONE})),
          "swiglu.product_rounding=none", "the product is not rounded to BF16"),
    fault("quant_no_floor", "amax-edge", "act_quant",
          wrong(recipe=_quantizer("act_quant", floor=Floor.NONE)), "quant.floor=none",
          "tiny maxima have no floor"),
    fault("weight_amax_of_evens", "amax-reduce", "weight_quant", wrong(edit=_half_the_amax),
          "amax_of_a_part", "the stored scale is made of the even columns alone"),
    fault("quant_payload", "ue8m0-payload", "act_quant", wrong(UE8M0, edit=_payload),
          "payload", "codes are made by the scale before it became a power of two"),
    fault("quant_power_below", "ue8m0-rounding", "act_quant",
          wrong(UE8M0, edit=lambda c, m: m | {"scales": _halved(m["scales"])}),
          "half_power power_below exponent_less scale_factor",
          "the exponent of every stored scale is one too small"),
    fault("quant_flag_lost", "ue8m0-dispatch", "act_quant",
          wrong(UE8M0, scale=ScaleFormat.FP32), "power_lost",
          "powers of two are asked for and fp32 scales come"),
    fault("gate_quant_flag_lost", "ue8m0-dispatch", "swiglu_quant",
          wrong(UE8M0, scale=ScaleFormat.FP32), "power_lost",
          "powers of two are asked for and fp32 scales come"),
    # --- scales as they come ---
    fault("gemm_exponent_0", "exponents ue8m0-edge-code", "fc1",
          wrong(UE8M0, given=_of_scales(_flushed, "a_scale", "w_scale")),
          "subnormal_scale_flushed", "the exponent byte 0 is read as zero"),
    fault("gemm2_exponent_254", "exponents ue8m0-edge-code", "fc2",
          wrong(UE8M0, given=_of_scales(_capped, "a_scale", "w_scale")),
          "scale_exponent_clamped", "the exponent byte 254 is read as 253"),
    fault("gemm2_subnormal_scale", "fp32-scales amax-edge", "fc2",
          wrong(FP32, given=_of_scales(_flushed, "a_scale", "w_scale")),
          "subnormal_scale_flushed", "subnormal scales are read as zero"),
    fault("gemm_zero_scale", "fp32-scales amax-edge", "fc1",
          wrong(given=_of_scales(_zero_is_one, "a_scale", "w_scale")),
          "zero_scale_lost", "a scale of zero is read as one"),
    fault("gemm_nan_scale", "fp32-scales pad-nan", "fc1",
          wrong(given=_of_scales(_nan_is_one, "a_scale")),
          "nan_scale_lost nan_as_zero", "a scale that is NaN is read as one"),
    fault("permute_column_major", "scale-inputs scale-layout", "permute",
          wrong(given=_of_scales(_as_row_major, "scales")), "scale_layout_ignored",
          "column-major scales are read as row-major"),
    fault("gemm_column_major", "scale-inputs scale-layout", "fc1",
          wrong(given=_of_scales(_as_row_major, "a_scale")), "scale_layout_ignored",
          "column-major scales are read as row-major"),
    fault("sum_gaps_ignored", "gaps stride", "combine",
          wrong(given=_ignoring_gaps("rows")), "row_stride contiguous_ignored",
          "gaps between rows are read as rows"),
    fault("gate_gaps_ignored", "gaps stride", "swiglu", wrong(given=_ignoring_gaps("rows")),
          "row_stride", "gaps between rows are read as rows"),
    fault("quant_gaps_ignored", "gaps stride", "act_quant", wrong(given=_ignoring_gaps("x")),
          "row_stride rows_transposed", "gaps between rows are read as rows"),
    fault("quant_base_rounded", "misaligned", "act_quant", wrong(given=_rounded_down_base("x")),
          "offset_ignored", "its input is read from the multiple of 16 bytes below"),
    fault("gemm_base_rounded", "misaligned", "fc1", wrong(given=_rounded_down_base("a")),
          "offset_ignored", "its input is read from the multiple of 16 bytes below"),
    # --- sums, weights, limits ---
    fault("sum_in_bf16", "topk-sum", "combine", _bf16_sum, "narrow_accumulator",
          "it sums in BF16"),
    fault("sum_weights_squared", "route-scale", "combine", wrong(given=_squared),
          "weights_squared", "the routing weight enters twice"),
    fault("layer_weights_squared", "route-scale", "layer", wrong(given=_layer_squared),
          "weights_squared", "the routing weight enters twice"),
    fault("layer_gate_up_swapped", "weight-layout", "layer", wrong(given=_layer_swapped),
          "gate_up_swapped", "the halves of w13 are swapped"),
    fault("layer_limit_lost", "clamp-lost", "layer", wrong(given=_layer_unlimited),
          "swiglu.clamp_order=ignored", "the limit is lost"),
    fault("gate_limit_after", "clamp-lost", "swiglu",
          wrong(recipe=with_parts(swiglu={"clamp_order": ClampOrder.AFTER})),
          "swiglu.clamp_order=after", "the limit comes after SiLU"),
]  # fmt: skip
