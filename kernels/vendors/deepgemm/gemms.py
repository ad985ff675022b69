"""DeepGEMM's four layouts as the harness sees them: canonical rows, padding full of NaN."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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
    at, live = deep_gemm.spare(slot, rows), (slot >= 0)[:, None]
    a = torch.full((rows, codes.shape[1]), E4M3.nan, dtype=torch.uint8, device=codes.device)
    scale = torch.full((rows, scales.shape[1]), float("inf"), device=codes.device)
    a[at] = torch.where(live, codes, E4M3.nan)
    scale[at] = torch.where(live, scales, float("inf"))
    return a, scale


def owners(expert: Tensor, slot: Tensor, rows: int) -> Tensor:
    """Return the expert of each row of a buffer, int32 [rows]; -1 where it has none."""
    layout = torch.full((rows,), -1, dtype=torch.int32, device=expert.device)
    layout[deep_gemm.spare(slot, rows)] = expert.int()
    return layout


def _padded_pairs(inputs: GroupedRows, slot: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    source = inputs.source
    return padded(inputs.a[source], inputs.a_scale[source], slot, rows)


def gathered(out: Tensor, slot: Tensor) -> Tensor:
    """Return canonical rows [P, N] of a padded output; zeros where a pair has none."""
    rows = out[slot.clamp(min=0)]
    return torch.where((slot >= 0)[:, None], rows, torch.zeros_like(rows))


@register(
    "deepgemm_dense", stage="fc1", recipes=RECIPE, supports=_supports_dense,
    unavailable=partial(deep_gemm.lacking, "dense"), needs_gpu=True, versions=versions,
)  # fmt: skip
def deepgemm_dense(call: Call) -> Tensor:
    """DeepGEMM fp8_gemm_nt."""
    inputs: GroupedRows = call.inputs
    out = call.new("rows")
    deep_gemm.dense(inputs.a, inputs.a_scale, inputs.w[0], inputs.w_scale[0], out)
    return out


def _grouped(call: Call, *, psum: bool, zero_padding: bool) -> Callable[[], Produced]:
    inputs: GroupedRows = call.inputs
    experts, n = inputs.w.shape[:2]
    placed = place(inputs.expert, experts, deep_gemm.ALIGNMENT)
    height = deep_gemm.rows_of(placed)
    a, scale = _padded_pairs(inputs, placed.slot, height)
    layout = placed.ends if psum else owners(inputs.expert, placed.slot, height)
    out = call.new("out", (height, n), (n, 1), torch.bfloat16)
    deep_gemm.grouped(
        a, scale, inputs.w, inputs.w_scale, out, layout, psum=psum, zero_padding=zero_padding
    )
    rows = gathered(out, placed.slot)

    def with_fates() -> Produced:
        return Produced(
            outputs={"rows": rows}, fates={"out": deep_gemm.row_fates(placed, skips=psum)}
        )

    return with_fates


def _register(name: str, *, psum: bool, zero_padding: bool) -> None:
    words = "prefix sums" if psum else "m_indices"

    @register(
        name, stage="fc1", recipes=RECIPE, supports=_supports,
        unavailable=partial(deep_gemm.lacking, "contiguous"), needs_gpu=True, versions=versions,
        contract=Contract(),
        note=f"DeepGEMM grouped GEMM, {words}, ensure_zero_padding={zero_padding}.",
    )  # fmt: skip
    def grouped(call: Call) -> Callable[[], Produced]:
        return _grouped(call, psum=psum, zero_padding=zero_padding)


_register("deepgemm_contiguous", psum=False, zero_padding=True)
_register("deepgemm_contiguous_nopad", psum=False, zero_padding=False)
_register("deepgemm_psum", psum=True, zero_padding=True)
_register("deepgemm_psum_nopad", psum=True, zero_padding=False)


@register(
    "deepgemm_masked", stage="fc1", recipes=RECIPE, supports=_supports,
    unavailable=partial(deep_gemm.lacking, "masked"), needs_gpu=True, versions=versions,
)  # fmt: skip
def deepgemm_masked(call: Call) -> Callable[[], Produced]:
    """DeepGEMM masked grouped GEMM."""
    inputs: GroupedRows = call.inputs
    experts, n, k = inputs.w.shape
    slot, counts, max_m = masked_slots(inputs.expert, experts)
    a, scale = _padded_pairs(inputs, slot, experts * max_m + 1)
    a, scale = a[:-1], scale[:-1]
    out = call.new("out", (experts, max_m, n), (max_m * n, n, 1), torch.bfloat16)
    deep_gemm.masked(
        a.view(experts, max_m, k), scale.view(experts, max_m, -1), inputs.w, inputs.w_scale, out,
        counts, expected=expected(inputs.expert, experts),
    )  # fmt: skip
    rows = gathered(out.view(-1, n), slot)

    def with_fates() -> Produced:
        fates = deep_gemm.masked_fates(counts, max_m)
        return Produced(outputs={"rows": rows}, fates={"out": fates})

    return with_fates


def expected(expert: Tensor, experts: int) -> int:
    """Return the rows that an expert has on average, if all pairs are owned."""
    return max(1, expert.numel() // experts)


FEW_ROWS = 1 << 14
"""Rows up to which each expert has room for all pairs, so that no value has to be looked at."""


def masked_slots(expert: Tensor, experts: int) -> tuple[Tensor, Tensor, int]:
    """Return each pair's row in [E, max_m] flattened, the live rows of each expert, and max_m."""
    placed = place(expert, experts, 1)
    counts, most = placed.counts, expert.numel()
    if experts * most > FEW_ROWS:
        most = int(counts.max()) if counts.numel() else 0
    max_m = max(1, -(-most // deep_gemm.ALIGNMENT)) * deep_gemm.ALIGNMENT
    own = expert.clamp(min=0)
    slot = placed.slot - placed.starts.long()[own] + own * max_m
    return torch.where(expert >= 0, slot, -1), counts, max_m
