"""vLLM's Triton kernels as the harness sees them: its own files, its own launchers.

Registered here, loaded from disk at the first call (:mod:`vllm_source`), so that a machine without
Triton or vLLM can list them.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moe_parity.kernels.call import Call
from moe_parity.kernels.moe_triton.registered import unavailable as no_triton
from moe_parity.kernels.registry import register
from moe_parity.kernels.stage_call import (
    ExpertRows,
    Fate,
    GateUpRows,
    GroupedRows,
    Produced,
    RoutedRows,
    StageCall,
)
from moe_parity.kernels.vendors import vllm_package
from moe_parity.kernels.vendors.deep_gemm import place
from moe_parity.references.formats import ue8m0_decode, unpack_ue8m0
from moe_parity.references.spec import (
    Case,
    Hazard,
    Recipe,
    Routing,
    ScaleFormat,
    ScaleLayout,
    Stage,
    Values,
)
from moe_parity.references.spec.recipes import VLLM_TRITON, VLLM_TRITON_SWAP

LAYERS = "vllm/model_executor/layers"
MOE = f"{LAYERS}/fused_moe/fused_moe.py"
UTILS = f"{LAYERS}/fused_moe/utils.py"
GATHER = f"{LAYERS}/fused_moe/deep_gemm_utils.py"
FP8 = f"{LAYERS}/quantization/utils/fp8_utils.py"
ALIGNMENT = 128
CPU_GROUPS = 200
"""Programs of one group each that the virtual GPU runs in a second or two."""


def unavailable() -> str | None:
    """Return None where Triton and vLLM's files are at hand."""
    return no_triton() or vllm_package.no_source()


@lru_cache(maxsize=4)
def source(path: str, names: tuple[str, ...], **given: Any) -> Any:
    """Return functions of one of the package's files."""
    made = importlib.import_module("moe_parity.kernels.vendors.vllm_source")
    return made.File(vllm_package.package().root / path, names, given)


def moe_file() -> Any:
    """Return fused_moe.py's kernel, launcher and default configuration."""
    made = importlib.import_module("moe_parity.kernels.vendors.vllm_source")
    utils = made.File(
        vllm_package.package().root / UTILS, ("enable_swap_ab",),
        {"current_platform": made.PLATFORM},
    )  # fmt: skip
    names = (
        "write_zeros_to_output", "fused_moe_kernel", "invoke_fused_moe_triton_kernel",
        "get_default_config",
    )  # fmt: skip
    given = {
        "enable_swap_ab": utils.enable_swap_ab,
        "warn_if_moe_use_td_ineffective": lambda *_, **__: None,
        "resolve_moe_use_td": lambda: False,
        "current_platform": made.PLATFORM,
        "envs": SimpleNamespace(VLLM_BATCH_INVARIANT=False),
    }
    return made.File(vllm_package.package().root / MOE, names, given)


_moe_file = lru_cache(maxsize=1)(moe_file)


# --- grouped GEMM -------------------------------------------------------------------------------


def _supports_gemm(case: Case, device: str) -> str | None:  # noqa: ARG001
    if case.scale is ScaleFormat.UE8M0_PACKED:
        return "the kernel reads fp32 scales."
    if case.h % 128 or case.i % 128:
        return f"H = {case.h} and I = {case.i} must be multiples of 128."
    if case.routing is Routing.HOLES:
        return "vLLM's ids are those of experts."
    return None if case.m else "vLLM launches nothing for zero tokens."


def _gemm_recipes(case: Case, device: str) -> tuple[Recipe, ...]:  # noqa: ARG001
    """Swap-AB, with the other scale order, for tiles below 64 rows: up to 64 tokens by default."""
    return (VLLM_TRITON_SWAP,) if case.m <= 64 else (VLLM_TRITON,)


@register(
    "vllm_fused_moe_fc1", stage=Stage.FC1, recipes=_gemm_recipes, supports=_supports_gemm,
    unavailable=unavailable, triton=True,
)  # fmt: skip
def vllm_fused_moe_fc1(call: StageCall) -> Produced:
    """Call vLLM's fused_moe_kernel, first GEMM."""
    return _fused_moe(call, weighted=False)


