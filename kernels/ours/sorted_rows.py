"""The down projection on sorted rows: its activations lie in the order of the aligned slots.

Contiguous rows are what a tensor descriptor loads (TMA), in place of a pointer for each row.  The
bits are those of the route-major layout (``activation``, ``steps``): rows have moved, and nothing
else.  Each launches its kernel on the real or the virtual GPU.  Only metadata is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_parity.kernels.call import demand_contiguous
from moe_parity.kernels.ours import sorted_kernels
from moe_parity.kernels.ours.activation import Activation
from moe_parity.kernels.ours.steps import Alignment
from moe_parity.kernels.virtual_gpu import dispatch
from moe_parity.references.errors import ParityError

ROWS = 16
"""Slots that one program fills; every block is a multiple of it."""


@dataclass(frozen=True, kw_only=True)
class SortedRows:
    """Quantized rows in the order of an alignment's slots.

    A slot without a pair has codes 0 and scales 1; blocks that are not used hold anything.
    """

    codes: Tensor
    """uint8 [blocks * block, K]."""
    scales: Tensor
    """fp32 [blocks, K / 128, block]: those of a tile of the GEMM lie side by side."""

    @staticmethod
    def empty(aligned: Alignment, width: int) -> SortedRows:
        """Return memory for rows of ``width`` columns, a multiple of 128."""
        if width % 128 or not width:
            raise ParityError(f"sorted rows: K = {width} must be a positive multiple of 128.")
        blocks, block = aligned.block_expert.numel(), aligned.block
        device = aligned.slots.device
        return SortedRows(
            codes=torch.empty((blocks * block, width), dtype=torch.uint8, device=device),
            scales=torch.empty((blocks, width // 128, block), dtype=torch.float32, device=device),
        )


def swiglu_quant_sorted(
    rows: Tensor, aligned: Alignment, how: Activation, power_of_two: bool
) -> SortedRows:
    """Return SwiGLU of bf16 rows [P, 2 * I], contiguous and in pair order, quantized and sorted."""
    demand_contiguous(rows, "swiglu_quant_sorted's rows")
    pairs, width = rows.shape[0], rows.shape[1] // 2
    made = SortedRows.empty(aligned, width)
    if aligned.block_expert.numel():
        dispatch(
            sorted_kernels.swiglu_quant_sorted_kernel,
            (made.codes.shape[0] // ROWS, width // 128),
            rows, made.codes, made.scales, aligned.slots, aligned.block_expert,
            made.scales if how.limits is None else how.limits,
            pairs, how.limit, how.alpha, how.beta,
            WIDTH=width, BLOCK=aligned.block, ROWS=ROWS, POWER_OF_TWO=power_of_two, num_warps=4,
            **how.constants,
        )  # fmt: skip
    return made


def sort_rows(a: Tensor, a_scale: Tensor, aligned: Alignment) -> SortedRows:
    """Return rows that are quantized already, in slot order.

    ``a`` uint8 [P, K] in rows of any pitch, ``a_scale`` fp32 [P, K / 128] of any strides.
    """
    if a.stride(1) != 1:
        raise ParityError(f"sort_rows: rows of a must be contiguous, strides {a.stride()}.")
    pairs, width = a.shape
    made = SortedRows.empty(aligned, width)
    if aligned.block_expert.numel():
        dispatch(
            sorted_kernels.sort_kernel, (made.codes.shape[0] // ROWS, width // 128),
            a, a_scale, made.codes, made.scales, aligned.slots, aligned.block_expert, pairs,
            a.stride(0), *a_scale.stride(),
            WIDTH=width, BLOCK=aligned.block, ROWS=ROWS, num_warps=4,
        )  # fmt: skip
    return made


def sorted_gemm(
    rows: SortedRows,
    w: Tensor,
    w_scale: Tensor,
    aligned: Alignment,
    pairs: int,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return bf16 [pairs, N] in pair order: each sorted row times its expert's weight.

    ``w`` uint8 [E, N, K] with rows contiguous, ``w_scale`` fp32 [E, ceil(N / 128), K / 128] of any
    strides.  Rows of pairs that are in no block are not written.
    """
    _, n, k = w.shape
    if w.stride(-1) != 1:
        raise ParityError(f"sorted_gemm: rows of w must be contiguous, strides {w.stride()}.")
    if bias is not None:
        demand_contiguous(bias, "sorted_gemm's bias")
    if out is None:
        out = torch.empty((pairs, n), dtype=torch.bfloat16, device=w.device)
    elif not out.is_contiguous():
        raise ParityError(f"sorted_gemm: out must be contiguous, strides {out.stride()}.")
    tile = 64 if aligned.block <= 32 else 128
    if aligned.block_expert.numel() == 0:
        return out
    dispatch(
        sorted_kernels.sorted_gemm_kernel, (aligned.block_expert.numel(), -(-n // tile)),
        TensorDescriptor.from_tensor(rows.codes, [aligned.block, 128]), rows.scales,
        w, w_scale, w_scale if bias is None else bias, out,
        aligned.slots, aligned.block_expert, pairs, *w.stride()[:2], *w_scale.stride(),
        N=n, K=k, HAS_BIAS=bias is not None,
        BLOCK_N=tile, BLOCK=aligned.block, num_warps=4, num_stages=4 if tile == 64 else 3,
    )  # fmt: skip
    return out


def in_pair_order(
    codes: Tensor, scales: Tensor, aligned: Alignment, pairs: int
) -> tuple[Tensor, Tensor]:
    """Return codes [pairs, K] and scales [pairs, K / 128] of sorted rows, for what compares them.

    Rows of pairs that are in no block are zeros.  Waits for nothing.
    """
    slots = aligned.slots.view(-1, aligned.block)
    live = (aligned.block_expert >= 0)[:, None] & (slots >= 0) & (slots < pairs)
    # Blocks that are not used hold anything, as all do where launches are recorded and not run:
    # what is no pair goes to one row more.
    slots = slots.where(live, pairs).flatten().long()
    by_row = scales.transpose(1, 2).reshape(slots.numel(), scales.shape[1])
    kept = codes.new_zeros((pairs + 1, codes.shape[1]))
    kept_scales = scales.new_zeros((pairs + 1, by_row.shape[1]))
    return (
        kept.index_copy_(0, slots, codes)[:pairs],
        kept_scales.index_copy_(0, slots, by_row)[:pairs],
    )
