"""The grouped GEMM as an op."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_parity.kernels.ours import steps
from moe_parity.kernels.ours.ops import checks
from moe_parity.references.arithmetic.formats import BLOCK
from moe_parity.references.errors import ParityError


@torch.library.custom_op("moe_parity::grouped_gemm", mutates_args=())
def grouped_gemm(
    a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, slots: Tensor, block_expert: Tensor,
    block: int, pairs: int, shared: int, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return bf16 [pairs, N]; rows of pairs in no block are not written.

    ``slots`` and ``block_expert`` are what ``align`` made for blocks of ``block`` tokens.  See
    ``steps.grouped_gemm``.
    """
    _check(a, a_scale, w, w_scale, slots, block_expert, block, pairs, shared, bias)
    aligned = steps.Alignment(slots=slots, block_expert=block_expert, block=block)
    return steps.grouped_gemm(a, a_scale, w, w_scale, aligned, pairs, shared, bias)


@torch.library.custom_op("moe_parity::grouped_gemm_out", mutates_args=("out",))
def grouped_gemm_out(
    a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, slots: Tensor, block_expert: Tensor,
    block: int, pairs: int, shared: int, bias: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    """Write bf16 [pairs, N] into ``out``, contiguous.  See :func:`grouped_gemm`."""
    _check_out(a, a_scale, w, w_scale, slots, block_expert, block, pairs, shared, bias, out)
    inputs = {
        "a": a, "a_scale": a_scale, "w": w, "w_scale": w_scale, "slots": slots,
        "block_expert": block_expert, "bias": bias,
    }  # fmt: skip
    checks.demand_apart("grouped_gemm", {"out": out}, inputs)
    aligned = steps.Alignment(slots=slots, block_expert=block_expert, block=block)
    steps.grouped_gemm(a, a_scale, w, w_scale, aligned, pairs, shared, bias, out)


def _check(
    a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, slots: Tensor, block_expert: Tensor,
    block: int, pairs: int, shared: int, bias: Tensor | None,
) -> int:  # fmt: skip
    """Return N."""
    op = "grouped_gemm"
    checks.demand_rank(op, "a", a, "[rows, K]")
    checks.demand_rank(op, "w", w, "[E, N, K]")
    experts, n, k = w.shape
    if shared < 1 or block not in BLOCKS:
        raise ParityError(
            f"{op}: shared must be positive and block one of {', '.join(map(str, BLOCKS))}, got "
            f"{shared} and {block}."
        )
    if k % BLOCK:
        raise ParityError(f"{op}: K = {k} is not a multiple of {BLOCK}.")
    rows = -(-pairs // shared)
    if pairs < 0 or a.shape[0] < rows:
        raise ParityError(f"{op}: {pairs} pairs read {rows} rows of a, got {a.shape[0]}.")
    checks.demand(op, "a", a, (a.shape[0], k), torch.uint8)
    checks.demand(op, "a_scale", a_scale, (a.shape[0], k // BLOCK), torch.float32)
    checks.demand(op, "w", w, (experts, n, k), torch.uint8)
    tiles = (experts, -(-n // BLOCK), k // BLOCK)
    checks.demand(op, "w_scale", w_scale, tiles, torch.float32)
    checks.demand_rank(op, "block_expert", block_expert, "[blocks]")
    blocks = block_expert.shape[0]
    checks.demand(op, "block_expert", block_expert, (blocks,), torch.int32)
    checks.demand(op, "slots", slots, (blocks * block,), torch.int32)
    if bias is not None:
        checks.demand(op, "bias", bias, (experts, n), torch.float32)
    checks.demand_rows(op, a=a, w=w)
    checks.demand_row_major(op, slots=slots, block_expert=block_expert, bias=bias)
    checks.demand_device(
        op, "w", w.device, a=a, a_scale=a_scale, w_scale=w_scale, slots=slots,
        block_expert=block_expert, bias=bias,
    )  # fmt: skip
    return n


BLOCKS = (16, 32, 64, 128)
"""Tokens of a block that the tiles can have."""


def _check_out(
    a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, slots: Tensor, block_expert: Tensor,
    block: int, pairs: int, shared: int, bias: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    n = _check(a, a_scale, w, w_scale, slots, block_expert, block, pairs, shared, bias)
    checks.demand("grouped_gemm", "out", out, (pairs, n), torch.bfloat16)
    checks.demand_row_major("grouped_gemm", out=out)
    checks.demand_device("grouped_gemm", "w", w.device, out=out)


@grouped_gemm.register_fake
def _(
    a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, slots: Tensor, block_expert: Tensor,
    block: int, pairs: int, shared: int, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    n = _check(a, a_scale, w, w_scale, slots, block_expert, block, pairs, shared, bias)
    return torch.empty((pairs, n), dtype=torch.bfloat16, device=a.device)


@grouped_gemm_out.register_fake
def _(
    a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, slots: Tensor, block_expert: Tensor,
    block: int, pairs: int, shared: int, bias: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    _check_out(a, a_scale, w, w_scale, slots, block_expert, block, pairs, shared, bias, out)
