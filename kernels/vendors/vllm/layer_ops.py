"""vLLM's CUDA ops between the GEMMs: activations, alignment, the top-k sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_parity.kernels.registry import register
from moe_parity.kernels.stage_call import (
    ExpertRows,
    Fate,
    GateUpRows,
    Produced,
    RoutedRows,
    StageCall,
)
from moe_parity.kernels.vendors.vllm import package as vllm_package
from moe_parity.references.arithmetic.formats import ue8m0_decode, unpack_ue8m0
from moe_parity.references.language import (
    Case,
    Gate,
    Recipe,
    Routing,
    ScaleFormat,
    ScaleLayout,
    Stage,
)
from moe_parity.references.language.recipes import VLLM_CLAMPED_SCALAR, VLLM_TRITON

GPU = "a CUDA op; it needs a GPU."


def _arguments(op: Any) -> int:
    """Return how many arguments this version's op takes."""
    return len(op.default._schema.arguments)


# --- activations --------------------------------------------------------------------------------


def _supports_silu(case: Case, device: str) -> str | None:
    if device != "cuda":
        return GPU
    if case.clamp is not None or case.gate is not Gate.SILU:
        return "no limit, no swigluoai: those are silu_and_mul_with_clamp's."
    return None


@register(
    "vllm_silu_and_mul", stage=Stage.SWIGLU, recipes="vllm_triton", supports=_supports_silu,
    unavailable=vllm_package.no_library,
)  # fmt: skip
def vllm_silu_and_mul(call: StageCall) -> Produced:
    """Call vLLM's _C.silu_and_mul."""
    rows = _gate_up(call).rows
    out = call.new("out", *_shape(rows), torch.bfloat16)
    torch.ops._C.silu_and_mul(out, rows)
    return Produced(outputs={"rows": out})


def _supports_clamp(case: Case, device: str) -> str | None:
    if device != "cuda":
        return GPU
    return None if case.clamp is not None else "needs a limit."


def _clamp_recipes(case: Case, device: str) -> tuple[Recipe, ...]:  # noqa: ARG001
    return (VLLM_TRITON,) if case.i % 8 == 0 else (VLLM_CLAMPED_SCALAR,)


@register(
    "vllm_silu_and_mul_with_clamp", stage=Stage.SWIGLU, recipes=_clamp_recipes,
    supports=_supports_clamp, unavailable=vllm_package.no_library,
)  # fmt: skip
def vllm_silu_and_mul_with_clamp(call: StageCall) -> Produced:
    """Call vLLM's _C.silu_and_mul_with_clamp."""
    inputs = _gate_up(call)
    out = call.new("out", *_shape(inputs.rows), torch.bfloat16)
    torch.ops._C.silu_and_mul_with_clamp(out, inputs.rows, inputs.limit, inputs.alpha, inputs.beta)
    return Produced(outputs={"rows": out})


def _gate_up(call: StageCall) -> GateUpRows:
    assert isinstance(call.inputs, GateUpRows)
    return call.inputs


