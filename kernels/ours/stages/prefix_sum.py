"""Our prefix-sum kernels as the harness sees them: rows by expert, live ones alone written.

What is not live holds NaN before each call, and nothing may be written there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_parity.kernels.call import Call, Fate, Produced, demand_rows, row_major_strides
from moe_parity.kernels.ours.stages import ours
from moe_parity.references.arithmetic.formats import BLOCK, E4M3
from moe_parity.references.language import Case, Hazard
from moe_parity.references.recipes.ours import NO_ROUNDING
from moe_parity.references.stages import COMBINE, FC1, FC2, PERMUTE, SWIGLU_QUANT
from moe_parity.references.stages.align import RoutedRows
from moe_parity.references.stages.gemm.stage import Fc1, Fc2
from moe_parity.references.stages.routing import Placement, place

FEW_PROGRAMS = 7
"""Programs of a quantization on the virtual GPU, which runs them one by one: each takes tiles."""


@dataclass(frozen=True, kw_only=True)
class _Laid:
    """Where the rows of a call lie, found apart from the kernels under test."""

    placed: Placement
    height: int

    @staticmethod
    def of(expert: Tensor, experts: int, alignment: int) -> _Laid:
        """Place the pairs of a call."""
        from moe_parity.kernels.ours.permute import row_bound

        height = row_bound(expert.numel(), experts, alignment)
        return _Laid(placed=place(expert, experts, alignment), height=height)

    def laid(self, rows: Tensor, rest: float) -> Tensor:
        """Return rows [P, C] where they lie, with ``rest`` in all others."""
        made = torch.full(
            (self.height + 1, rows.shape[1]), rest, dtype=rows.dtype, device=rows.device
        )
        slot = self.placed.slot
        made[torch.where(slot >= 0, slot, self.height)] = rows
        return made[:-1]

    def taken(self, rows: Tensor, like: Tensor | None = None) -> Tensor:
        """Return the pairs' rows [P, C] in ``like``, if any; zeros for those of nobody."""
        slot = self.placed.slot
        found = rows[slot.clamp(min=0)]
        found = torch.where((slot >= 0)[:, None], found, torch.zeros_like(found))
        return found if like is None else like.copy_(found)

    @property
    def fates(self) -> Tensor:
        """Rows that are not live are untouched: int8 [R]."""
        row = torch.arange(self.height, device=self.placed.ends.device)[:, None]
        live = ((row >= self.placed.starts) & (row < self.placed.ends)).any(1)
        return torch.where(live, int(Fate.LIVE), int(Fate.UNTOUCHED)).to(torch.int8)


def _alignment(call: Call) -> int:
    from moe_parity.kernels.ours.dispatch import ALIGNMENT

    return int(call.config or ALIGNMENT)


# --- the permutation ------------------------------------------------------------------------------


def _supports_permute(case: Case, device: str) -> str | None:
    if case.h % BLOCK:
        return f"K = {case.h} must be a multiple of 128."
    if case.hazard is Hazard.TRANSPOSED:
        return "rows of codes must be contiguous."
    return None


