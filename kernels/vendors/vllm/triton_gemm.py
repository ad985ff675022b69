"""vLLM's grouped GEMM in Triton, launched by vLLM's own code."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_parity.kernels.call import Call, Fate, Produced, demand_contiguous
from moe_parity.kernels.registry import register
from moe_parity.kernels.vendors.signatures import Wanted
from moe_parity.kernels.vendors.vllm import package
from moe_parity.kernels.vendors.vllm.files import MOE, UTILS, functions, needs, used
from moe_parity.kernels.vendors.vllm.stored import Config, Stored, read
from moe_parity.kernels.vendors.vllm.tiles import recipe_of
from moe_parity.references.language import Case, Recipe
from moe_parity.references.stages.gemm.stage import GroupedRows
from moe_parity.references.stages.routing import place

WANTED = (
    Wanted(MOE, "fused_moe_kernel"),
    Wanted(
        MOE, "invoke_fused_moe_triton_kernel",
        ("A", "B", "C", "A_scale", "B_scale", "topk_weights", "sorted_token_ids", "expert_ids",
         "num_tokens_post_padded", "mul_routed_weight", "top_k", "config"),
        ("compute_type", "use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16",
         "per_channel_quant", "block_shape"),
    ),
    Wanted(MOE, "get_default_config", ("M", "E", "N", "K", "topk", "dtype", "block_shape")),
    Wanted(UTILS, "enable_swap_ab", ("BLOCK_SIZE_M", "BLOCK_SIZE_N")),
)  # fmt: skip


def _supports_gemm(case: Case, device: str) -> str | None:
    if case.scale.is_packed:
        return "the kernel reads fp32 scales."
    if case.h % 128 or case.i % 128:
        return f"H = {case.h} and I = {case.i} must be multiples of 128."
    if case.has_odd_ids:
        return "vLLM's ids are those of experts."
    return None if case.m else "vLLM launches nothing for zero tokens."


TUNED: dict[str, Config] = {
    "m16_n64": {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "GROUP_SIZE_M": 1},
    "m32_group16": {"BLOCK_SIZE_M": 32, "GROUP_SIZE_M": 16},
    "m64": {"BLOCK_SIZE_M": 64, "GROUP_SIZE_M": 32},
    "m64_k64": {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1},
    "m128_warps8": {"BLOCK_SIZE_M": 128, "GROUP_SIZE_M": 64, "num_warps": 8},
}
"""What stored configurations for a block-FP8 layer choose, in place of the default's values."""


def _configs(case: Case, device: str) -> dict[str, Config]:
    """Return the changes that configurations make to the default one, which comes first."""
    return {"default": {}, **TUNED}


def _gemm_recipes(case: Case, device: str, config: Config | Stored) -> tuple[Recipe, ...]:
    """Return what the tile of a call decides.

    The default configuration has tiles of 16 rows up to 64 tokens, and of 64 columns up to 8; a
    stored one may keep them longer, or take other ones.
    """
    default = {
        "BLOCK_SIZE_M": 16 if case.m <= 64 else 64, "BLOCK_SIZE_N": 64 if case.m <= 8 else 128,
    }  # fmt: skip
    return (recipe_of(default | _changes(config, case.m)),)


def _changes(config: Config | Stored, m: int) -> Config:
    """Return what a configuration has in place of the default's values for ``m`` tokens."""
    return config.of(m) if isinstance(config, Stored) else config


def _stored(case: Case, device: str) -> Mapping[str, Config | Stored]:
    known: dict[str, Config | Stored] = {}
    if WANTED[2].refusal(package.package().file(MOE)) == "":
        known["batch_invariant"] = batch_invariant()
    return {**known, **read()}


def batch_invariant() -> Config:
    """Return the configuration that vLLM takes under VLLM_BATCH_INVARIANT, whatever the sizes."""
    file = functions(MOE, "get_default_config", batch_invariant=True)
    pinned: Config = file.get_default_config(1, 8, 128, 128, 2, "fp8_w8a8", [128, 128])
    return pinned


@register(
    "vllm_fused_moe_fc1", stage="fc1", recipes=_gemm_recipes, supports=_supports_gemm,
    unavailable=needs(*WANTED), files=used(*WANTED), triton=True, versions=package.versions,
    configs=_configs, stored=_stored,
)  # fmt: skip
def vllm_fused_moe_fc1(call: Call) -> Produced:
    """Call vLLM's fused_moe_kernel, first GEMM."""
    return _fused_moe(call, weighted=False)


@register(
    "vllm_fused_moe_fc2", stage="fc2", recipes=_gemm_recipes, supports=_supports_gemm,
    unavailable=needs(*WANTED), files=used(*WANTED), triton=True, versions=package.versions,
    configs=_configs, stored=_stored,
)  # fmt: skip
def vllm_fused_moe_fc2(call: Call) -> Produced:
    """Call vLLM's fused_moe_kernel, second GEMM, the routing weight in its epilogue."""
    return _fused_moe(call, weighted=True)


def _fused_moe(call: Call, *, weighted: bool) -> Produced:
    case = call.case
    inputs: GroupedRows = call.inputs
    file = functions(MOE, "invoke_fused_moe_triton_kernel", "get_default_config")
    if weighted and inputs.weights is not None:
        # The launcher asserts their stride(1) alone, and the kernel reads them at the pair.
        demand_contiguous(inputs.weights, "vLLM's fused_moe_kernel reads weights by pair: it")
    experts, n, k = inputs.w.shape
    config = file.get_default_config(case.m, experts, n, k, case.k, "fp8_w8a8", [128, 128])
    config |= _changes(call.config or {}, case.m)
    slots, owners, padded = aligned(inputs.expert, experts, config["BLOCK_SIZE_M"])
    out = call.new("out", (case.m, case.k, n), (case.k * n, n, 1), torch.bfloat16)
    file.invoke_fused_moe_triton_kernel(
        inputs.a.view(torch.float8_e4m3fn), inputs.w.view(torch.float8_e4m3fn), out,
        inputs.a_scale, inputs.w_scale, inputs.weights, slots, owners, padded, weighted,
        inputs.top_k, config, compute_type=_bfloat16(), use_fp8_w8a8=True, use_int8_w8a8=False,
        use_int8_w8a16=False, use_int4_w4a16=False, per_channel_quant=False,
        block_shape=[128, 128],
    )  # fmt: skip
    live = inputs.expert >= 0
    rows = torch.where(live[:, None], out.view(-1, n), out.new_zeros(()))
    fates = torch.where(live, int(Fate.LIVE), int(Fate.UNTOUCHED)).to(torch.int8)
    return Produced(outputs={"rows": rows}, fates={"out": fates})


def _bfloat16() -> Any:
    return importlib.import_module("triton.language").bfloat16


def aligned(expert: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return sorted pairs, the expert of each block and the padded count, as the CUDA op does.

    Both lists are as long as they can get; no value is looked at.
    """
    placed, pairs = place(expert, experts, block), expert.numel()
    slots = torch.full((placed.bound + 1,), pairs, dtype=torch.int32, device=expert.device)
    at = torch.where(placed.slot >= 0, placed.slot, placed.bound)
    slots[at] = torch.arange(pairs, dtype=torch.int32, device=expert.device)
    starts = torch.arange(0, placed.bound, block, device=expert.device)
    ends = (-(-placed.counts.long() // block) * block).cumsum(0)
    owner = torch.bucketize(starts, ends, right=True).clamp(max=experts - 1)
    return slots[:-1], owner.int(), placed.padded.int().view(1)
