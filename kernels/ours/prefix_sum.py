"""The layer on rows that a prefix-sum scheduler visits: GEMM, SwiGLU with quantization, top-k sum.

Rows lie by expert (``permute.PrefixRows``), and the ends of each expert's live rows lie on the
device.  Live rows alone are read and written, in every tensor: a tile that holds none ends at once,
and the padding of a tile that is partly filled is left alone.  Only metadata is looked at: a call
never waits for the GPU and may be captured in a CUDA graph, and each replay takes the ends as they
are by then.  The bits are those of the other paths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_parity.kernels.ours import permute, prefix_kernels
from moe_parity.kernels.ours.activation import Activation
from moe_parity.kernels.ours.arguments import check_laid, check_like, has_own_elements
from moe_parity.kernels.ours.dispatch import ALIGNMENT, Gemm
from moe_parity.kernels.ours.permute import PrefixRows, check_alignment, scale_memory
from moe_parity.kernels.ours.quant import GROUPS
from moe_parity.kernels.virtual_gpu import dispatch
from moe_parity.references.arithmetic.formats import BLOCK, ScaleFormat, ScaleLayout
from moe_parity.references.errors import ParityError
from moe_parity.references.stages.layer.operands import Experts, Trace

PROGRAMS = 4 * 132
"""The most programs of a quantization: four for each multiprocessor of an H200."""

ROWS = 16
"""Rows of a tile of a quantization."""

FEW_TOKENS = 32
"""Tokens up to which the GEMM works in tiles of 16 rows; past them they are of 64."""


def prefix_gemm(
    a: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    ends: Tensor,
    *,
    alignment: int = ALIGNMENT,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    block: int | None = None,
) -> Tensor:
    """Return bf16 [R, N]: the live rows of each expert times its weight.

    ``a`` uint8 [R, K] in rows of any pitch with fp32 scales [R, K / 128], ``w`` uint8 [E, N, K],
    rows contiguous, with [E, ceil(N / 128), K / 128]; scales have any strides.  ``ends`` int32 [E]
    and ``alignment`` are those of the rows; ``bias`` is fp32 [E, N].  ``out`` is memory of the
    caller's, contiguous.  ``block`` rows of a tile, 16, 32, 64 or 128, divide the alignment and
    change no bit.  Raises ParityError, in a sentence, for bad input.
    """
    op = "prefix_gemm"
    _check_rows(op, a, torch.uint8)
    rows, k = a.shape
    if w.dim() != 3 or w.dtype is not torch.uint8 or w.shape[2] != k or w.stride(2) != 1:
        raise ParityError(
            f"{op}: w must be uint8 [E, N, {k}] with contiguous rows, got {w.dtype} "
            f"{list(w.shape)} with strides {w.stride()}."
        )
    if k % BLOCK or not k:
        raise ParityError(f"{op}: K = {k} must be a positive multiple of {BLOCK}.")
    experts, n = w.shape[:2]
    check_like(op, "a_scale", a_scale, a, torch.float32, (rows, k // BLOCK))
    check_like(op, "w", w, a, torch.uint8, (experts, n, k))
    check_like(op, "w_scale", w_scale, a, torch.float32, (experts, -(-n // BLOCK), k // BLOCK))
    check_laid(op, "ends", ends, a, torch.int32, (experts,))
    _check_height(op, rows, alignment)
    if bias is not None:
        check_laid(op, "bias", bias, a, torch.float32, (experts, n))
    if out is None:
        out = torch.empty((rows, n), dtype=torch.bfloat16, device=a.device)
    check_laid(op, "out", out, a, torch.bfloat16, (rows, n))
    block = min(64, alignment) if block is None else block
    if block not in (16, 32, 64, 128) or alignment % block:
        raise ParityError(
            f"{op}: a tile has 16, 32, 64 or 128 rows that divide the alignment of {alignment}, "
            f"not {block}."
        )
    if out.numel() == 0:
        return out
    tile = 64 if block <= 32 else 128
    dispatch(
        prefix_kernels.prefix_gemm_kernel, (rows // block, -(-n // tile)),
        w, w_scale, a, a_scale, w_scale if bias is None else bias, out, ends, experts,
        a.stride(0), *a_scale.stride(), *w.stride()[:2], *w_scale.stride(),
        N=n, K=k, HAS_BIAS=bias is not None, ALIGN=alignment, EXPERTS=_lanes(experts),
        BLOCK_N=tile, BLOCK=block, num_warps=4, num_stages=4 if tile == 64 else 3,
    )  # fmt: skip
    return out


def prefix_swiglu_quant(
    rows: Tensor,
    ends: Tensor,
    how: Activation,
    *,
    alignment: int = ALIGNMENT,
    scale: ScaleFormat = ScaleFormat.FP32,
    group: int = 128,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
    programs: int = PROGRAMS,
) -> tuple[Tensor, Tensor]:
    """Quantize SwiGLU of the live ones of bf16 ``rows`` [R, 2 * I], contiguous, the gate first.

    ``ends`` int32 [E] and ``alignment`` are those of the rows; ``how.limits`` has a limit for each
    expert.  Returns E4M3 codes uint8 [R, I] and scales [R, I / group], fp32 with strides
    (1, R rounded up to 4), or of ``ue8m0packed`` int32 words [R, ceil(I / group / 4)] likewise, in
    which bytes of groups that do not exist are 0.  ``codes`` and ``scales`` are memory of the
    caller's: codes contiguous, scales with any strides.  ``programs`` is the most that are
    launched.  Raises ParityError, in a sentence, for bad input.
    """
    op = "prefix_swiglu_quant"
    _check_rows(op, rows, torch.bfloat16)
    height, width = rows.shape[0], rows.shape[1] // 2
    if rows.shape[1] % 2 or not rows.is_contiguous():
        raise ParityError(
            f"{op}: rows must be contiguous [R, 2 I], got {list(rows.shape)} with strides "
            f"{rows.stride()}."
        )
    if type(group) is not int or group not in GROUPS or width % group or not width:
        raise ParityError(
            f"{op}: {width} columns must be a positive multiple of the group, 64 or 128, not "
            f"{group}."
        )
    if programs < 1:
        raise ParityError(f"{op}: programs must be at least 1, got {programs}.")
    experts = ends.numel()
    check_laid(op, "ends", ends, rows, torch.int32, (experts,))
    _check_height(op, height, alignment)
    if how.limits is not None:
        check_laid(op, "limits", how.limits, rows, torch.float32, (experts,))
    shape, strides, dtype = scale.stored(height, width // group, ScaleLayout.TMA)
    if codes is None:
        codes = torch.empty((height, width), dtype=torch.uint8, device=rows.device)
    if scales is None:
        scales = torch.empty_strided(shape, strides, dtype=dtype, device=rows.device)
    check_laid(op, "codes", codes, rows, torch.uint8, (height, width))
    check_like(op, "scales", scales, rows, dtype, shape)
    if not has_own_elements(scales):
        raise ParityError(
            f"{op}: elements of scales overlap, strides {scales.stride()}; give each its own "
            "memory."
        )
    if rows.numel():
        dispatch(
            prefix_kernels.prefix_quant_kernel, (min(programs, height // ROWS * shape[1]),),
            rows, codes, scales, ends, scales if how.limits is None else how.limits,
            experts, how.limit, how.alpha, how.beta, *scales.stride(),
            WIDTH=width, G=group, ROWS=ROWS, ALIGN=alignment, EXPERTS=_lanes(experts),
            PACKED=scale.is_packed, POWER_OF_TWO=scale.is_power_of_two, num_warps=4,
            **how.constants,
        )  # fmt: skip
    return codes, scales


def prefix_combine(rows: Tensor, place: Tensor, weights: Tensor | None, out: Tensor) -> None:
    """Sum the bf16 ``rows`` [R, H] at each token's places into ``out`` [M, H], k ascending.

    ``place`` int32 [M, k] or [M * k] is the row of each pair; one below 0 adds nothing, and no row
    but those is read.  ``weights`` fp32 [M, k] are None for ones; ``out`` is bf16, fp16 or fp32 in
    rows of any pitch.
    """
    op = "prefix_combine"
    _check_rows(op, rows, torch.bfloat16)
    tokens, columns = out.shape
    if not rows.is_contiguous() or rows.shape[1] != columns or out.stride(1) != 1:
        raise ParityError(
            f"{op}: rows [R, H] must be contiguous and out [M, H] have contiguous rows, got "
            f"{list(rows.shape)} with strides {rows.stride()} and {list(out.shape)} with strides "
            f"{out.stride()}."
        )
    if tokens == 0:
        return
    k = place.numel() // tokens
    if k * tokens != place.numel() or not k:
        raise ParityError(f"{op}: {place.numel()} places are not k for each of {tokens} tokens.")
    check_laid(op, "place", place, rows, torch.int32, tuple(place.shape))
    if weights is not None:
        check_laid(op, "weights", weights, rows, torch.float32, (tokens, k))
    block = min(1024, 1 << (columns - 1).bit_length())
    dispatch(
        prefix_kernels.prefix_combine_kernel, (tokens, -(-columns // block)),
        rows, rows if weights is None else weights, place, out, out.stride(0),
        TOPK=k, COLUMNS=columns, BLOCK=block, WEIGHTED=weights is not None, num_warps=4,
    )  # fmt: skip


# --- the layer ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """The memory between a layer's input and its output; what is not live in it is never read."""

    rows: PrefixRows
    fc1: Tensor
    """bf16 [R, 2 * I]."""
    mid_codes: Tensor
    """uint8 [R, I]."""
    mid_scales: Tensor
    """fp32 [R, I / 128], column-major."""
    fc2: Tensor
    """bf16 [R, H]."""

    @staticmethod
    def empty(pairs: int, experts: Experts, *, alignment: int = ALIGNMENT) -> Workspace:
        """Return memory for any routing of so many pairs to these experts."""
        count, double, hidden = experts.w13.shape
        device = experts.w13.device
        rows = PrefixRows.empty(pairs, count, hidden, alignment=alignment, device=device)
        height = rows.codes.shape[0]
        shape, strides, dtype = scale_memory(height, double // 2, permute.Scales.TMA)
        return Workspace(
            rows=rows,
            fc1=torch.empty((height, double), dtype=torch.bfloat16, device=device),
            mid_codes=torch.empty((height, double // 2), dtype=torch.uint8, device=device),
            mid_scales=torch.empty_strided(shape, strides, dtype=dtype, device=device),
            fc2=torch.empty((height, hidden), dtype=torch.bfloat16, device=device),
        )


@dataclass(frozen=True, kw_only=True)
class PlacedTrace(Trace):
    """What every stage left behind, the rows of pairs where ``place`` says."""

    place: Tensor
    """int32 [P]: the row of each pair, -1 where this rank does not own it."""


def run(
    codes: Tensor,
    scales: Tensor,
    ids: Tensor,
    weights: Tensor | None,
    experts: Experts,
    how: Activation,
    out: Tensor,
    *,
    scale: ScaleFormat = ScaleFormat.FP32,
    alignment: int = ALIGNMENT,
    gemm: Gemm = Gemm.OURS,
    workspace: Workspace | None = None,
) -> PlacedTrace:
    """Run the layer on quantized rows: permute, FC1, SwiGLU with quantization, FC2, top-k sum.

    ``codes`` [M, H] and ``scales`` [M, H / 128] are quantized already; ``scale`` is the format of
    the second quantization, without packing.  ``workspace`` is memory of the caller's, of the same
    pairs, experts and alignment (:meth:`Workspace.empty`).  ``out`` [M, H] gets the sums.
    """
    made = workspace or Workspace.empty(ids.numel(), experts, alignment=alignment)
    first, count = experts.first, experts.count
    rows = permute.permute(codes, scales, ids, first, count, alignment=alignment, out=made.rows)
    block = min(16 if ids.shape[0] <= FEW_TOKENS else 64, alignment)
    multiply = _deepgemm(alignment) if gemm is Gemm.DEEPGEMM else _ours(alignment, block)
    multiply(
        rows.codes, rows.scales, experts.w13, experts.w13_scale, rows.ends, experts.bias13, made.fc1
    )
    mid, mid_scales = prefix_swiglu_quant(
        made.fc1, rows.ends, how, alignment=alignment, scale=scale, codes=made.mid_codes,
        scales=made.mid_scales,
    )  # fmt: skip
    multiply(mid, mid_scales, experts.w2, experts.w2_scale, rows.ends, experts.bias2, made.fc2)
    prefix_combine(made.fc2, rows.place, weights, out)
    return PlacedTrace(
        act_codes=codes, act_scales=scales, fc1=made.fc1, mid_codes=mid, mid_scales=mid_scales,
        fc2=made.fc2, out=out, place=rows.place,
    )  # fmt: skip


def in_pair_order(ran: PlacedTrace) -> Trace:
    """Return a trace with rows in pair order; those of nobody's pairs are zeros.  Never waits."""

    def taken(rows: Tensor) -> Tensor:
        # A place may hold anything where launches are recorded and not run.
        live = (ran.place >= 0) & (ran.place < rows.shape[0])
        found = rows[ran.place.where(live, 0).long()]
        return found.where(live[:, None], torch.zeros_like(found))

    return Trace(
        act_codes=ran.act_codes, act_scales=ran.act_scales, fc1=taken(ran.fc1),
        mid_codes=taken(ran.mid_codes), mid_scales=taken(ran.mid_scales), fc2=taken(ran.fc2),
        out=ran.out,
    )  # fmt: skip


Multiply = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, "Tensor | None", Tensor], Any]


def _ours(alignment: int, block: int) -> Multiply:
    def multiply(
        a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, ends: Tensor,
        bias: Tensor | None, out: Tensor,
    ) -> None:  # fmt: skip
        prefix_gemm(
            a, a_scale, w, w_scale, ends, alignment=alignment, bias=bias, out=out, block=block
        )

    return multiply


def _deepgemm(alignment: int) -> Multiply:
    """Return the installed DeepGEMM's GEMM; raises ParityError where it cannot run."""
    # Vendors are no part of this package: they are looked for where one is asked for.
    from moe_parity.kernels.vendors.deepgemm import api

    missing = api.unavailable()
    if missing is not None:
        raise ParityError(f"run_moe: gemm='deepgemm' cannot run here: {missing}")

    def multiply(
        a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, ends: Tensor,
        bias: Tensor | None, out: Tensor,
    ) -> None:  # fmt: skip
        if bias is not None:
            raise ParityError("run_moe: DeepGEMM's grouped GEMM has no bias; take gemm='ours'.")
        if out.numel():
            api.grouped(a, a_scale, w, w_scale, out, ends, psum=True, align=alignment)

    return multiply


# --- what fits ------------------------------------------------------------------------------------


def _lanes(experts: int) -> int:
    """Return the power of two that holds one lane for each expert."""
    return max(16, 1 << (experts - 1).bit_length())


def _check_rows(op: str, rows: Tensor, dtype: torch.dtype) -> None:
    if rows.dim() != 2 or rows.dtype is not dtype or (rows.shape[1] > 1 and rows.stride(1) != 1):
        raise ParityError(
            f"{op}: rows must be {dtype} [R, columns], each contiguous, got {rows.dtype} "
            f"{list(rows.shape)} with strides {rows.stride()}."
        )


def _check_height(op: str, rows: int, alignment: int) -> None:
    if rows % check_alignment(alignment):
        raise ParityError(
            f"{op}: R = {rows} must be a multiple of the alignment, {alignment}: the last expert's "
            "room is part of the buffer."
        )
