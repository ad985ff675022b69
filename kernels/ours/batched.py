"""Batched experts: rows [E, T, ...] whose counts lie on the GPU, quantized and multiplied there.

Expert e owns its first ``counts[e]`` rows; what lies past them is neither read nor written, in no
input and no output, so memory that a call makes itself holds anything there.  Only metadata is
looked at: a call never waits for the GPU and may be captured in a CUDA graph, and each replay takes
the counts as they are by then.  A count outside 0 .. T is refused where values may be looked at
(:func:`check_counts`); the kernels take it as 0 or T and touch nothing outside the expert's rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_parity.kernels.ours import batched_kernels, scale_format
from moe_parity.kernels.ours.activation import Activation
from moe_parity.kernels.ours.arguments import (
    check_experts,
    check_laid,
    check_like,
    has_own_elements,
    number,
    word,
)
from moe_parity.kernels.ours.quant import GROUPS, INPUTS
from moe_parity.kernels.ours.scale_format import LayerFormats
from moe_parity.kernels.virtual_gpu import dispatch
from moe_parity.references.arithmetic.formats import BLOCK, ScaleFormat, ScaleLayout
from moe_parity.references.errors import ParityError
from moe_parity.references.stages.layer.operands import Experts

PROGRAMS = 4 * 132
"""The most programs of a quantization: four for each multiprocessor of an H200."""

ROWS = 16
"""Rows of a tile of a quantization."""

FEW_TOKENS = 32
"""Room of an expert up to which the GEMM works in blocks of 16 rows; past it they are of 64."""


def batched_act_quant(
    x: Tensor,
    counts: Tensor,
    *,
    scale: ScaleFormat | str = ScaleFormat.FP32,
    group: int = 128,
    layout: ScaleLayout | str = ScaleLayout.ROW,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
    programs: int = PROGRAMS,
) -> tuple[Tensor, Tensor]:
    """Quantize the live rows of ``x`` [E, T, K], bf16, fp16 or fp32, contiguous.

    Returns, and takes as memory of the caller's, what :func:`batched_swiglu_quant` does.
    """
    _check_rows("batched_act_quant", x, INPUTS)
    asked = _Quantized(
        op="batched_act_quant", rows=x, counts=counts, width=x.shape[2], group=group,
        scale=word(ScaleFormat, scale, "batched_act_quant: scale"), programs=programs,
        layout=word(ScaleLayout, layout, "batched_act_quant: layout"),
    )  # fmt: skip
    return asked.run(None, codes, scales)


def batched_swiglu_quant(
    rows: Tensor,
    counts: Tensor,
    how: Activation,
    *,
    scale: ScaleFormat | str = ScaleFormat.FP32,
    group: int = 128,
    layout: ScaleLayout | str = ScaleLayout.ROW,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
    programs: int = PROGRAMS,
) -> tuple[Tensor, Tensor]:
    """Quantize SwiGLU of the live rows of bf16 ``rows`` [E, T, 2 * I], contiguous, the gate first.

    ``counts`` int32 [E] are the live rows of each expert, on the device; ``how.limits`` has a limit
    for each.  Returns E4M3 codes uint8 [E, T, I] and fp32 scales [E, T, I / group], an expert's
    [T, I / group] in the layout, experts one after the other: ``row`` has strides (T * G, G, 1),
    ``col`` (T * G, 1, T), ``tma`` has T rounded up to 4.  ``ue8m0packed`` has int32 words
    [E, T, ceil(G / 4)] in the TMA layout; bytes of groups that do not exist are 0.

    ``codes`` and ``scales`` are memory of the caller's: codes contiguous, scales with any strides.
    ``programs`` is the most that are launched.  Raises ParityError, in a sentence, for bad input.
    """
    _check_rows("batched_swiglu_quant", rows, (torch.bfloat16,))
    if rows.shape[2] % 2:
        raise ParityError(
            f"batched_swiglu_quant: rows must be [E, T, 2 I], got {list(rows.shape)}."
        )
    if how.limits is not None:
        check_laid(
            "batched_swiglu_quant", "limits", how.limits, rows, torch.float32, rows.shape[:1]
        )
    asked = _Quantized(
        op="batched_swiglu_quant", rows=rows, counts=counts, width=rows.shape[2] // 2, group=group,
        scale=word(ScaleFormat, scale, "batched_swiglu_quant: scale"), programs=programs,
        layout=word(ScaleLayout, layout, "batched_swiglu_quant: layout"),
    )  # fmt: skip
    return asked.run(how, codes, scales)


def batched_gemm(
    a: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    counts: Tensor,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    block: int | None = None,
) -> Tensor:
    """Return bf16 [E, T, N]: the live rows of each expert times its weight.

    ``a`` uint8 [E, T, K] contiguous with fp32 scales [E, T, K / 128], ``w`` uint8 [E, N, K] with
    [E, ceil(N / 128), K / 128], rows of w contiguous; all scales have any strides.  ``bias`` is
    fp32 [E, N].  ``out`` is memory of the caller's, contiguous.  ``block`` rows of a tile, 16, 32,
    64 or 128, change no bit; left out, the room T decides.  Raises ParityError for bad input.
    """
    op = "batched_gemm"
    _check_rows(op, a, (torch.uint8,))
    experts, tokens, k = a.shape
    if w.dim() != 3 or w.dtype is not torch.uint8 or w.shape[::2] != (experts, k):
        raise ParityError(
            f"{op}: w must be uint8 [{experts}, N, {k}], got {w.dtype} {list(w.shape)}."
        )
    if k % BLOCK or not k:
        raise ParityError(f"{op}: K = {k} must be a positive multiple of {BLOCK}.")
    if w.stride(2) != 1:
        raise ParityError(f"{op}: rows of w must be contiguous, strides {w.stride()}.")
    n = w.shape[1]
    check_like(op, "a_scale", a_scale, a, torch.float32, (experts, tokens, k // BLOCK))
    check_like(op, "w_scale", w_scale, a, torch.float32, (experts, -(-n // BLOCK), k // BLOCK))
    check_like(op, "w", w, a, torch.uint8, (experts, n, k))
    check_laid(op, "counts", counts, a, torch.int32, (experts,))
    if bias is not None:
        check_laid(op, "bias", bias, a, torch.float32, (experts, n))
    if out is None:
        out = torch.empty((experts, tokens, n), dtype=torch.bfloat16, device=a.device)
    check_laid(op, "out", out, a, torch.bfloat16, (experts, tokens, n))
    block = block or (16 if tokens <= FEW_TOKENS else 64)
    if block not in (16, 32, 64, 128):
        raise ParityError(f"{op}: a block has 16, 32, 64 or 128 rows, not {block}.")
    if out.numel() == 0:
        return out
    tile, tiles = 64 if block <= 32 else 128, -(-tokens // block)
    dispatch(
        batched_kernels.batched_gemm_kernel, (experts * tiles, -(-n // tile)),
        w, w_scale, a, a_scale, w_scale if bias is None else bias, out, counts, tokens, tiles,
        *a_scale.stride(), *w.stride()[:2], *w_scale.stride(),
        N=n, K=k, HAS_BIAS=bias is not None,
        BLOCK_N=tile, BLOCK=block, num_warps=4, num_stages=4 if tile == 64 else 3,
    )  # fmt: skip
    return out


def run_batched(
    x: Tensor,
    counts: Tensor,
    experts: Experts,
    *,
    x_scale: Tensor | None = None,
    limit: float | Tensor | None = None,
    clamp: str = "before",
    alpha: float = 1.0,
    beta: float = 0.0,
    formats: LayerFormats | None = None,
    power_of_two: bool | None = None,
    mid_power_of_two: bool | None = None,
    out: Tensor | None = None,
    validate: bool = False,
) -> Tensor:
    """Return bf16 [E, T, H]: the experts' rows through both GEMMs, without routing and sum.

    ``x`` [E, T, H] is bf16, contiguous, or uint8 codes with ``x_scale`` fp32 [E, T, H / 128] of any
    strides; ``counts`` int32 [E] lie on the device.  A live row has the bits that ``run_moe`` gives
    a pair of that expert before the sum.  The other arguments are those of ``run_moe``; biases are
    the experts' own.  ``validate`` looks at the counts and waits for the GPU; nothing else does.
    Raises ParityError, in a sentence, for bad input.
    """
    op = "run_batched"
    check_experts(experts)
    if (x.dtype is torch.uint8) is not (x_scale is not None):
        raise ParityError(f"{op}: x must be bfloat16, or uint8 codes with x_scale, got {x.dtype}.")
    _check_rows(op, x, (torch.bfloat16, torch.uint8))
    wanted = (experts.count, x.shape[1], experts.w13.shape[2])
    if tuple(x.shape) != wanted or x.device != experts.w13.device:
        raise ParityError(
            f"{op}: x must be [E, T, H] = {list(wanted)} on {experts.w13.device}, got "
            f"{list(x.shape)} on {x.device}."
        )
    if clamp not in ("before", "after"):
        raise ParityError(f"{op}: clamp must be 'before' or 'after' SiLU, got {clamp!r}.")
    if not isinstance(limit, Tensor | None) and not number(limit, f"{op}: limit") > 0:
        raise ParityError(f"{op}: limit must be positive, got {limit}.")
    check_laid(op, "counts", counts, x, torch.int32, (experts.count,))
    if validate:
        check_counts(counts, x.shape[1])
    each = limit if isinstance(limit, Tensor) else None
    how = Activation(
        clamp="none" if limit is None else clamp,
        limit=0.0 if limit is None or each is not None else float(limit), limits=each,
        alpha=number(alpha, f"{op}: alpha"), beta=number(beta, f"{op}: beta"),
    )  # fmt: skip
    held = scale_format.asked(formats, power_of_two, mid_power_of_two)
    if x_scale is None:
        x, x_scale = batched_act_quant(x, counts, scale=held.act)
    rows = batched_gemm(x, x_scale, experts.w13, experts.w13_scale, counts, bias=experts.bias13)
    codes, scales = batched_swiglu_quant(rows, counts, how, scale=held.mid)
    return batched_gemm(
        codes, scales, experts.w2, experts.w2_scale, counts, bias=experts.bias2, out=out
    )


def scale_memory(
    experts: int, tokens: int, groups: int, scale: ScaleFormat, layout: ScaleLayout
) -> tuple[tuple[int, int, int], tuple[int, int, int], torch.dtype]:
    """Return shape, strides and dtype of scales [E, T, groups], an expert's after the other's."""
    (_, across), (down, right), dtype = scale.stored(tokens, groups, layout)
    apart = max(down * tokens, right * across)
    return (experts, tokens, across), (apart, down, right), dtype


def check_counts(counts: Tensor, tokens: int) -> None:
    """Raise ParityError, naming the first offender, unless all counts are 0 .. ``tokens``.

    Looks at every value, so it waits for the GPU.
    """
    bad = ((counts < 0) | (counts > tokens)).nonzero()
    if bad.numel():
        expert = int(bad[0, 0])
        raise ParityError(
            f"counts[{expert}] is {int(counts[expert])}, and an expert has room for {tokens} rows; "
            "make T as large as the largest count."
        )


@dataclass(frozen=True, kw_only=True)
class _Quantized:
    """A quantization that was asked for."""

    op: str
    rows: Tensor
    counts: Tensor
    width: int
    """Columns that are quantized."""
    group: int
    scale: ScaleFormat
    layout: ScaleLayout
    programs: int

    def run(
        self, how: Activation | None, codes: Tensor | None, scales: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Launch, with SwiGLU unless ``how`` is None; return codes and scales."""
        op, rows, (experts, tokens) = self.op, self.rows, self.rows.shape[:2]
        if self.group not in GROUPS:
            raise ParityError(f"{op}: group must be 64 or 128, got {self.group}.")
        if self.width % self.group or not self.width:
            raise ParityError(
                f"{op}: {self.width} columns are no positive multiple of group {self.group}."
            )
        if self.programs < 1:
            raise ParityError(f"{op}: programs must be at least 1, got {self.programs}.")
        check_laid(op, "counts", self.counts, rows, torch.int32, (experts,))
        shape, strides, dtype = scale_memory(
            experts, tokens, self.width // self.group, self.scale, self.layout
        )
        if codes is None:
            codes = torch.empty(
                (experts, tokens, self.width), dtype=torch.uint8, device=rows.device
            )
        check_laid(op, "codes", codes, rows, torch.uint8, (experts, tokens, self.width))
        if scales is None:
            scales = torch.empty_strided(shape, strides, dtype=dtype, device=rows.device)
        check_like(op, "scales", scales, rows, dtype, shape)
        if not has_own_elements(scales):
            raise ParityError(
                f"{op}: elements of scales overlap, strides {scales.stride()}; give each its own "
                "memory."
            )
        if rows.numel() == 0:
            return codes, scales
        own = how or Activation()
        dispatch(
            batched_kernels.batched_quant_kernel,
            (min(self.programs, experts * -(-tokens // ROWS) * shape[2]),),
            rows, codes, scales, self.counts, scales if own.limits is None else own.limits,
            experts, tokens, own.limit, own.alpha, own.beta, *scales.stride(),
            WIDTH=self.width, G=self.group, ROWS=ROWS,
            EXPERTS=max(16, 1 << (experts - 1).bit_length()), GATED=how is not None,
            PACKED=self.scale.is_packed, POWER_OF_TWO=self.scale.is_power_of_two, num_warps=4,
            **own.constants,
        )  # fmt: skip
        return codes, scales


def _check_rows(op: str, rows: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if rows.dim() != 3 or rows.dtype not in dtypes or not rows.is_contiguous():
        names = ", ".join(str(dtype) for dtype in dtypes)
        raise ParityError(
            f"{op}: rows of batched experts must be contiguous [E, T, columns] of {names}, got "
            f"{rows.dtype} {list(rows.shape)} with strides {rows.stride()}."
        )
