"""DeepGEMM's four layouts as the harness sees them: canonical rows, padding full of NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_parity.kernels.call import Call, Produced
from moe_parity.kernels.registry import register
from moe_parity.kernels.vendors.deepgemm import api as deep_gemm
from moe_parity.kernels.vendors.deepgemm.casts import versions
from moe_parity.references.arithmetic.formats import E4M3
from moe_parity.references.language import Case, Contract
from moe_parity.references.stages.gemm.stage import GroupedRows
from moe_parity.references.stages.routing import place

RECIPE = "deepgemm_gemm"


def _supports(case: Case, device: str) -> str | None:
    if case.scale.is_packed:
        return "SM90 GEMMs read fp32 scales; packed exponents are for other chips."
    if case.h % 16 or (2 * case.i) % 8:
        return f"K = {case.h} must be a multiple of 16 and N = {2 * case.i} one of 8."
    return None


def _supports_dense(case: Case, device: str) -> str | None:
    if case.e != 1 or case.k != 1 or case.ep_size != 1:
        return "one expert and one choice: a dense GEMM."
    return _supports(case, device)


def padded(codes: Tensor, scales: Tensor, slot: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return rows [P, K] and scales at their slots of a buffer; its padding is NaN and infinite."""
    live = slot >= 0
    a = torch.full((rows, codes.shape[1]), E4M3.nan, dtype=torch.uint8, device=codes.device)
    scale = torch.full((rows, scales.shape[1]), float("inf"), device=codes.device)
    a[slot[live]], scale[slot[live]] = codes[live], scales[live]
    return a, scale


def _padded_pairs(inputs: GroupedRows, slot: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    source = inputs.source
    return padded(inputs.a[source], inputs.a_scale[source], slot, rows)


def gathered(out: Tensor, slot: Tensor) -> Tensor:
    """Return canonical rows [P, N] of a padded output; zeros where a pair has none."""
    rows = out[slot.clamp(min=0)]
    return torch.where((slot >= 0)[:, None], rows, torch.zeros_like(rows))


@register(
    "deepgemm_dense", stage="fc1", recipes=RECIPE, supports=_supports_dense,
    unavailable=deep_gemm.unavailable, needs_gpu=True, versions=versions,
)  # fmt: skip
def deepgemm_dense(call: Call) -> Tensor:
    """DeepGEMM fp8_gemm_nt."""
    inputs: GroupedRows = call.inputs
    out = call.new("rows")
    deep_gemm.dense(inputs.a, inputs.a_scale, inputs.w[0], inputs.w_scale[0], out)
    return out


def _grouped(call: Call, *, psum: bool, zero_padding: bool) -> Produced:
    inputs: GroupedRows = call.inputs
    experts, n = inputs.w.shape[:2]
    placed = place(inputs.expert, experts, deep_gemm.ALIGNMENT)
    a, scale = _padded_pairs(inputs, placed.slot, deep_gemm.rows_of(placed))
    layout = placed.ends
    if not psum:
        layout = torch.full((deep_gemm.rows_of(placed),), -1, dtype=torch.int32, device=a.device)
        live = placed.slot >= 0
        layout[placed.slot[live]] = inputs.expert[live].int()
    out = call.new("out", (deep_gemm.rows_of(placed), n), (n, 1), torch.bfloat16)
    deep_gemm.grouped(
        a, scale, inputs.w, inputs.w_scale, out, layout, psum=psum, zero_padding=zero_padding
    )
    fates = deep_gemm.row_fates(placed, skips=psum)
    return Produced(outputs={"rows": gathered(out, placed.slot)}, fates={"out": fates})


def _register(name: str, *, psum: bool, zero_padding: bool) -> None:
    words = "prefix sums" if psum else "m_indices"

    @register(
        name, stage="fc1", recipes=RECIPE, supports=_supports,
        unavailable=deep_gemm.unavailable, needs_gpu=True, versions=versions, contract=Contract(),
        note=f"DeepGEMM grouped GEMM, {words}, ensure_zero_padding={zero_padding}.",
    )  # fmt: skip
    def grouped(call: Call) -> Produced:
        return _grouped(call, psum=psum, zero_padding=zero_padding)


_register("deepgemm_contiguous", psum=False, zero_padding=True)
_register("deepgemm_contiguous_nopad", psum=False, zero_padding=False)
_register("deepgemm_psum", psum=True, zero_padding=True)
_register("deepgemm_psum_nopad", psum=True, zero_padding=False)


@register(
    "deepgemm_masked", stage="fc1", recipes=RECIPE, supports=_supports,
    unavailable=deep_gemm.unavailable, needs_gpu=True, versions=versions,
)  # fmt: skip
def deepgemm_masked(call: Call) -> Produced:
    """DeepGEMM masked grouped GEMM."""
    inputs: GroupedRows = call.inputs
    experts, n, k = inputs.w.shape
    slot, counts, max_m = masked_slots(inputs.expert, experts)
    a, scale = _padded_pairs(inputs, slot, experts * max_m)
    out = call.new("out", (experts, max_m, n), (max_m * n, n, 1), torch.bfloat16)
    deep_gemm.masked(
        a.view(experts, max_m, k), scale.view(experts, max_m, -1), inputs.w, inputs.w_scale, out,
        counts,
    )  # fmt: skip
    rows = gathered(out.view(-1, n), slot)
    return Produced(outputs={"rows": rows}, fates={"out": deep_gemm.masked_fates(counts, max_m)})


def masked_slots(expert: Tensor, experts: int) -> tuple[Tensor, Tensor, int]:
    """Return each pair's row in [E, max_m] flattened, the live rows of each expert, and max_m."""
    placed = place(expert, experts, 1)
    counts = placed.counts
    most = int(counts.max()) if counts.numel() else 0
    max_m = max(1, -(-most // deep_gemm.ALIGNMENT)) * deep_gemm.ALIGNMENT
    own = expert.clamp(min=0)
    slot = placed.slot - placed.starts.long()[own] + own * max_m
    return torch.where(expert >= 0, slot, -1), counts, max_m
