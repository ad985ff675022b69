"""vLLM's CUDA quantizers, per token and group."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_parity.kernels.call import Call, demand_aligned, demand_contiguous
from moe_parity.kernels.registry import register
from moe_parity.kernels.vendors.vllm import package
from moe_parity.references.arithmetic.formats import E4M3
from moe_parity.references.language import Case, Contract, InputDtype, Recipe, ScaleFormat
from moe_parity.references.recipes.vllm import (
    VLLM_CUDA,
    VLLM_CUDA_0_26,
    VLLM_CUDA_UE8M0,
    VLLM_CUDA_UE8M0_GENERIC,
)

_EPS = 1e-10
_LIMITS = (-E4M3.largest, E4M3.largest)


def _plain(x: Tensor) -> Tensor:
    """Return input that an op of vector loads may read; raises ParityError for any other."""
    return demand_aligned(demand_contiguous(x, "vLLM's op"), "vLLM's op")


def _supports(case: Case, device: str) -> str | None:
    if case.scale is ScaleFormat.UE8M0_PACKED:
        return "packed exponents are another op's: vllm_per_token_group_packed."
    if case.m == 0 and package.divides():
        return "0.26.0 launches an empty grid for zero tokens, which CUDA refuses."
    return None


def _recipes(case: Case, device: str) -> tuple[Recipe, ...]:
    if case.scale is ScaleFormat.FP32:
        return (VLLM_CUDA_0_26,) if package.divides() else (VLLM_CUDA,)
    # Groups other than 128 and fp32 input take the generic kernel, which rounds by log2.
    register_path = (
        case.group == 128 and case.dtype is not InputDtype.FP32 and not package.divides()
    )
    return (VLLM_CUDA_UE8M0,) if register_path else (VLLM_CUDA_UE8M0_GENERIC,)


@register(
    "vllm_per_token_group",
    stage="act_quant",
    recipes=_recipes,
    supports=_supports,
    unavailable=package.op("_C", "per_token_group_fp8_quant", 10),
    needs_gpu=True,
    versions=package.versions,
)
def vllm_per_token_group(call: Call) -> tuple[Tensor, Tensor]:
    """Call vLLM's _C.per_token_group_fp8_quant."""
    x = _plain(call.inputs.x)
    codes, scales = call.new("codes"), call.new("scales")
    torch.ops._C.per_token_group_fp8_quant(
        x, codes.view(torch.float8_e4m3fn), scales, call.case.group, _EPS, *_LIMITS,
        call.case.scale.is_power_of_two, False, False,
    )  # fmt: skip
    return codes, scales


def _supports_packed(case: Case, device: str) -> str | None:
    if case.scale is not ScaleFormat.UE8M0_PACKED:
        return "writes packed exponents only."
    if case.h % case.group or case.group != 128 or case.dtype is InputDtype.FP32:
        return "takes bf16 or fp16 and groups of 128."
    if case.m == 0:
        # Found on an H200 with 0.33.0: docs/findings.md.
        return "the op launches an empty grid for zero tokens, which CUDA refuses."
    return None


@register(
    "vllm_per_token_group_packed",
    stage="act_quant",
    recipes=VLLM_CUDA_UE8M0,
    supports=_supports_packed,
    unavailable=package.op("_C", "per_token_group_fp8_quant_packed", 7),
    needs_gpu=True,
    versions=package.versions,
    contract=Contract(pads_zero=True),
)
def vllm_per_token_group_packed(call: Call) -> tuple[Tensor, Tensor]:
    """Call vLLM's _C.per_token_group_fp8_quant_packed."""
    x = _plain(call.inputs.x)
    codes, scales = call.new("codes"), call.new("scales")
    torch.ops._C.per_token_group_fp8_quant_packed(
        x,
        codes.view(torch.float8_e4m3fn),
        scales,
        call.case.group,
        _EPS,
        -E4M3.largest,
        E4M3.largest,
    )
    return codes, scales
