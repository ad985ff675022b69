"""vLLM's CUDA ops between the GEMMs: activations, alignment, the top-k sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_parity.kernels.call import Call, Fate, Produced, demand_aligned, demand_contiguous
from moe_parity.kernels.registry import register
from moe_parity.kernels.vendors.vllm import package
from moe_parity.references.arithmetic.formats import without_missing_groups
from moe_parity.references.language import (
    Case,
    Gate,
    InputDtype,
    Recipe,
    ScaleFormat,
    ScaleLayout,
)
from moe_parity.references.recipes.vllm import VLLM_CLAMPED_SCALAR, VLLM_TRITON
from moe_parity.references.stages.routing import place


def _arguments(op: Any) -> int:
    """Return how many arguments this version's op takes."""
    return len(op.default._schema.arguments)


# --- activations --------------------------------------------------------------------------------


def _supports_silu(case: Case, device: str) -> str | None:
    if case.clamp is not None or case.gate is not Gate.SILU:
        return "no limit, no swigluoai: those are silu_and_mul_with_clamp's."
    return None


@register(
    "vllm_silu_and_mul", stage="swiglu", recipes="vllm_triton", supports=_supports_silu,
    unavailable=package.op("_C", "silu_and_mul", 2),
    needs_gpu=True, versions=package.versions,
)  # fmt: skip
def vllm_silu_and_mul(call: Call) -> Tensor:
    """Call vLLM's _C.silu_and_mul."""
    out = call.new("rows")
    torch.ops._C.silu_and_mul(out, _rows(call))
    return out


def _supports_clamp(case: Case, device: str) -> str | None:
    return None if case.clamp is not None else "needs a limit."


def _clamp_recipes(case: Case, device: str) -> tuple[Recipe, ...]:
    return (VLLM_TRITON,) if case.i % 8 == 0 else (VLLM_CLAMPED_SCALAR,)


@register(
    "vllm_silu_and_mul_with_clamp", stage="swiglu", recipes=_clamp_recipes,
    supports=_supports_clamp, unavailable=package.op("_C", "silu_and_mul_with_clamp", 5),
    needs_gpu=True, versions=package.versions,
)  # fmt: skip
def vllm_silu_and_mul_with_clamp(call: Call) -> Tensor:
    """Call vLLM's _C.silu_and_mul_with_clamp."""
    inputs, out = call.inputs, call.new("rows")
    torch.ops._C.silu_and_mul_with_clamp(out, _rows(call), inputs.limit, inputs.alpha, inputs.beta)
    return out


def _rows(call: Call) -> Tensor:
    return _plain(call.inputs.rows)


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor that an op of vector loads may read; raises ParityError for any other."""
    return demand_aligned(demand_contiguous(tensor, "vLLM's op"), "vLLM's op")


def _supports_block(case: Case, device: str) -> str | None:
    if case.clamp is not None or case.gate is not Gate.SILU:
        return "the op has no limit and no swigluoai."
    if case.scale is not ScaleFormat.FP32 or case.layout is ScaleLayout.TMA:
        return "the op writes fp32 scales, row- or column-major; it has no power-of-two format."
    if case.group not in (64, 128):
        return f"the group must be 64 or 128, not {case.group}."
    return "the op launches an empty grid for zero rows." if case.m == 0 else None


@register(
    "vllm_silu_and_mul_per_block_quant", stage="swiglu_quant", recipes="vllm_fused_silu",
    supports=_supports_block, unavailable=package.op("_C", "silu_and_mul_per_block_quant", 6),
    needs_gpu=True, versions=package.versions,
)  # fmt: skip
def vllm_silu_and_mul_per_block_quant(call: Call) -> tuple[Tensor, Tensor]:
    """Call vLLM's _C.silu_and_mul_per_block_quant."""
    codes, scales, case = call.new("codes"), call.new("scales"), call.case
    torch.ops._C.silu_and_mul_per_block_quant(
        codes.view(torch.float8_e4m3fn), _rows(call), scales, case.group, None,
        case.layout is ScaleLayout.COLUMN,
    )  # fmt: skip
    return codes, scales


ROOM = 1 << 14
"""Experts times rows up to which a buffer has room for all rows in each expert."""


def _supports_masked(case: Case, device: str) -> str | None:
    if case.clamp is not None or case.gate is not Gate.SILU or case.group != 128:
        return "the op has no limit and no swigluoai, and groups of 128."
    if case.layout is not ScaleLayout.ROW:
        return "the adapter gathers its scales row by row."
    return None if case.i % 128 == 0 else f"I = {case.i} is not a multiple of 128."


