"""Quantized rows laid out by expert; where their live rows end is known on the device alone.

Expert 0 starts at row 0, each other one at the end of the one before rounded up to the alignment:
DeepGEMM's prefix-sum layout, so that its GEMM takes the same tensors.  How many rows there are is
bounded by metadata; how many are live is known to the GPU alone, so a call never waits and may be
captured in a CUDA graph, and each replay takes the routing as it is by then.  Rows that are not
live are not written: memory that a call makes itself holds anything there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from moe_parity.kernels.ours import align_kernels, permute_kernels
from moe_parity.kernels.ours.arguments import word
from moe_parity.kernels.ours.dispatch import ALIGNMENT, ALIGNMENTS
from moe_parity.kernels.ours.steps import block_bound
from moe_parity.kernels.virtual_gpu import dispatch
from moe_parity.references.arithmetic.formats import BLOCK, ScaleLayout
from moe_parity.references.errors import ParityError

TILE = 512
"""Pairs that one step of a program looks at."""

COLUMNS = 1024
"""The most codes of a row that one program copies."""


class Scales(StrEnum):
    """How the scales of permuted rows are stored."""

    TMA = "tma"
    """fp32, column-major, columns a multiple of 16 bytes apart: what an SM90 GEMM reads."""
    PACKED = "packed"
    """int32 words of four UE8M0 exponents, laid out likewise: SM100's layout.  Our GEMM does not
    take it, and no GPU was asked: the reference and the virtual GPU alone vouch for it."""


@dataclass(frozen=True, kw_only=True)
class PrefixRows:
    """Rows of all experts in one buffer of R rows, which is a bound from metadata alone."""

    codes: Tensor
    """uint8 [R, K]."""
    scales: Tensor
    """fp32 [R, K / 128] with strides (1, R rounded up to 4), or int32 [R, ceil(K / 512)]."""
    ends: Tensor
    """int32 [E]: the exclusive end of each expert's live rows; its start where it has none."""
    place: Tensor
    """int32 [P]: the row of each (token, k) pair, -1 where this rank does not own it."""
    alignment: int

    @staticmethod
    def empty(
        pairs: int,
        experts: int,
        width: int,
        *,
        alignment: int = ALIGNMENT,
        layout: Scales | str = Scales.TMA,
        device: torch.device | str = "cpu",
    ) -> PrefixRows:
        """Return memory for any routing of so many pairs; nothing in it is written."""
        rows = row_bound(pairs, experts, alignment)
        shape, strides, dtype = scale_memory(rows, width, word(Scales, layout, "permute: layout"))
        return PrefixRows(
            codes=torch.empty((rows, width), dtype=torch.uint8, device=device),
            scales=torch.empty_strided(shape, strides, dtype=dtype, device=device),
            ends=torch.empty(experts, dtype=torch.int32, device=device),
            place=torch.empty(pairs, dtype=torch.int32, device=device),
            alignment=alignment,
        )


def row_bound(pairs: int, experts: int, alignment: int = ALIGNMENT) -> int:
    """Return the most rows that so many pairs can take, whichever experts they are of.

    Raises ParityError for an alignment that there is not.
    """
    return block_bound(pairs, experts, check_alignment(alignment)) * alignment


def check_alignment(alignment: int) -> int:
    """Return an alignment; raises ParityError where it is not one of ``ALIGNMENTS``."""
    if type(alignment) is not int or alignment not in ALIGNMENTS:
        names = ", ".join(str(rows) for rows in ALIGNMENTS)
        raise ParityError(f"prefix sums: the alignment must be one of {names}, got {alignment!r}.")
    return alignment


