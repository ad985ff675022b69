"""The stages of the layer as functions of tensors: align, FC1, SwiGLU with quantization, FC2, sum.

Each launches its kernel on the real or the virtual GPU.  Only metadata is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, kw_only=True)
class Activation:
    """What is asked of SwiGLU: ``clamp`` is none, before or after SiLU."""

    clamp: str = "none"
    limit: float = 0.0
    limits: Tensor | None = None
    """fp32 [E]: a limit for each expert, in place of ``limit``."""
    alpha: float = 1.0
    beta: float = 0.0

    @property
    def constants(self) -> dict[str, Any]:
        """What is compiled in."""
        return {
            "CLAMP": self.clamp,
            "SCALED": self.alpha != 1.0,
            "SHIFTED": self.beta != 0.0,
            "LIMITS": self.limits is not None,
        }


def swiglu(
    rows: Tensor, ids: Tensor, first: int, experts: int, how: Activation, out: Tensor | None = None
) -> Tensor:
    """Return bf16 [P, I] of bf16 rows [P, 2 * I], contiguous; foreign rows are not written."""
    pairs, width = rows.shape[0], _width("swiglu", rows)
    demand_contiguous(ids, "swiglu's ids")
    if out is None:
        out = torch.empty((pairs, width), dtype=torch.bfloat16, device=rows.device)
    if pairs:
        tile = min(16, 1 << (pairs - 1).bit_length())
        dispatch(
            layer_kernels.swiglu_kernel, (-(-pairs // tile), -(-width // 128)),
            rows, out, ids, out if how.limits is None else how.limits,
            pairs, first, experts, how.limit, how.alpha, how.beta,
            WIDTH=width, ROWS=tile, num_warps=4, **how.constants,
        )  # fmt: skip
    return out


def swiglu_quant(
    rows: Tensor,
    ids: Tensor,
    first: int,
    experts: int,
    how: Activation,
    power_of_two: bool,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return codes uint8 [P, I] and fp32 scales [P, I / 128] of bf16 rows [P, 2 * I], contiguous.

    Foreign rows are not written.  ``codes`` and ``scales`` are memory of the caller's, row-major.
    """
    pairs, width = rows.shape[0], _width("swiglu_quant", rows)
    demand_contiguous(ids, "swiglu_quant's ids")
    if codes is None:
        codes = torch.empty((pairs, width), dtype=torch.uint8, device=rows.device)
    if scales is None:
        scales = torch.empty((pairs, width // 128), dtype=torch.float32, device=rows.device)
    if pairs:
        tile = min(16, 1 << (pairs - 1).bit_length())
        dispatch(
            layer_kernels.swiglu_quant_kernel, (-(-pairs // tile), width // 128),
            rows, codes, scales, ids, scales if how.limits is None else how.limits,
            pairs, first, experts, how.limit, how.alpha, how.beta,
            WIDTH=width, ROWS=tile, POWER_OF_TWO=power_of_two, num_warps=4, **how.constants,
        )  # fmt: skip
    return codes, scales


def _width(step: str, rows: Tensor) -> int:
    if not rows.is_contiguous():
        raise ParityError(f"{step}: rows must be contiguous, strides {rows.stride()}.")
    return rows.shape[1] // 2


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