def _experts_too(case: Case) -> int:
    return PERMUTE.cost(case) + 2 * case.local_experts * -(-case.m * case.k // 512)


@ours(
    "ours_permute", PERMUTE, recipe=NO_ROUNDING, supports=_supports_permute, cost=_experts_too,
    configs={"align128": 128, "align16": 16, "align256": 256},
    note="Our permutation: rows by expert, ends of live rows, column-major scales.",
)  # fmt: skip
def permute(call: Call) -> Callable[[], Produced]:
    """Permute into poison, and take each pair's row from the place that the kernel names."""
    from moe_parity.kernels.ours import permute as own

    inputs: RoutedRows = call.inputs
    ids, alignment = inputs.ids.contiguous(), _alignment(call)
    demand_rows(inputs.codes, "our permutation reads codes by row: it")
    laid = _Laid.of(inputs.expert, inputs.experts, alignment)
    width = inputs.codes.shape[1]
    shape, strides, dtype = own.scale_memory(laid.height, width, own.Scales.TMA)
    out = own.PrefixRows(
        codes=call.new("codes", (laid.height, width), dtype=torch.uint8),
        scales=call.new("scales", shape, strides, dtype),
        ends=call.new("ends", (inputs.experts, 1), dtype=torch.int32).view(-1),
        place=call.new("place", (ids.numel(), 1), dtype=torch.int32).view(-1),
        alignment=alignment,
    )  # fmt: skip
    own.permute(
        inputs.codes, inputs.scales, ids, inputs.first, inputs.experts, alignment=alignment, out=out
    )

    def looked_at() -> Produced:
        return _permuted(inputs, laid, out.codes, out.scales, out.ends, out.place)

    return looked_at


def _permuted(
    inputs: RoutedRows, laid: _Laid, codes: Tensor, scales: Tensor, ends: Tensor, placed: Tensor
) -> Produced:
    """Return rows where the kernel says they are; one outside its expert's live rows is zeros."""
    at, own = placed.long(), inputs.expert.clamp(min=0)
    starts = laid.placed.starts.long()[own]
    inside = (at >= starts) & (at < laid.placed.ends.long()[own]) & (inputs.expert >= 0)
    # -1 is what a pair of nobody has: any other place would be read in the top-k sum.
    wrong = (inputs.expert < 0) & (placed != -1)
    found = {}
    for name, rows in (("codes", codes), ("scales", scales)):
        taken = rows[torch.where(inside, at, 0)]
        found[name] = torch.where(inside[:, None], taken, torch.zeros_like(taken))
    counts = ends - laid.placed.starts
    live = torch.full_like
    return Produced(
        outputs={**found, "counts": torch.where(wrong.any(), -1 - counts, counts)},
        fates={
            "codes": laid.fates, "scales": laid.fates,
            "ends": live(ends, int(Fate.LIVE), dtype=torch.int8),
            "place": live(placed, int(Fate.LIVE), dtype=torch.int8),
        },
    )  # fmt: skip


# --- both GEMMs -----------------------------------------------------------------------------------


def _register_gemm(stage: Fc1 | Fc2) -> None:
    def supports(case: Case, device: str) -> str | None:
        k = stage.extent(case)[1]
        return f"K = {k} must be a multiple of 128." if k % BLOCK else None

    def blocks(case: Case) -> int:
        """Count live tiles times blocks of K, and early ends; drawn cases showed the factor."""
        n, k = stage.extent(case)
        pairs = case.m * case.k
        live = min(pairs, case.local_experts) + pairs // 64
        return 3 * -(-n // 64) * (live * -(-k // BLOCK) + live // 4)

    @ours(
        f"ours_{stage.name}_prefix", stage, supports=supports, cost=blocks,
        configs={"align128": 128, "align16": 16},
        note="Our grouped GEMM on rows by expert, live rows alone.",
    )  # fmt: skip
    def gemm(call: Call) -> Produced:
        """Lay the pairs' rows out by expert, multiply, and take the products back."""
        from moe_parity.kernels.ours import prefix_sum

        inputs = call.inputs
        experts, n = inputs.w.shape[:2]
        laid = _Laid.of(inputs.expert, experts, _alignment(call))
        a = laid.laid(inputs.a[inputs.source], E4M3.nan)
        scale = laid.laid(inputs.a_scale[inputs.source], float("nan"))
        scale = scale.t().contiguous().t()
        out = call.new("out", (laid.height, n), dtype=torch.bfloat16)
        prefix_sum.prefix_gemm(
            a, scale, inputs.w, inputs.w_scale, laid.placed.ends, alignment=_alignment(call),
            bias=inputs.bias, out=out,
        )  # fmt: skip
        return Produced(outputs={"rows": laid.taken(out)}, fates={"out": laid.fates})


_register_gemm(FC1)
_register_gemm(FC2)


# --- SwiGLU and quantization ----------------------------------------------------------------------


def _supports_rows(case: Case, device: str) -> str | None:
    if case.group not in (64, 128):
        return f"the group must be 64 or 128, not {case.group}."
    if case.i % case.group:
        return f"I = {case.i} must be a multiple of the group, {case.group}."
    return None


def _tiles(case: Case) -> int:
    """Count twelve for each tile of 16 rows and a group; an expert with a row has one at least."""
    return 12 * (min(case.m, case.e) + case.m // 16) * -(-case.i // BLOCK) + FEW_PROGRAMS // 4


@ours(
    "ours_swiglu_quant_prefix", SWIGLU_QUANT, supports=_supports_rows, cost=_tiles,
    note="Our SwiGLU with quantization on rows by expert, persistent, live rows alone.",
)  # fmt: skip
def swiglu_quant_prefix(call: Call) -> Produced:
    """Lay the rows out by expert, quantize, and take the codes and scales back."""
    from moe_parity.kernels.ours import prefix_sum
    from moe_parity.kernels.ours.activation import Activation

    inputs, case = call.inputs, call.case
    alignment = _alignment(call)
    laid = _Laid.of(inputs.expert, inputs.counts.numel(), alignment)
    rows = laid.laid(inputs.rows, float("nan"))
    width = rows.shape[1] // 2
    shape, strides, dtype = case.scale.stored(laid.height, width // case.group, case.layout)
    codes = call.new("codes", (laid.height, width), dtype=torch.uint8)
    scales = call.new("scales", shape, strides, dtype)
    how = Activation(
        clamp="none" if inputs.limit is None else "before", limit=inputs.limit or 0.0,
        alpha=inputs.alpha, beta=inputs.beta,
    )  # fmt: skip
    prefix_sum.prefix_swiglu_quant(
        rows, laid.placed.ends, how, alignment=alignment, scale=case.scale, group=case.group,
        codes=codes, scales=scales,
        programs=prefix_sum.PROGRAMS if rows.is_cuda else FEW_PROGRAMS,
    )  # fmt: skip
    wanted = call.outputs["scales"]
    steps = wanted.strides or row_major_strides(wanted.shape)
    like = torch.empty_strided(wanted.shape, steps, dtype=wanted.dtype, device=scales.device)
    return Produced(
        outputs={"codes": laid.taken(codes), "scales": laid.taken(scales, like)},
        fates={"codes": laid.fates, "scales": laid.fates},
    )


# --- the top-k sum --------------------------------------------------------------------------------


@ours("ours_combine_prefix", COMBINE, note="Our top-k sum of rows at their places.")
def combine_prefix(call: Call) -> Tensor:
    """Lay the rows out by expert, with NaN between them, and sum them from their places."""
    from moe_parity.kernels.ours import prefix_sum

    inputs, out = call.inputs, call.new("out")
    tokens, k, width = inputs.rows.shape
    laid = _Laid.of(inputs.expert, inputs.experts, 16)
    rows = laid.laid(inputs.rows.reshape(tokens * k, width), float("nan"))
    prefix_sum.prefix_combine(rows, laid.placed.slot.int(), inputs.weights, out)
    return out
