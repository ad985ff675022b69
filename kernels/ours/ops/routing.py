"""Alignment and the top-k sum as ops."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_parity.kernels.ours import steps
from moe_parity.kernels.ours.arguments import OUTPUTS
from moe_parity.kernels.ours.ops import checks
from moe_parity.references.errors import ParityError


@torch.library.custom_op("moe_parity::align", mutates_args=())
def align(ids: Tensor, first: int, experts: int, block: int) -> tuple[Tensor, Tensor]:
    """Return slots int32 [blocks * block] and block_expert int32 [blocks].  See ``steps.align``.

    ``ids`` [M, k] are int32 or int64, contiguous.  Slots of blocks that are not used are not
    written.
    """
    _check_align(ids, first, experts, block)
    made = steps.align(ids, first, experts, block)
    return made.slots, made.block_expert


@torch.library.custom_op("moe_parity::combine", mutates_args=())
def combine(
    rows: Tensor, weights: Tensor | None, ids: Tensor, first: int, experts: int,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Sum bf16 rows [M * k, H] or [M, k, H] to [M, H], bf16, fp16 or fp32; weights None are ones.

    See ``steps.combine``.
    """
    out = _empty_sum(rows, weights, ids, first, experts, out_dtype)
    steps.combine(rows, weights, ids, first, experts, out)
    return out


@torch.library.custom_op("moe_parity::combine_out", mutates_args=("out",))
def combine_out(
    rows: Tensor, weights: Tensor | None, ids: Tensor, first: int, experts: int, out: Tensor
) -> None:
    """Sum into ``out`` [M, H], whose rows are contiguous.  See :func:`combine`."""
    _check_combine_out(rows, weights, ids, first, experts, out)
    inputs = {"rows": rows, "weights": weights, "ids": ids}
    checks.demand_apart("combine", {"out": out}, inputs)
    steps.combine(rows, weights, ids, first, experts, out)


def _check_align(ids: Tensor, first: int, experts: int, block: int) -> None:
    checks.demand_rank("align", "ids", ids, "[M, k]")
    checks.demand("align", "ids", ids, ids.shape, *checks.IDS)
    checks.demand_row_major("align", ids=ids)
    if first < 0 or experts < 1:
        raise ParityError(
            f"align: first must be a global expert id and experts positive, got {first} and "
            f"{experts}."
        )
    if block < 1 or block & (block - 1):
        raise ParityError(f"align: block must be a power of two, got {block}.")


def _check_combine(
    rows: Tensor, weights: Tensor | None, ids: Tensor, first: int, experts: int, dtype: torch.dtype
) -> tuple[int, int]:
    """Return M and H."""
    op = "combine"
    checks.demand_rank(op, "ids", ids, "[M, k]")
    checks.demand(op, "ids", ids, ids.shape, *checks.IDS)
    if rows.dim() not in (2, 3):
        raise ParityError(
            f"{op}: rows must be [M * k, H] or [M, k, H], got shape {list(rows.shape)}."
        )
    tokens, k = ids.shape
    columns = rows.shape[-1]
    shape = (tokens * k, columns) if rows.dim() == 2 else (tokens, k, columns)
    checks.demand(op, "rows", rows, shape, torch.bfloat16)
    if weights is not None:
        checks.demand(op, "weights", weights, ids.shape, torch.float32)
    if dtype not in OUTPUTS:
        raise ParityError(f"{op}: the output is bf16, fp16 or fp32, not {dtype}.")
    if first < 0 or experts < 0 or columns < 1:
        raise ParityError(
            f"{op}: first and experts must not be negative and H positive, got {first}, {experts} "
            f"and {columns}."
        )
    checks.demand_row_major(op, rows=rows, weights=weights, ids=ids)
    checks.demand_device(op, "rows", rows.device, weights=weights, ids=ids)
    return tokens, columns


def _check_combine_out(
    rows: Tensor, weights: Tensor | None, ids: Tensor, first: int, experts: int, out: Tensor
) -> None:
    shape = _check_combine(rows, weights, ids, first, experts, out.dtype)
    checks.demand("combine", "out", out, shape, out.dtype)
    checks.demand_rows("combine", out=out)
    checks.demand_device("combine", "rows", rows.device, out=out)


def _empty_sum(
    rows: Tensor, weights: Tensor | None, ids: Tensor, first: int, experts: int, dtype: torch.dtype
) -> Tensor:
    shape = _check_combine(rows, weights, ids, first, experts, dtype)
    return torch.empty(shape, dtype=dtype, device=rows.device)


@align.register_fake
def _(ids: Tensor, first: int, experts: int, block: int) -> tuple[Tensor, Tensor]:
    _check_align(ids, first, experts, block)
    blocks = steps.block_bound(ids.numel(), experts, block)
    slots = torch.empty(blocks * block, dtype=torch.int32, device=ids.device)
    return slots, torch.empty(blocks, dtype=torch.int32, device=ids.device)


@combine.register_fake
def _(
    rows: Tensor, weights: Tensor | None, ids: Tensor, first: int, experts: int,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return _empty_sum(rows, weights, ids, first, experts, out_dtype)


@combine_out.register_fake
def _(
    rows: Tensor, weights: Tensor | None, ids: Tensor, first: int, experts: int, out: Tensor
) -> None:
    _check_combine_out(rows, weights, ids, first, experts, out)
