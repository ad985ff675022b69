"""vLLM's Triton quantizers: alone, and fused with SwiGLU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_parity.kernels.call import Call, Fate, Produced, demand_contiguous
from moe_parity.kernels.registry import register
from moe_parity.kernels.vendors.deepgemm.api import rows_of, spare
from moe_parity.kernels.vendors.signatures import Wanted
from moe_parity.kernels.vendors.vllm import package
from moe_parity.kernels.vendors.vllm.files import ALIGNMENT, FP8, functions, needs, used
from moe_parity.references.arithmetic.formats import E4M3, without_missing_groups
from moe_parity.references.language import Case, Hazard, ScaleFormat, ScaleLayout, Values
from moe_parity.references.stages.routing import place


def _supports_quant(case: Case, device: str) -> str | None:
    if case.scale is ScaleFormat.UE8M0_PACKED:
        return "the fallback writes fp32 scales."
    if case.hazard is Hazard.TRANSPOSED:
        return "vLLM asserts contiguous rows."
    return None if case.m else "an empty grid, which CUDA refuses."


_FIRST = ("y_ptr", "y_q_ptr", "y_s_ptr", "group_size", "y_num_columns", "y_row_stride")
_OPTIONS = ("fp8_min", "fp8_max", "use_ue8m0", "BLOCK")
_QUANT = (
    Wanted(FP8, "_per_token_group_quant_fp8", (*_FIRST, "eps"), _OPTIONS),
    Wanted(
        FP8, "_per_token_group_quant_fp8_colmajor", (*_FIRST, "y_s_col_stride", "eps"), _OPTIONS
    ),
)


@register(
    "vllm_triton_per_token_group", stage="act_quant", recipes="vllm_triton_quant",
    supports=_supports_quant, unavailable=needs(*_QUANT), files=used(*_QUANT), triton=True,
    versions=package.versions, cost=lambda case: 2 * case.m * (case.h // case.group),
)  # fmt: skip
def vllm_triton_per_token_group(call: Call) -> tuple[Tensor, Tensor]:
    """Call vLLM's Triton fallback of per_token_group_quant_fp8, which rows with gaps take."""
    file = functions(FP8, "_per_token_group_quant_fp8", "_per_token_group_quant_fp8_colmajor")
    x, group = call.inputs.x, call.case.group
    codes, scales = call.new("codes"), call.new("scales")
    groups = x.shape[0] * (x.shape[1] // group)
    strides = () if call.case.layout is ScaleLayout.ROW else (scales.stride(1),)
    kernel = (
        file._per_token_group_quant_fp8_colmajor if strides else file._per_token_group_quant_fp8
    )
    block = 1 << (group - 1).bit_length()
    kernel[(groups,)](
        x, codes.view(torch.float8_e4m3fn), scales, group, x.shape[1], x.stride(0), *strides,
        1e-10, fp8_min=-E4M3.largest, fp8_max=E4M3.largest,
        use_ue8m0=call.case.scale.is_power_of_two, BLOCK=block,
        num_warps=min(max(block // 256, 1), 8), num_stages=1,
    )  # fmt: skip
    return codes, scales


# --- SwiGLU with quantization -------------------------------------------------------------------


PACKED, COLUMNS = "silu_mul_quant_fp8_packed_triton", "silu_mul_per_token_group_quant_fp8_colmajor"


def _activation_call(*, packed: bool, ends: bool) -> Wanted:
    """Return the launcher as it is called; the rows of expert ends came later than it."""
    named = ("output_q",) if packed else ("output", "use_ue8m0")
    more = ("expert_ends", "expert_alignment") if ends else ()
    options = (*named, "clamp_limit", "alpha", "beta", *more)
    return Wanted(FP8, PACKED if packed else COLUMNS, ("input",), options)


def _supports_activation(case: Case, device: str) -> str | None:
    if case.group != 128:
        return f"the group must be 128, not {case.group}."
    if case.layout is not ScaleLayout.ROW:
        return "the adapter gathers its scales row by row."
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


def _activation(call: Call, *, packed: bool, ends: bool) -> Callable[[], Produced]:
    inputs, case = call.inputs, call.case
    rows, width = inputs.rows, inputs.rows.shape[1] // 2
    if not ends:
        demand_contiguous(rows, "vLLM's launcher")
    slot = torch.arange(rows.shape[0], device=rows.device)
    options: dict[str, Any] = {
        "clamp_limit": inputs.limit, "alpha": inputs.alpha, "beta": inputs.beta,
    }  # fmt: skip
    if ends:
        experts = inputs.counts.numel()
        placed = place(inputs.expert, experts, ALIGNMENT)
        slot, buffer = (
            placed.slot,
            torch.full_like(rows[:1], float("nan")).repeat(rows_of(placed), 1),
        )
        buffer[spare(slot, rows_of(placed))] = rows
        rows = buffer
        options |= {"expert_ends": placed.ends, "expert_alignment": ALIGNMENT}
    codes = call.new("codes", (rows.shape[0], width), (width, 1), torch.uint8)
    file = functions(FP8, PACKED if packed else COLUMNS)
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
    if packed:
        # The last word's missing groups hold the exponent of the floor; nothing reads them.
        kept = without_missing_groups(kept, width // 128)
    outputs = {"codes": codes[slot], "scales": kept}
    count, groups = rows.shape[0], scales.shape[1]

    def with_fates() -> Produced:
        fates = torch.full((count,), Fate.UNTOUCHED, dtype=torch.int8, device=slot.device)
        fates[slot[slot >= 0]] = Fate.LIVE
        # The scales were allocated transposed, [groups, aligned rows].
        tall = -(-count // 4) * 4 if packed else count
        across = torch.full((groups, tall), Fate.UNTOUCHED, dtype=torch.int8)
        across[:, :count] = fates.cpu()
        return Produced(outputs=outputs, fates={"codes": fates, "scales": across})

    return with_fates


def _rows(case: Case) -> int:
    """Count programs of a row and four groups, each as dear as five of ours."""
    return 5 * case.m * -(-case.i // 512)


def _padded(case: Case) -> int:
    """Count the programs of every expert's rows, padded to 128."""
    rows = min(case.e, max(case.m, 1)) * ALIGNMENT
    return 3 * -(-(case.m + rows) // 32) * -(-case.i // 128) + case.e


def _register_activation(name: str, *, packed: bool, ends: bool) -> None:
    supports = _supports_packed if packed else _supports_colmajor
    wanted = _activation_call(packed=packed, ends=ends)
    words = ", the rows of expert ends" if ends else ""

    @register(
        name, stage="swiglu_quant",
        recipes="vllm_deepgemm_packed" if packed else "vllm_deepgemm",
        supports=supports if ends else _dense_only(supports),
        unavailable=needs(wanted), files=used(wanted), triton=True,
        versions=package.versions, cost=_padded if ends else _rows if packed else None,
        note=f"vLLM {'silu_mul_quant_fp8_packed' if packed else 'silu_mul_per_token_group_quant_fp8_colmajor'}{words}.",  # noqa: E501
    )  # fmt: skip
    def activation(call: Call) -> Callable[[], Produced]:
        return _activation(call, packed=packed, ends=ends)


_register_activation("vllm_silu_mul_colmajor", packed=False, ends=False)
_register_activation("vllm_silu_mul_colmajor_ends", packed=False, ends=True)
_register_activation("vllm_silu_mul_packed", packed=True, ends=False)
_register_activation("vllm_silu_mul_packed_ends", packed=True, ends=True)