@register(
    "vllm_fused_moe_fc2", stage=Stage.FC2, recipes=_gemm_recipes, supports=_supports_gemm,
    unavailable=unavailable, triton=True,
)  # fmt: skip
def vllm_fused_moe_fc2(call: StageCall) -> Produced:
    """Call vLLM's fused_moe_kernel, second GEMM, the routing weight in its epilogue."""
    return _fused_moe(call, weighted=True)


def _fused_moe(call: StageCall, *, weighted: bool) -> Produced:
    inputs, case = call.inputs, call.case
    assert isinstance(inputs, GroupedRows)
    file = _moe_file()
    experts, n, k = inputs.w.shape
    config = file.get_default_config(case.m, experts, n, k, case.k, "fp8_w8a8", [128, 128])
    slots, owners, padded = aligned(inputs.expert, config["BLOCK_SIZE_M"])
    out = call.new("out", (case.m, case.k, n), (case.k * n, n, 1), torch.bfloat16)
    file.invoke_fused_moe_triton_kernel(
        inputs.a.view(torch.float8_e4m3fn), inputs.w.view(torch.float8_e4m3fn), out,
        inputs.a_scale, inputs.w_scale, inputs.weights, slots, owners, padded, weighted,
        inputs.top_k, config, compute_type=_bfloat16(), use_fp8_w8a8=True, use_int8_w8a8=False,
        use_int8_w8a16=False, use_int4_w4a16=False, per_channel_quant=False,
        block_shape=[128, 128],
    )  # fmt: skip
    live = inputs.expert >= 0
    rows = torch.where(live[:, None], out.view(-1, n), torch.zeros((), dtype=out.dtype))
    fates = torch.where(live, int(Fate.LIVE), int(Fate.UNTOUCHED)).to(torch.int8)
    return Produced(outputs={"rows": rows}, fates={"out": fates})


def _bfloat16() -> Any:
    return importlib.import_module("triton.language").bfloat16


