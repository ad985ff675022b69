"""The stages of the layer as functions of tensors: align, the GEMMs, the top-k sum.

Each launches its kernel on the real or the virtual GPU.  Only metadata is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_parity.kernels.call import demand_contiguous
from moe_parity.kernels.ours import align_kernels, layer_kernels
from moe_parity.kernels.virtual_gpu import dispatch
from moe_parity.references.errors import ParityError

SMALL_PAIRS = 128
"""Pairs up to which one program aligns."""


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """Pairs sorted into blocks of one expert each."""

    slots: Tensor
    """int32 [blocks * block]: pair numbers; the number of pairs where a slot is empty."""
    block_expert: Tensor
    """int32 [blocks]: local expert, -1 for a block that is not used."""
    block: int
    """Tokens of a block."""


def block_bound(pairs: int, experts: int, block: int) -> int:
    """Return the most blocks that ``pairs`` pairs can occupy: one an expert hit, and full ones."""
    hit = min(pairs, experts)
    return hit + (pairs - hit) // block


def align(
    ids: Tensor, first: int, experts: int, block: int, *,
    slots: Tensor | None = None, block_expert: Tensor | None = None, most: int = SMALL_PAIRS,
) -> Alignment:  # fmt: skip
    """Sort the pairs of ``ids`` [M, k] (int32 or int64, contiguous) of experts first .. first + E.

    Up to ``most`` pairs take one program, more take three launches; any number of experts.
    ``slots`` and ``block_expert`` are memory of the caller's, as large as ``block_bound`` says.
    """
    if ids.dtype not in (torch.int32, torch.int64) or not ids.is_contiguous():
        raise ParityError(
            f"align: ids must be contiguous int32 or int64, got {ids.dtype} {ids.stride()}."
        )
    pairs = ids.numel()
    blocks = block_bound(pairs, experts, block)
    if slots is None:
        slots = torch.empty(blocks * block, dtype=torch.int32, device=ids.device)
    if block_expert is None:
        block_expert = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    if pairs == 0:
        return Alignment(slots=slots, block_expert=block_expert, block=block)
    if pairs <= most:
        dispatch(
            align_kernels.align_small_kernel, (1,),
            ids, slots, block_expert, pairs, first, experts, blocks,
            PAIRS=max(16, 1 << (pairs - 1).bit_length()), BLOCK=block, num_warps=4,
        )  # fmt: skip
    else:
        counts = torch.empty(experts, dtype=torch.int32, device=ids.device)
        starts = torch.empty_like(counts)
        dispatch(
            align_kernels.count_kernel, (experts,), ids, counts, pairs, first, experts,
            TILE=512, num_warps=4,
        )  # fmt: skip
        dispatch(
            align_kernels.prefix_kernel, (1,), counts, starts, block_expert, experts, blocks,
            BLOCK=block, TILE=512, num_warps=4,
        )  # fmt: skip
        dispatch(
            align_kernels.place_kernel, (experts,),
            ids, counts, starts, slots, block_expert, pairs, first, experts,
            BLOCK=block, TILE=512, num_warps=4,
        )  # fmt: skip
    return Alignment(slots=slots, block_expert=block_expert, block=block)


def grouped_gemm(
    a: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    aligned: Alignment,
    pairs: int,
    shared: int,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return bf16 [pairs, N]: each pair's row of ``a`` times its expert's weight.

    ``a`` uint8 [rows, K] with fp32 scales [rows, K / 128], ``w`` uint8 [E, N, K] with
    [E, ceil(N / 128), K / 128]; scales have any strides, rows of codes any pitch.  Pair p reads row
    p // shared.  Rows of pairs that are in no block are not written.
    """
    _, n, k = w.shape
    for name, codes in (("a", a), ("w", w)):
        if codes.stride(-1) != 1:
            raise ParityError(
                f"grouped_gemm: rows of {name} must be contiguous, strides {codes.stride()}."
            )
    if bias is not None:
        demand_contiguous(bias, "grouped_gemm's bias")
    if out is None:
        out = torch.empty((pairs, n), dtype=torch.bfloat16, device=a.device)
    elif not out.is_contiguous():
        raise ParityError(f"grouped_gemm: out must be contiguous, strides {out.stride()}.")
    tile = 64 if aligned.block <= 32 else 128
    if aligned.block_expert.numel() == 0:
        return out
    dispatch(
        layer_kernels.gemm_kernel, (aligned.block_expert.numel(), -(-n // tile)),
        w, w_scale, a, a_scale, w_scale if bias is None else bias, out,
        aligned.slots, aligned.block_expert, pairs,
        a.stride(0), *a_scale.stride(), *w.stride()[:2], *w_scale.stride(),
        N=n, K=k, SHARED=shared, HAS_BIAS=bias is not None,
        BLOCK_N=tile, BLOCK=aligned.block, num_warps=4, num_stages=4 if tile == 64 else 3,
    )  # fmt: skip
    return out


def combine(
    rows: Tensor, weights: Tensor | None, ids: Tensor, first: int, experts: int, out: Tensor
) -> None:
    """Sum bf16 rows [M * k, H] or [M, k, H] into ``out`` [M, H], bf16, fp16 or fp32.

    Weights None are ones.
    """
    tokens, k = ids.shape
    columns = out.shape[1]
    for name, tensor in (("rows", rows), ("weights", weights), ("ids", ids)):
        if tensor is not None and not tensor.is_contiguous():
            raise ParityError(f"combine: {name} must be contiguous, strides {tensor.stride()}.")
    if tokens == 0:
        return
    block = min(1024, 1 << (columns - 1).bit_length())
    dispatch(
        layer_kernels.combine_kernel, (tokens, -(-columns // block)),
        rows, rows if weights is None else weights, ids, out, out.stride(0), first, experts,
        TOPK=k, COLUMNS=columns, BLOCK=block, WEIGHTED=weights is not None, num_warps=4,
    )  # fmt: skip