@register(
    "vllm_persistent_masked_silu_mul_quant", stage="swiglu_quant", recipes="vllm_batched",
    supports=_supports_masked,
    unavailable=package.op("_C", "persistent_masked_m_silu_mul_quant", 5),
    needs_gpu=True, versions=package.versions,
)  # fmt: skip
def vllm_persistent_masked_silu_mul_quant(call: Call) -> Produced:
    """Call vLLM's _C.persistent_masked_m_silu_mul_quant on [E, T, 2 * I]."""
    inputs, case = call.inputs, call.case
    experts, width = inputs.counts.numel(), inputs.rows.shape[1] // 2
    expert, rows = inputs.expert, inputs.rows.shape[0]
    # Looking for the largest count waits for the GPU: where there is room, room for any count.
    tallest = (rows if experts * rows <= ROOM else int(inputs.counts.max())) + 3
    # Rows of nobody may lie between the others; they go where no expert looks.
    placed, owned = place(expert, experts, 1), expert >= 0
    expert = expert.clamp(min=0)
    row = torch.where(owned, placed.slot - placed.starts[expert], tallest - 1)
    shape = (experts, tallest, 2 * width)
    y = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=expert.device)
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
    kept = scales[expert, row].contiguous()
    if packed:
        kept = without_missing_groups(kept, groups)
    return Produced(
        outputs={"codes": codes[expert, row], "scales": kept},
        fates={
            "codes": torch.where(live, int(Fate.LIVE), int(Fate.UNTOUCHED)).to(torch.int8),
            "scales": torch.where(live, int(Fate.LIVE), int(Fate.ZERO)).to(torch.int8),
        },
    )


# --- routing ------------------------------------------------------------------------------------


def _supports_routed(case: Case, device: str) -> str | None:
    if case.has_odd_ids:
        return "vLLM's ids are those of experts."
    return None if case.m else "vLLM returns early for zero tokens."


def _supports_align(case: Case, device: str) -> str | None:
    padded = -(-case.e // 32) * 32
    if padded >= 1024:
        return f"the op takes experts in warps of 32, fewer than 1024; {case.e} make {padded}."
    return _supports_routed(case, device)


@register(
    "vllm_moe_align_block_size", stage="align", recipes="no_rounding",
    supports=_supports_align, unavailable=package.op("_moe_C", "moe_align_block_size", 6, 7, 8),
    needs_gpu=True, versions=package.versions,
)  # fmt: skip
def vllm_moe_align_block_size(call: Call) -> Callable[[], Produced]:
    """Call vLLM's _moe_C.moe_align_block_size, with expert_map under expert parallelism."""
    inputs, case = call.inputs, call.case
    _plain(inputs.ids)
    block = inputs.block
    pairs = inputs.ids.numel()
    most = pairs + case.e * (block - 1)
    most = min(most, pairs * block) if pairs < case.e else most
    slots = call.new("slots", (most,), dtype=torch.int32)
    blocks = -(-most // block)
    experts = call.new("experts", (blocks,), dtype=torch.int32)
    padded = call.new("padded", (1,), dtype=torch.int32)
    op = torch.ops._moe_C.moe_align_block_size
    rest = (inputs.expert_map, None)[: _arguments(op) - 6]
    op(inputs.ids, case.e, block, slots, experts, padded, *rest)

    def used_part() -> Produced:
        used = int(padded)
        return Produced(
            outputs={
                "experts": experts[: used // block],
                "slots": by_expert(slots[:used], experts, block),
            },
            fates={"slots": _until(most, used), "experts": _until(blocks, used // block)},
        )

    return used_part


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
    if case.dtype is not InputDtype.BF16:
        return "the adapter has BF16 rows, and the op the same type on both sides."
    if reason or case.ep_size == 1:
        return reason
    if package.divides():
        return "up to 0.26.0 the op sums all rows: expert parallelism zeroes foreign ones before."
    return None


@register(
    "vllm_moe_sum", stage="combine", recipes="vllm_triton", supports=_supports_sum,
    unavailable=package.op("_moe_C", "moe_sum", 2, 3, 4),
    needs_gpu=True, versions=package.versions,
)  # fmt: skip
def vllm_moe_sum(call: Call) -> Tensor:
    """Call vLLM's _moe_C.moe_sum on rows that carry their weights."""
    inputs = call.inputs
    rows, out = _plain(inputs.rows), call.new("out")
    _plain(inputs.ids)
    op = torch.ops._moe_C.moe_sum
    mapped = inputs.expert_map
    rest = (None if mapped is None else inputs.ids, mapped)[: _arguments(op) - 2]
    op(rows, out, *rest)
    return out
