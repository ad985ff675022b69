"""vLLM's CUDA quantizers, per token and group."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_parity.kernels.call import Call
from moe_parity.kernels.errors import KernelError
from moe_parity.kernels.registry import register
from moe_parity.kernels.vendors.vllm import package as vllm_package
from moe_parity.references.language import Case, Contract, InputDtype, Recipe, ScaleFormat, Stage
from moe_parity.references.language.recipes import (
    VLLM_CUDA,
    VLLM_CUDA_0_26,
    VLLM_CUDA_UE8M0,
    VLLM_CUDA_UE8M0_GENERIC,
)

_EPS = 1e-10


def _supports(case: Case, device: str) -> str | None:
    if device != "cuda":
        return "a CUDA op; it needs a GPU."
    if case.h % case.group:
        return f"K = {case.h} is not a multiple of the group, {case.group}."
    if case.scale is ScaleFormat.UE8M0_PACKED:
        return "packed exponents are another op's: vllm_per_token_group_packed."
    if case.m == 0 and vllm_package.divides():
        return "0.26.0 launches an empty grid for zero tokens, which CUDA refuses."
    return None


def _recipes(case: Case, device: str) -> tuple[Recipe, ...]:  # noqa: ARG001
    if case.scale is ScaleFormat.FP32:
        return (VLLM_CUDA_0_26,) if vllm_package.divides() else (VLLM_CUDA,)
    # Groups other than 128 and fp32 input take the generic kernel, which rounds by log2.
    register_path = (
        case.group == 128 and case.dtype is not InputDtype.FP32 and not vllm_package.divides()
    )
    return (VLLM_CUDA_UE8M0,) if register_path else (VLLM_CUDA_UE8M0_GENERIC,)


@register(
    "vllm_per_token_group",
    stage=Stage.ACT_QUANT,
    recipes=_recipes,
    supports=_supports,
    unavailable=vllm_package.no_library,
)
def vllm_per_token_group(call: Call) -> tuple[Tensor, Tensor]:
    """Call vLLM's _C.per_token_group_fp8_quant."""
    _contiguous(call)
    codes, scales = call.new_codes(), call.new_scales()
    torch.ops._C.per_token_group_fp8_quant(
        call.x, codes.view(torch.float8_e4m3fn), scales, call.case.group, _EPS, -448.0, 448.0,
        call.case.scale.is_power_of_two, False, False,
    )  # fmt: skip
    return codes, scales


def _contiguous(call: Call) -> None:
    # The op itself refuses with a RuntimeError; vLLM's Python sends such input to Triton.
    if not call.x.is_contiguous():
        raise KernelError(f"vLLM's op takes contiguous input, got strides {call.x.stride()}.")


def _supports_packed(case: Case, device: str) -> str | None:
    if device != "cuda":
        return "a CUDA op; it needs a GPU."
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
    stage=Stage.ACT_QUANT,
    recipes=VLLM_CUDA_UE8M0,
    supports=_supports_packed,
    unavailable=vllm_package.no_library,
    contract=Contract(pads_zero=True),
)
def vllm_per_token_group_packed(call: Call) -> tuple[Tensor, Tensor]:
    """Call vLLM's _C.per_token_group_fp8_quant_packed."""
    _contiguous(call)
    codes, scales = call.new_codes(), call.new_scales()
    torch.ops._C.per_token_group_fp8_quant_packed(
        call.x, codes.view(torch.float8_e4m3fn), scales, call.case.group, _EPS, -448.0, 448.0
    )
    return codes, scales
