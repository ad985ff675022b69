"""Our kernels of batched experts as the harness sees them: its rows, laid out by expert.

Expert e has its rows first in [E, T, ...]; NaN lies past them, and nothing may be written there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_parity.kernels.call import Call, Fate, Produced, row_major_strides
from moe_parity.kernels.ours.stages import ours
from moe_parity.references.arithmetic.formats import BLOCK, E4M3
from moe_parity.references.language import Case
from moe_parity.references.stages import FC1, SWIGLU_QUANT
from moe_parity.references.stages.routing import place

ROOM, ROOM_ON_GPU = 1 << 14, 1 << 17
"""Rows of [E, T] up to which each expert has room for all pairs, so that no count is looked at."""

FEW_PROGRAMS = 7
"""Programs of a quantization on the virtual GPU, which runs them one by one: each takes tiles."""

SPARE = 3
"""Rows that no expert can fill."""


@dataclass(frozen=True, kw_only=True)
class _Room:
    """Where the rows of a call lie."""

    counts: Tensor
    """int32 [E]."""
    slot: Tensor
    """The row of each in [E * T], int64 [P]; E * T where nobody owns it."""
    tokens: int

    @property
    def shape(self) -> tuple[int, int]:
        """E and T."""
        return self.counts.numel(), self.tokens

    def laid(self, rows: Tensor, rest: float) -> Tensor:
        """Return rows [P, C] as [E, T, C], with ``rest`` past those of each expert."""
        experts, tokens = self.shape
        made = torch.full(
            (experts * tokens + 1, rows.shape[1]), rest, dtype=rows.dtype, device=rows.device
        )
        made[self.slot] = rows
        return made[:-1].view(experts, tokens, rows.shape[1])

    def taken(self, batched: Tensor, like: Tensor | None = None) -> Tensor:
        """Return rows [P, C] of [E, T, C] in ``like``, if any; zeros for those of nobody."""
        experts, tokens = self.shape
        rows = batched.reshape(experts * tokens, -1)
        owned = (self.slot < experts * tokens)[:, None]
        found = rows[self.slot.clamp(max=experts * tokens - 1)]
        found = torch.where(owned, found, torch.zeros_like(found))
        return found if like is None else like.copy_(found)

    @property
    def fates(self) -> Tensor:
        """Rows past the counts are untouched: int8 [E, T]."""
        row = torch.arange(self.tokens, device=self.counts.device)
        live = row[None] < self.counts[:, None]
        return torch.where(live, int(Fate.LIVE), int(Fate.UNTOUCHED)).to(torch.int8)


def _room(expert: Tensor, experts: int) -> _Room:
    placed, tokens = place(expert, experts, 1), expert.numel() + SPARE
    own = expert.clamp(min=0)
    slot = placed.slot - placed.starts.long()[own] + own * tokens
    slot = torch.where(expert >= 0, slot, experts * tokens)
    return _Room(counts=placed.counts, slot=slot, tokens=tokens)


def _too_large(rows: int, experts: int, device: str) -> str | None:
    most = ROOM_ON_GPU if device == "cuda" else ROOM
    if experts * (rows + SPARE) <= most:
        return None
    return f"room for {rows} rows in each of {experts} experts is more than {most} rows."


# --- SwiGLU and quantization ---------------------------------------------------------------------


def _supports_rows(case: Case, device: str) -> str | None:
    if case.group not in (64, 128):
        return f"the group must be 64 or 128, not {case.group}."
    return _too_large(case.m, case.e, device)


def _tiles(case: Case) -> int:
    """Count four for each tile of 16 rows and a group; an expert with a row has one at least."""
    return 4 * (min(case.m, case.e) + case.m // 16) * -(-case.i // BLOCK) + FEW_PROGRAMS // 4


@ours(
    "ours_swiglu_quant_batched", SWIGLU_QUANT, supports=_supports_rows, cost=_tiles,
    note="Our SwiGLU with quantization of batched experts, persistent.",
)  # fmt: skip
def swiglu_quant_batched(call: Call) -> Produced:
    """Lay the rows out by expert, quantize, and take the codes and scales back."""
    from moe_parity.kernels.ours import batched
    from moe_parity.kernels.ours.activation import Activation

    inputs, case = call.inputs, call.case
    room = _room(inputs.expert, inputs.counts.numel())
    rows = room.laid(inputs.rows, float("nan"))
    width = rows.shape[2] // 2
    codes = call.new("codes", (*room.shape, width), dtype=torch.uint8)
    scales = call.new(
        "scales", *batched.scale_memory(*room.shape, width // case.group, case.scale, case.layout)
    )
    how = Activation(
        clamp="none" if inputs.limit is None else "before", limit=inputs.limit or 0.0,
        alpha=inputs.alpha, beta=inputs.beta,
    )  # fmt: skip
    batched.batched_swiglu_quant(
        rows, room.counts, how, scale=case.scale, group=case.group, layout=case.layout,
        codes=codes, scales=scales,
        programs=batched.PROGRAMS if rows.is_cuda else FEW_PROGRAMS,
    )  # fmt: skip
    wanted = call.outputs["scales"]
    steps = wanted.strides or row_major_strides(wanted.shape)
    like = torch.empty_strided(wanted.shape, steps, dtype=wanted.dtype, device=scales.device)
    return Produced(
        outputs={"codes": room.taken(codes), "scales": room.taken(scales, like)},
        fates={"codes": room.fates, "scales": room.fates},
    )


# --- the first GEMM ------------------------------------------------------------------------------


def _supports_gemm(case: Case, device: str) -> str | None:
    if case.h % BLOCK:
        return f"K = {case.h} must be a multiple of 128."
    return _too_large(case.m * case.k, case.local_experts, device)


def _blocks(case: Case) -> int:
    """Count the pairs' tiles times blocks of K, and an early end for each tile without a row."""
    tiles = -(-2 * case.i // 64)
    live = min(case.m * case.k, case.local_experts) + case.m * case.k // 64
    empty = case.local_experts * -(-(case.m * case.k + SPARE) // 64)
    return tiles * (live * -(-case.h // BLOCK) + empty // 8)


@ours(
    "ours_fc1_batched", FC1, supports=_supports_gemm, cost=_blocks,
    note="Our grouped GEMM of batched experts.",
)  # fmt: skip
def fc1_batched(call: Call) -> Produced:
    """Lay the pairs' rows out by expert, multiply, and take the products back."""
    from moe_parity.kernels.ours import batched

    inputs = call.inputs
    experts, n = inputs.w.shape[:2]
    room = _room(inputs.expert, experts)
    a = room.laid(inputs.a[inputs.source], E4M3.nan)
    scale = room.laid(inputs.a_scale[inputs.source], float("nan"))
    out = call.new("out", (*room.shape, n), dtype=torch.bfloat16)
    batched.batched_gemm(a, scale, inputs.w, inputs.w_scale, room.counts, bias=inputs.bias, out=out)
    return Produced(outputs={"rows": room.taken(out)}, fates={"out": room.fates})