def scale_memory(
    rows: int, width: int, layout: Scales
) -> tuple[tuple[int, int], tuple[int, int], torch.dtype]:
    """Return shape, strides and dtype of the scales of ``rows`` rows of ``width`` codes."""
    groups = width // BLOCK
    if layout is Scales.PACKED:
        words = -(-groups // 4)
        return (rows, words), ScaleLayout.TMA.strides(rows, words), torch.int32
    return (rows, groups), ScaleLayout.TMA.strides(rows, groups), torch.float32


def permute(
    codes: Tensor,
    scales: Tensor,
    ids: Tensor,
    first: int,
    experts: int,
    *,
    alignment: int = ALIGNMENT,
    layout: Scales | str = Scales.TMA,
    out: PrefixRows | None = None,
) -> PrefixRows:
    """Copy each pair's row to where its expert reads it.

    ``codes`` uint8 [M, K] in rows of any pitch, K a multiple of 128, ``scales`` fp32 [M, K / 128]
    of any strides; ``ids`` [M, k], int32 or int64 and contiguous, are global expert ids: those that
    are not in first .. first + E are dropped.  Inside an expert pairs keep their order.  ``layout``
    says how scales are stored; ``packed`` keeps the exponents of powers of two and drops all else.

    ``out`` is memory of the caller's, of the alignment and the layout that it was made for
    (:meth:`PrefixRows.empty`); live rows, ends and places are written, and nothing else.  Raises
    ParityError, in a sentence, for bad input; looks at metadata alone.
    """
    _check_operands(codes, scales, ids, experts)
    (tokens, width), k, pairs = codes.shape, ids.shape[1], ids.numel()
    stored = word(Scales, layout, "permute: layout")
    if out is None:
        out = PrefixRows.empty(
            pairs, experts, width, alignment=alignment, layout=stored, device=codes.device
        )
    _check_out(out, codes, pairs, experts, check_alignment(alignment), stored)
    dispatch(
        align_kernels.count_kernel, (experts,), ids, out.ends, pairs, first, experts,
        TILE=TILE, num_warps=4,
    )  # fmt: skip
    dispatch(
        permute_kernels.ends_kernel, (1,), out.ends, experts, ALIGN=alignment, TILE=TILE,
        num_warps=4,
    )  # fmt: skip
    if pairs == 0:
        return out
    dispatch(
        permute_kernels.place_kernel, (experts,), ids, out.ends, out.place, pairs, first, experts,
        ALIGN=alignment, TILE=TILE, num_warps=4,
    )  # fmt: skip
    columns = min(COLUMNS, max(512, 1 << (width - 1).bit_length()))
    dispatch(
        permute_kernels.copy_kernel, (tokens, -(-width // columns)),
        codes, scales, out.place, out.codes, out.scales,
        codes.stride(0), *scales.stride(), out.codes.stride(0), *out.scales.stride(),
        WIDTH=width, TOPK=k, LANES=1 << (k - 1).bit_length(), COLUMNS=columns,
        PACKED=stored is Scales.PACKED, num_warps=4,
    )  # fmt: skip
    return out


def _check_operands(codes: Tensor, scales: Tensor, ids: Tensor, experts: int) -> None:
    if codes.dim() != 2 or codes.dtype is not torch.uint8 or codes.stride(1) != 1:
        raise ParityError(
            f"permute: codes must be uint8 [M, K] with contiguous rows, got {codes.dtype} "
            f"{list(codes.shape)} with strides {codes.stride()}."
        )
    tokens, width = codes.shape
    if width % BLOCK or not width:
        raise ParityError(f"permute: K = {width} must be a positive multiple of {BLOCK}.")
    if scales.dtype is not torch.float32 or tuple(scales.shape) != (tokens, width // BLOCK):
        raise ParityError(
            f"permute: scales must be float32 {[tokens, width // BLOCK]}, got {scales.dtype} "
            f"{list(scales.shape)}."
        )
    if ids.dim() != 2 or ids.shape[0] != tokens or ids.dtype not in (torch.int32, torch.int64):
        raise ParityError(
            f"permute: ids must be int32 or int64 [{tokens}, k], got {ids.dtype} {list(ids.shape)}."
        )
    if not ids.is_contiguous():
        raise ParityError(f"permute: ids must be contiguous, strides {ids.stride()}.")
    if experts < 1:
        raise ParityError(f"permute: a rank has at least one expert, not {experts}.")
    for name, tensor in (("scales", scales), ("ids", ids)):
        if tensor.device != codes.device:
            raise ParityError(
                f"permute: {name} are on {tensor.device}, the codes on {codes.device}; use one "
                "device."
            )


def _check_out(
    out: PrefixRows, codes: Tensor, pairs: int, experts: int, alignment: int, layout: Scales
) -> None:
    if out.alignment != alignment:
        raise ParityError(
            f"permute: out was made for an alignment of {out.alignment}, and {alignment} is asked "
            "for; a buffer of one value that is read with another takes the wrong experts."
        )
    rows, width = row_bound(pairs, experts, alignment), codes.shape[1]
    shape, strides, dtype = scale_memory(rows, width, layout)
    wanted = {
        "codes": (out.codes, (rows, width), (width, 1), torch.uint8),
        "scales": (out.scales, shape, strides, dtype),
        "ends": (out.ends, (experts,), (1,), torch.int32),
        "place": (out.place, (pairs,), (1,), torch.int32),
    }
    for name, (tensor, size, steps, kind) in wanted.items():
        if (
            tuple(tensor.shape) != size or tensor.dtype is not kind
            or (tensor.numel() > 0 and tensor.stride() != steps) or tensor.device != codes.device
        ):  # fmt: skip
            raise ParityError(
                f"permute: out.{name} must be {kind} {list(size)} with strides {steps} on "
                f"{codes.device}, got {tensor.dtype} {list(tensor.shape)} with strides "
                f"{tensor.stride()} on {tensor.device}."
            )
