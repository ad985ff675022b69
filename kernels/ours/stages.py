"""Our kernels of single stages as the harness sees them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from moe_parity.kernels.call import Call, Fate, Produced
from moe_parity.kernels.registry import Run, Supports, register
from moe_parity.references.language import (
    Case,
    Check,
    Contract,
    Recipe,
    ScaleLayout,
    Skip,
    Stage,
    Why,
)
from moe_parity.references.recipes.ours import OURS, OURS_AFTER
from moe_parity.references.stages import (
    ACT_QUANT,
    ALIGN,
    COMBINE,
    FC1,
    FC2,
    SWIGLU,
    SWIGLU_QUANT,
    WEIGHT_QUANT,
)
from moe_parity.references.stages.gemm.stage import Fc1, Fc2


def unavailable() -> Skip | None:
    """Return None where Triton is installed, else what to do."""
    if importlib.util.find_spec("triton") is None:
        missing = "Triton is not installed (it exists for Linux only); references need none."
        return Skip(Why.ABSENT, missing)
    return None


SERVING = Contract().promising(Check.NO_SYNC, Check.NO_RECOMPILE)
"""What all of ours promise: they are called in a CUDA graph, at any number of tokens."""


def _ours(
    name: str,
    stage: Stage[Any],
    *,
    recipe: Recipe = OURS,
    supports: Supports | None = None,
    note: str = "",
    configs: Mapping[str, Any] | None = None,
) -> Callable[[Run], Run]:
    return register(
        name, stage=stage, recipes=recipe, supports=supports, unavailable=unavailable,
        triton=True, note=note, contract=SERVING, configs=configs,
    )  # fmt: skip


# --- quantizers ---------------------------------------------------------------------------------


def _activations(case: Case, device: str) -> str | None:
    if case.group not in (64, 128):
        return f"the group must be 64 or 128, not {case.group}."
    return None


@_ours("ours_act_quant", ACT_QUANT, supports=_activations)
def ours_act_quant(call: Call) -> tuple[Tensor, Tensor]:
    """Our Triton activation quantizer."""
    from moe_parity.kernels.ours import quant

    codes, scales, case = call.new("codes"), call.new("scales"), call.case
    quant.act_quant_out(call.inputs.x, codes, scales, case.group, case.scale.is_power_of_two)
    return codes, scales


@_ours("ours_weight_quant", WEIGHT_QUANT)
def ours_weight_quant(call: Call) -> tuple[Tensor, Tensor]:
    """Our Triton weight quantizer, 128 x 128 tiles."""
    from moe_parity.kernels.ours import quant

    codes, scales = call.new("codes"), call.new("scales")
    quant.weight_quant_out(call.inputs.x, codes, scales, call.case.scale.is_power_of_two)
    return codes, scales


# --- alignment ----------------------------------------------------------------------------------


def _align(call: Call, most: int) -> Callable[[], Produced]:
    """Align with one program for up to ``most`` pairs."""
    from moe_parity.kernels.ours import steps

    inputs, block = call.inputs, call.inputs.block
    bound = steps.block_bound(inputs.ids.numel(), inputs.experts, block)
    slots = call.new("slots", (bound * block,), dtype=torch.int32)
    owners = call.new("experts", (bound,), dtype=torch.int32)
    steps.align(
        inputs.ids, inputs.first, inputs.experts, block, slots=slots, block_expert=owners, most=most
    )

    def used_part() -> Produced:
        used = int((owners >= 0).sum())
        outputs = {"experts": owners[:used], "slots": slots[: used * block]}
        fates = torch.full(slots.shape, Fate.UNTOUCHED, dtype=torch.int8)
        fates[: used * block] = Fate.LIVE
        return Produced(outputs=outputs, fates={"slots": fates})

    return used_part


@_ours("ours_align", ALIGN)
def ours_align(call: Call) -> Callable[[], Produced]:
    """Our alignment: one program for up to 128 pairs, three launches for more."""
    from moe_parity.kernels.ours import steps

    return _align(call, steps.SMALL_PAIRS)


@_ours("ours_align_large", ALIGN)
def ours_align_large(call: Call) -> Callable[[], Produced]:
    """Our alignment, the form of three launches for any number of pairs."""
    return _align(call, 0)


# --- GEMMs --------------------------------------------------------------------------------------


def _gemm(call: Call, block: int) -> Tensor:
    from moe_parity.kernels.ours import steps

    inputs, out = call.inputs, call.new("rows")
    # The alignment demands it, and is not what is judged here: codes and scales come as they are.
    ids = inputs.ids.contiguous()
    aligned = steps.align(ids, inputs.first, inputs.w.shape[0], block)
    return steps.grouped_gemm(
        inputs.a, inputs.a_scale, inputs.w, inputs.w_scale, aligned, inputs.expert.numel(),
        inputs.top_k, inputs.bias, out,
    )  # fmt: skip


def _register_gemm(stage: Fc1 | Fc2, path: str, blocks: tuple[int, ...]) -> None:
    """Register the GEMM of a path, which takes the first of the blocks that its tiles can have."""
    note = f"Our grouped GEMM of the {path} path, blocks of {blocks[0]} tokens."
    configs = {f"block{block}": block for block in blocks}

    def supports(case: Case, device: str) -> str | None:
        k = stage.extent(case)[1]
        return f"K = {k} must be a multiple of 128." if k % 128 else None

    @_ours(f"ours_{stage.name}_{path}", stage, supports=supports, note=note, configs=configs)
    def gemm(call: Call) -> Tensor:
        return _gemm(call, call.config or blocks[0])


for _stage in (FC1, FC2):
    _register_gemm(_stage, "decode", (16, 32))
    _register_gemm(_stage, "large", (64, 128))


# --- activations --------------------------------------------------------------------------------


def _how(call: Call, clamp: str, tensor: bool) -> Any:
    from moe_parity.kernels.ours.steps import Activation

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
    if case.group != 128:
        return f"the group must be 128, not {case.group}."
    if case.scale.is_packed or case.layout is not ScaleLayout.ROW:
        return "it writes row-major fp32 scales, which is what our GEMM reads."
    return None


def _swiglu(call: Call) -> Tensor:
    from moe_parity.kernels.ours import steps

    inputs = call.inputs
    how, count = _how(call, "before", False), inputs.counts.numel()
    return steps.swiglu(inputs.rows, inputs.expert, 0, count, how, call.new("rows"))


_ours("ours_swiglu", SWIGLU, note="Our SwiGLU alone, rounded to BF16 once.")(_swiglu)


def _register_activation(name: str, note: str, clamp: str, tensor: bool) -> None:
    recipe = OURS_AFTER if clamp == "after" else OURS

    @_ours(name, SWIGLU_QUANT, supports=_quantized_rows, recipe=recipe, note=note)
    def activation(call: Call) -> tuple[Tensor, Tensor]:
        from moe_parity.kernels.ours import steps

        inputs = call.inputs
        return steps.swiglu_quant(
            inputs.rows, inputs.expert, 0, inputs.counts.numel(), _how(call, clamp, tensor),
            call.case.scale.is_power_of_two, call.new("codes"), call.new("scales"),
        )  # fmt: skip


_register_activation("ours_swiglu_quant", "Our SwiGLU with quantization.", "before", False)
_register_activation("ours_swiglu_quant_after", "The same, the limit after SiLU.", "after", False)
_register_activation(
    "ours_swiglu_quant_limits", "The same, a limit for each expert.", "before", True
)


# --- top-k sum ----------------------------------------------------------------------------------


@_ours("ours_combine", COMBINE)
def ours_combine(call: Call) -> Tensor:
    """Our top-k sum."""
    from moe_parity.kernels.ours import steps

    inputs, out = call.inputs, call.new("out")
    steps.combine(inputs.rows, inputs.weights, inputs.ids, inputs.first, inputs.experts, out)
    return out