def _shape(rows: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return shape and strides of the activated rows."""
    width = rows.shape[1] // 2
    return (rows.shape[0], width), (width, 1)


def _supports_block(case: Case, device: str) -> str | None:
    if device != "cuda":
        return GPU
    if case.clamp is not None or case.gate is not Gate.SILU:
        return "the op has no limit and no swigluoai."
    if case.scale is not ScaleFormat.FP32 or case.layout is ScaleLayout.TMA:
        return "the op writes fp32 scales, row- or column-major; it has no power-of-two format."
    if case.group not in (64, 128) or case.i % case.group:
        return f"I = {case.i} must be a multiple of the group, 64 or 128."
    return "the op launches an empty grid for zero rows." if case.m == 0 else None


@register(
    "vllm_silu_and_mul_per_block_quant", stage=Stage.SWIGLU_QUANT, recipes="vllm_fused_silu",
    supports=_supports_block, unavailable=vllm_package.no_library,
)  # fmt: skip
def vllm_silu_and_mul_per_block_quant(call: StageCall) -> Produced:
    """Call vLLM's _C.silu_and_mul_per_block_quant."""
    rows, case = _gate_up(call).rows, call.case
    shape, strides = _shape(rows)
    groups = shape[1] // case.group
    column = case.layout is ScaleLayout.COLUMN
    codes = call.new("codes", shape, strides, torch.uint8)
    scale_strides = (1, shape[0]) if column else (groups, 1)
    scales = call.new("scales", (shape[0], groups), scale_strides, torch.float32)
    torch.ops._C.silu_and_mul_per_block_quant(
        codes.view(torch.float8_e4m3fn), rows, scales, case.group, None, column
    )
    return Produced(outputs={"codes": codes, "scales": scales})


def _supports_masked(case: Case, device: str) -> str | None:
    if device != "cuda":
        return GPU
    if case.clamp is not None or case.gate is not Gate.SILU or case.group != 128:
        return "the op has no limit and no swigluoai, and groups of 128."
    return None if case.i % 128 == 0 else f"I = {case.i} is not a multiple of 128."


@register(
    "vllm_persistent_masked_silu_mul_quant", stage=Stage.SWIGLU_QUANT, recipes="vllm_batched",
    supports=_supports_masked, unavailable=vllm_package.no_library,
)  # fmt: skip
def vllm_persistent_masked_silu_mul_quant(call: StageCall) -> Produced:
    """Call vLLM's _C.persistent_masked_m_silu_mul_quant on [E, T, 2 * I]."""
    inputs, case = _gate_up(call), call.case
    experts, width = inputs.counts.numel(), inputs.rows.shape[1] // 2
    tallest = int(inputs.counts.max()) + 3
    expert = torch.arange(experts, device=inputs.rows.device).repeat_interleave(
        inputs.counts.long()
    )
    start = (inputs.counts.cumsum(0) - inputs.counts).long()
    row = torch.arange(expert.numel(), device=expert.device) - start[expert]
    y = torch.full((experts, tallest, 2 * width), float("nan"), dtype=torch.bfloat16, device=expert.device)  # fmt: skip  # noqa: E501
    y[expert, row] = inputs.rows
    packed = case.scale is ScaleFormat.UE8M0_PACKED
    groups = width // 128
    columns = -(-groups // 4) if packed else groups
    codes = call.new("codes", (experts, tallest, width), (tallest * width, width, 1), torch.uint8)
    scales = call.new(
        "scales", (experts, tallest, columns), (tallest * columns, 1, tallest),
        torch.int32 if packed else torch.float32,
    )  # fmt: skip
    scales.zero_()  # as vLLM's wrapper does
    torch.ops._C.persistent_masked_m_silu_mul_quant(
        y, inputs.counts, codes.view(torch.float8_e4m3fn), scales, case.scale.is_power_of_two
    )
    live = torch.arange(tallest, device=expert.device)[None] < inputs.counts[:, None]
    kept = scales[expert, row]
    wide = ue8m0_decode(unpack_ue8m0(kept.contiguous(), groups)) if packed else kept
    return Produced(
        outputs={"codes": codes[expert, row], "scales": wide},
        fates={
            "codes": torch.where(live, int(Fate.LIVE), int(Fate.UNTOUCHED)).to(torch.int8),
            "scales": torch.where(live, int(Fate.LIVE), int(Fate.ZERO)).to(torch.int8),
        },
    )


# --- routing ------------------------------------------------------------------------------------


def _supports_routed(case: Case, device: str) -> str | None:
    if device != "cuda":
        return GPU
    if case.routing is Routing.HOLES:
        return "vLLM's ids are those of experts."
    return None if case.m else "vLLM returns early for zero tokens."


@register(
    "vllm_moe_align_block_size", stage=Stage.ALIGN, recipes="no_rounding",
    supports=_supports_routed, unavailable=vllm_package.no_moe_library,
)  # fmt: skip
def vllm_moe_align_block_size(call: StageCall) -> Produced:
    """Call vLLM's _moe_C.moe_align_block_size, with expert_map under expert parallelism."""
    inputs, case = call.inputs, call.case
    assert isinstance(inputs, RoutedRows)
    block = 16 if case.m <= 64 else 64
    pairs = inputs.ids.numel()
    most = pairs + case.e * (block - 1)
    most = min(most, pairs * block) if pairs < case.e else most
    slots = call.new("slots", (most, 1), (1, 1), torch.int32)
    blocks = -(-most // block)
    experts = call.new("experts", (blocks, 1), (1, 1), torch.int32)
    padded = call.new("padded", (1, 1), (1, 1), torch.int32)
    op = torch.ops._moe_C.moe_align_block_size
    rest = (inputs.expert_map, None)[: _arguments(op) - 6]
    op(inputs.ids, case.e, block, slots.view(-1), experts.view(-1), padded.view(-1), *rest)
    used = int(padded)
    return Produced(
        outputs={
            "experts": experts.flatten()[: used // block].cpu(),
            "slots": by_expert(slots.flatten()[:used].cpu(), experts.flatten().cpu(), block),
        },
        fates={"slots": _until(most, used), "experts": _until(blocks, used // block)},
    )


def by_expert(slots: Tensor, experts: Tensor, block: int) -> Tensor:
    """Return the slots with each expert's own in ascending order: atomics left them in any."""
    owner = experts[: slots.numel() // block].repeat_interleave(block).long()
    # Blocks of an expert are neighbours, so a sort within equal owners keeps their place.
    place = torch.zeros_like(owner)
    place[1:] = (owner[1:] != owner[:-1]).long()
    order = torch.argsort(place.cumsum(0) * (1 << 32) + slots.long())
    return slots[order]


def _until(rows: int, live: int) -> Tensor:
    fates = torch.full((rows,), Fate.JUNK, dtype=torch.int8)
    fates[:live] = Fate.LIVE
    return fates


def _supports_sum(case: Case, device: str) -> str | None:
    reason = _supports_routed(case, device)
    if reason or case.ep_size == 1:
        return reason
    if vllm_package.divides():
        return "0.26.0 sums all rows: expert parallelism zeroes the foreign ones before."
    return None


@register(
    "vllm_moe_sum", stage=Stage.COMBINE, recipes="vllm_triton", supports=_supports_sum,
    unavailable=vllm_package.no_moe_library,
)  # fmt: skip
def vllm_moe_sum(call: StageCall) -> Produced:
    """Call vLLM's _moe_C.moe_sum on rows that carry their weights."""
    inputs = call.inputs
    assert isinstance(inputs, ExpertRows)
    tokens, _, width = inputs.rows.shape
    out = call.new("out", (tokens, width), (width, 1), torch.bfloat16)
    op = torch.ops._moe_C.moe_sum
    mapped = inputs.expert_map
    rest = (None if mapped is None else inputs.ids, mapped)[: _arguments(op) - 2]
    op(inputs.rows, out, *rest)
    return Produced(outputs={"out": out})
