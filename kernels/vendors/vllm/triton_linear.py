"""vLLM's dense block-FP8 GEMM in Triton, launched as vLLM does."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_parity.kernels.call import Call, demand_contiguous
from moe_parity.kernels.registry import register
from moe_parity.kernels.vendors.signatures import Wanted
from moe_parity.kernels.vendors.vllm import package
from moe_parity.kernels.vendors.vllm.files import FP8, functions, needs, used
from moe_parity.kernels.vendors.vllm.stored import LINEAR, Config, Stored, read
from moe_parity.kernels.vendors.vllm.tiles import linear_recipe_of
from moe_parity.references.language import Case, Recipe
from moe_parity.references.stages.gemm.stage import GroupedRows

KERNEL = "_w8a8_triton_block_scaled_mm"
WANTED = Wanted(
    FP8, KERNEL,
    ("A", "B", "C", "As", "Bs", "M", "N", "K", "group_n", "group_k", "stride_am", "stride_ak",
     "stride_bk", "stride_bn", "stride_cm", "stride_cn", "stride_As_m", "stride_As_k",
     "stride_Bs_k", "stride_Bs_n"),
    ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M"),
)  # fmt: skip
DEFAULT: Config = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128}
"""What decides bits in the launcher's default, which ``VLLM_BATCH_INVARIANT`` pins."""
FIXED: Config = {"GROUP_SIZE_M": 32, "num_warps": 4, "num_stages": 2}


def _supports(case: Case, device: str) -> str | None:
    if case.e != 1 or case.k != 1 or case.ep_size != 1:
        return "one expert and one choice: a dense GEMM."
    if case.scale.is_packed:
        return "the kernel reads fp32 scales."
    return None if case.m else "an empty grid, which CUDA refuses."


def _stored(case: Case, device: str) -> Mapping[str, Stored]:
    return read(LINEAR)


def _tile(config: Config | Stored | None, m: int) -> Config:
    return (config.of(m) if isinstance(config, Stored) else config) or DEFAULT


def _recipes(case: Case, device: str, config: Config | Stored | None) -> tuple[Recipe, ...]:
    return (linear_recipe_of(_tile(config, case.m)),)


@register(
    "vllm_triton_linear", stage="fc1", recipes=_recipes, supports=_supports,
    unavailable=needs(WANTED), files=used(WANTED), triton=True, versions=package.versions,
    configs={"default": {}}, stored=_stored,
    cost=lambda case: 12 * -(-case.m // 64) * -(-2 * case.i // 128) * -(-case.h // 128),
)  # fmt: skip
def vllm_triton_linear(call: Call) -> Tensor:
    """Call vLLM's _w8a8_triton_block_scaled_mm, a dense linear, as its launcher does."""
    inputs: GroupedRows = call.inputs
    # The launcher asserts it, and hands all strides on.
    a, scale = demand_contiguous(inputs.a, "vLLM's w8a8_triton_block_scaled_mm"), inputs.a_scale
    w, w_scale, out = inputs.w[0], inputs.w_scale[0], call.new("rows")
    (m, k), n = a.shape, w.shape[0]
    tile = {**FIXED, **_tile(call.config, m)}
    grid = (-(-m // tile["BLOCK_SIZE_M"]) * -(-n // tile["BLOCK_SIZE_N"]),)
    functions(FP8, KERNEL).names[KERNEL][grid](
        a.view(torch.float8_e4m3fn), w.view(torch.float8_e4m3fn), out, scale, w_scale, m, n, k,
        128, 128, *a.stride(), w.stride(1), w.stride(0), *out.stride(), *scale.stride(),
        w_scale.stride(1), w_scale.stride(0), **tile,
    )  # fmt: skip
    return out