def aligned(expert: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return sorted pairs, the expert of each block and the padded count, as the CUDA op does."""
    pairs = expert.numel()
    count = int(expert.max()) + 1 if pairs else 0
    placed = place(expert, max(count, 1), block)
    rows = placed.rows - block
    slots = torch.full((max(rows, block),), pairs, dtype=torch.int32, device=expert.device)
    live = placed.slot >= 0
    slots[placed.slot[live]] = live.nonzero()[:, 0].int()
    blocks = -(-(placed.ends - placed.starts) // block)
    owners = torch.arange(max(count, 1), device=expert.device).repeat_interleave(blocks.long())
    owners = owners.int() if owners.numel() else torch.zeros(1, dtype=torch.int32, device=expert.device)  # fmt: skip  # noqa: E501
    return slots, owners, torch.tensor([rows], dtype=torch.int32, device=expert.device)


# --- quantization -------------------------------------------------------------------------------


def _supports_quant(case: Case, device: str) -> str | None:
    if case.scale is ScaleFormat.UE8M0_PACKED:
        return "the fallback writes fp32 scales."
    if case.h % case.group:
        return f"K = {case.h} is not a multiple of the group, {case.group}."
    if case.hazard is Hazard.TRANSPOSED:
        return "vLLM asserts contiguous rows."
    groups = case.m * (case.h // case.group)
    if device == "cpu" and groups > CPU_GROUPS:
        return f"{groups} programs of one group are over the CPU's budget of {CPU_GROUPS}."
    return None if case.m else "an empty grid, which CUDA refuses."


@register(
    "vllm_triton_per_token_group", stage=Stage.ACT_QUANT, recipes="vllm_triton_quant",
    supports=_supports_quant, unavailable=unavailable, triton=True,
)  # fmt: skip
def vllm_triton_per_token_group(call: Call) -> tuple[Tensor, Tensor]:
    """Call vLLM's Triton fallback of per_token_group_quant_fp8, which rows with gaps take."""
    file = source(FP8, ("_per_token_group_quant_fp8", "_per_token_group_quant_fp8_colmajor"))
    x, group = call.x, call.case.group
    codes, scales = call.new_codes(), call.new_scales()
    groups = x.shape[0] * (x.shape[1] // group)
    strides = () if call.case.layout is ScaleLayout.ROW else (scales.stride(1),)
    kernel = (
        file._per_token_group_quant_fp8_colmajor if strides else file._per_token_group_quant_fp8
    )
    block = 1 << (group - 1).bit_length()
    kernel[(groups,)](
        x, codes.view(torch.float8_e4m3fn), scales, group, x.shape[1], x.stride(0), *strides,
        1e-10, fp8_min=-448.0, fp8_max=448.0, use_ue8m0=call.case.scale.is_power_of_two,
        BLOCK=block, num_warps=min(max(block // 256, 1), 8), num_stages=1,
    )  # fmt: skip
    return codes, scales


# --- SwiGLU with quantization -------------------------------------------------------------------


def _fp8_file() -> Any:
    made = importlib.import_module("moe_parity.kernels.vendors.vllm_source")
    return source(
        FP8,
        (
            "_silu_mul_quant_fp8_packed_kernel", "silu_mul_quant_fp8_packed_triton",
            "_silu_mul_per_token_group_quant_fp8_colmajor",
            "silu_mul_per_token_group_quant_fp8_colmajor",
        ),
        current_platform=_Hashed(made.PLATFORM),
    )  # fmt: skip


class _Hashed(SimpleNamespace):
    """A namespace that can be the key of a cache."""

    def __init__(self, other: SimpleNamespace) -> None:
        super().__init__(**vars(other))

    __hash__ = object.__hash__


def _supports_activation(case: Case, device: str) -> str | None:
    if case.group != 128 or case.i % 128:
        return f"I = {case.i} must be a multiple of the group, 128."
    if device == "cpu" and case.values is Values.SPECIAL and case.clamp is not None:
        return "what a clamp makes of a NaN depends on the compiler; the virtual GPU refuses it."
    return None if case.m else "an empty grid, which CUDA refuses."


def _supports_colmajor(case: Case, device: str) -> str | None:
    if case.scale is ScaleFormat.UE8M0_PACKED:
        return "packed exponents are silu_mul_quant_fp8_packed's."
    return _supports_activation(case, device)


def _supports_packed(case: Case, device: str) -> str | None:
    if case.scale is not ScaleFormat.UE8M0_PACKED:
        return "writes packed exponents only."
    return _supports_activation(case, device)


def _dense_only(supports: Any) -> Any:
    def narrower(case: Case, device: str) -> str | None:
        if case.m % ALIGNMENT:
            return f"without expert ends, M = {case.m} must be a multiple of 128."
        reason: str | None = supports(case, device)
        return reason

    return narrower


def _ends_only(supports: Any) -> Any:
    def narrower(case: Case, device: str) -> str | None:
        if vllm_package.divides():
            return "0.26.0 has no expert_ends."
        reason: str | None = supports(case, device)
        return reason

    return narrower


def _activation(call: StageCall, *, packed: bool, ends: bool) -> Produced:
    inputs, case = call.inputs, call.case
    assert isinstance(inputs, GateUpRows)
    rows, width = inputs.rows, inputs.rows.shape[1] // 2
    slot = torch.arange(rows.shape[0], device=rows.device)
    options: dict[str, Any] = {
        "clamp_limit": inputs.limit, "alpha": inputs.alpha, "beta": inputs.beta,
    }  # fmt: skip
    if ends:
        experts = inputs.counts.numel()
        owner = torch.arange(experts, device=rows.device).repeat_interleave(inputs.counts.long())
        placed = place(owner, experts, ALIGNMENT)
        slot, buffer = placed.slot, torch.full_like(rows[:1], float("nan")).repeat(placed.rows, 1)
        buffer[slot] = rows
        rows = buffer
        options |= {"expert_ends": placed.ends, "expert_alignment": ALIGNMENT}
    codes = call.new("codes", (rows.shape[0], width), (width, 1), torch.uint8)
    file = _fp8_file()
    with file.allocating(call.new, "scales"):
        if packed:
            _, scales = file.silu_mul_quant_fp8_packed_triton(
                rows, output_q=codes.view(torch.float8_e4m3fn), **options
            )
        else:
            _, scales = file.silu_mul_per_token_group_quant_fp8_colmajor(
                rows, output=codes.view(torch.float8_e4m3fn),
                use_ue8m0=case.scale.is_power_of_two, **options,
            )  # fmt: skip
    kept = scales[slot].contiguous()
    # The last word's missing groups hold the exponent of the floor; nothing reads them.
    wide = ue8m0_decode(unpack_ue8m0(kept, width // 128)) if packed else kept
    fates = torch.full((rows.shape[0],), Fate.UNTOUCHED, dtype=torch.int8, device=rows.device)
    fates[slot] = Fate.LIVE
    # The scales were allocated transposed, [groups, aligned rows].
    tall = -(-rows.shape[0] // 4) * 4 if packed else rows.shape[0]
    across = torch.full((scales.shape[1], tall), Fate.UNTOUCHED, dtype=torch.int8)
    across[:, : rows.shape[0]] = fates.cpu()
    return Produced(
        outputs={"codes": codes[slot], "scales": wide}, fates={"codes": fates, "scales": across}
    )


def _register_activation(name: str, *, packed: bool, ends: bool) -> None:
    supports = _supports_packed if packed else _supports_colmajor
    words = ", the rows of expert ends" if ends else ""

    @register(
        name, stage=Stage.SWIGLU_QUANT,
        recipes="vllm_deepgemm_packed" if packed else "vllm_deepgemm",
        supports=(_ends_only if ends else _dense_only)(supports), unavailable=unavailable,
        triton=True,
        note=f"vLLM {'silu_mul_quant_fp8_packed' if packed else 'silu_mul_per_token_group_quant_fp8_colmajor'}{words}.",  # noqa: E501
    )  # fmt: skip
    def activation(call: StageCall) -> Produced:
        return _activation(call, packed=packed, ends=ends)


_register_activation("vllm_silu_mul_colmajor", packed=False, ends=False)
_register_activation("vllm_silu_mul_colmajor_ends", packed=False, ends=True)
_register_activation("vllm_silu_mul_packed", packed=True, ends=False)
_register_activation("vllm_silu_mul_packed_ends", packed=True, ends=True)


# --- scatter and gather -------------------------------------------------------------------------


def _gather_file() -> Any:
    names = (
        "apply_expert_map", "_fwd_kernel_ep_scatter_1", "_fwd_kernel_ep_scatter_2", "ep_scatter",
        "_fwd_kernel_ep_gather", "ep_gather",
    )  # fmt: skip
    return source(GATHER, names)


def _supports_scatter(case: Case, device: str) -> str | None:  # noqa: ARG001
    if case.scale is ScaleFormat.UE8M0_PACKED or case.h % 128:
        return "rows of whole groups of 128 with fp32 scales."
    if case.routing is Routing.HOLES:
        return "vLLM's ids are those of experts."
    return None if case.m else "an empty grid, which CUDA refuses."


def _scatter(call: StageCall, *, psum: bool) -> Produced:
    inputs = call.inputs
    assert isinstance(inputs, RoutedRows)
    device, width = inputs.codes.device, inputs.codes.shape[1]
    local = inputs.ids.flatten().long()
    if inputs.expert_map is not None:
        local = inputs.expert_map[local].long()
    placed = place(local, inputs.experts, ALIGNMENT)
    counts = (placed.ends - placed.starts).int()
    groups = width // 128
    codes = call.new("codes", (placed.rows, width), (width, 1), torch.uint8)
    scales = call.new("scales", (placed.rows, groups), (groups, 1), torch.float32)
    index = call.new("index", (local.numel(), 1), (1, 1), torch.int32)
    if psum:
        layout = call.new("layout", (inputs.experts, 1), (1, 1), torch.int32).view(-1)
    else:
        layout = torch.full((placed.rows,), -1, dtype=torch.int32, device=device)
    options = {"use_psum_layout": True} if psum else {}
    _gather_file().ep_scatter(
        inputs.codes.view(torch.float8_e4m3fn), inputs.scales, inputs.ids, counts,
        inputs.expert_map, torch.empty_like(placed.starts), codes.view(torch.float8_e4m3fn),
        scales, layout, index.view(inputs.ids.shape), align_m=ALIGNMENT, **options,
    )  # fmt: skip
    live = local >= 0
    at = torch.where(live, index.view(-1).long(), 0)
    fates = torch.full((placed.rows,), Fate.UNTOUCHED, dtype=torch.int8, device=device)
    fates[placed.slot[live]] = Fate.LIVE
    found = layout - placed.starts if psum else torch.bincount(layout[layout >= 0], minlength=inputs.experts)  # fmt: skip  # noqa: E501
    # A row outside its expert's range would be read as another's: make it show.
    owner = torch.bucketize(at, placed.starts.long(), right=True) - 1
    lost = live & (at >= placed.ends.long()[owner])
    rows = torch.where((live & ~lost)[:, None], codes[at], torch.zeros_like(codes[at]))
    return Produced(
        outputs={
            "codes": rows,
            "scales": torch.where(live[:, None], scales[at], torch.zeros_like(scales[at])),
            "counts": found.int(),
        },
        fates={
            "codes": fates, "scales": fates,
            "index": torch.where(live, int(Fate.LIVE), int(Fate.UNTOUCHED)).to(torch.int8),
        },
    )  # fmt: skip


def _supports_psum_scatter(case: Case, device: str) -> str | None:
    if vllm_package.divides():
        return "0.26.0 has no prefix-sum layout."
    return _supports_scatter(case, device)


def _register_scatter(name: str, *, psum: bool) -> None:
    @register(
        name, stage=Stage.PERMUTE, recipes="no_rounding",
        supports=_supports_psum_scatter if psum else _supports_scatter, unavailable=unavailable,
        triton=True, note=f"vLLM ep_scatter, {'prefix sums' if psum else 'm_indices'}.",
    )  # fmt: skip
    def scatter(call: StageCall) -> Produced:
        return _scatter(call, psum=psum)


_register_scatter("vllm_ep_scatter", psum=False)
_register_scatter("vllm_ep_scatter_psum", psum=True)


def _supports_gather(case: Case, device: str) -> str | None:  # noqa: ARG001
    if case.routing is Routing.HOLES:
        return "vLLM's ids are those of experts."
    if vllm_package.divides() and case.h % 1024 and case.h & (case.h - 1):
        return f"0.26.0 does not compile for H = {case.h}: its block is no power of two."
    return None if case.m else "an empty grid, which CUDA refuses."


@register(
    "vllm_ep_gather",
    stage=Stage.COMBINE,
    recipes="vllm_deepgemm",
    supports=_supports_gather,
    unavailable=unavailable,
    triton=True,
)
def vllm_ep_gather(call: StageCall) -> Produced:
    """Call vLLM's ep_gather: the top-k sum of rows in an expert-sorted buffer."""
    inputs = call.inputs
    assert isinstance(inputs, ExpertRows)
    tokens, k, width = inputs.rows.shape
    turned = torch.arange(tokens * k, device=inputs.rows.device).flip(0)
    buffer = inputs.rows.reshape(tokens * k, width)[turned]
    out = call.new("out", (tokens, width), (width, 1), torch.bfloat16)
    _gather_file().ep_gather(
        buffer, inputs.ids, inputs.weights, turned.int().view(tokens, k), inputs.expert_map, out
    )
    return Produced(outputs={"out": out})
